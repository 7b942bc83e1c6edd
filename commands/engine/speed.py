"""The speed of an engine in its server, from loops of plain decoding, relative to its own table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from commands.engine.compare import priced_s
from traces.latency.schema import SERVER
from traces.latency.table import LatencyTable

if TYPE_CHECKING:
    from profiler.engines.server.share import ServedRun

OF_PROMPTS = ("prefill", "mixed")
"""Phases of a table that prompts are priced with."""


@dataclass(frozen=True)
class Speed:
    """How much longer an engine takes than a table of it says.

    decoding:
        Of iterations that decode, by the requests that a loop kept.
    prompts:
        Of those with prompts, over all loops.
    """

    decoding: Mapping[int, float]
    prompts: float

    def at(self, batch: float) -> float:
        """Return the speed of decoding `batch` requests: interpolated, and the nearest beyond the
        loops.
        """
        sizes = sorted(self.decoding)
        factors = np.log([self.decoding[size] for size in sizes])
        return float(np.exp(np.interp(batch, sizes, factors)))


def speed_of(controls: Mapping[int, Sequence[ServedRun]], latency: LatencyTable) -> Speed:
    """The engine's seconds in loops of plain decoding, over what `latency` has for them.

    Those that a server adds are no part of it (`profiler.engines.server.share.with_server`).
    """
    from profiler.engines.server.share import known_s
    from simulator.serving.cost.iteration import IterationCost

    cost = IterationCost(latency)
    decoding: dict[int, float] = {}
    of_prompts: list[tuple[float, float]] = []
    for size, runs in controls.items():
        pairs: list[tuple[float, float]] = []
        for step in itertools.chain.from_iterable(run.load.steps for run in runs):
            own_s = sum(step.parts[part] for part in ("schedule", "execute", "update"))
            pair = own_s + known_s(latency, len(step.decoded) or 1), priced_s(step, cost)
            (of_prompts if step.prompts else pairs).append(pair)
        decoding[size] = _ratio(pairs)
    return Speed(decoding, _ratio(of_prompts))


def at_speed(latency: LatencyTable, speed: Speed) -> LatencyTable:
    """`latency` with every cell of the engine's as much slower as its loops were."""
    cells = latency.cells.copy()
    own = cells["model"] != SERVER
    prompts = cells["phase"].isin(OF_PROMPTS)
    by_batch = {batch: speed.at(batch) for batch in cells["batch"].unique().tolist()}
    factors = cells["batch"].map(by_batch).mask(prompts, speed.prompts).where(own, 1.0)
    for column in ("median_s", "spread_s"):
        cells[column] *= factors
    meta = {**latency.meta, "scaled": "by loops of plain decoding"}
    if "control_s" in meta:
        # What a control load says of the machine is in the loops already.
        meta["control_s"] = {k: v for k, v in meta["control_s"].items() if k != "follows"}
    return LatencyTable(cells, meta)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    measured_s, priced = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1, 1)
    return measured_s / priced
