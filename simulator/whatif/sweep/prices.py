"""The prices of a sweep's rounds: cost ratios, tables, contexts and GPUs.

A batch whose KV cache exceeds the memory of its GPU has no price.  Only composed tables say which
GPU and models they are of.  A sequence is taken to hold its whole prompt and output, at their means
over the recording's requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.hardware.formats import WeightFormat
from simulator.hardware.scaling import carry_over, home_device
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.operators.devices import find_device
from traces.operators.memory import BLOCK, UTILISATION, kv_blocks
from traces.replay.always import passes_always

ANY = "any"
"""The device of a cost ratio."""


class DeviceTable(NamedTuple):
    """A latency table on one device."""

    latency: str
    """Name of the table that was measured or assumed."""
    gpu: str
    """Device whose seconds these are: the data-sheet entry's name where there is one."""
    scaled: bool
    """True if they were carried over from another device."""
    error: float
    """Median relative error of the carrying model against published figures; 0 unless `scaled`."""
    fit_error: float
    """The same on the passes measured, which it was fitted to."""
    table: LatencyTable


@dataclass(frozen=True)
class Prices:
    """The costs at which every round log is priced.

    Parameters
    ----------
    ratios:
        Cost ratios c = T_draft / T_target, with verification at `verify` target passes.
    latencies:
        Tables by name, each read at every context of `contexts` (None: as recorded).
    gpus:
        Devices, by their data-sheet names, that each table is carried over to (see
        `simulator.hardware.scaling.carry_over`); none leaves them on the device measured.
    weights:
        By role, formats that the models' weights are kept in instead of those measured.
    always:
        Draft passes that every round runs, whatever it drafts (`traces.replay.always`).

    Raises
    ------
    DraftsimError
        If there is no price, one is impossible, a GPU is not known, or a table cannot be
        carried over.
    """

    ratios: Sequence[float] = ()
    latencies: Mapping[str, LatencyTable] = field(default_factory=dict)
    contexts: Sequence[int | None] = (None,)
    verify: float = 1.0
    gpus: Sequence[str] = ()
    weights: Mapping[str, WeightFormat] = field(default_factory=dict)
    always: int = 0

    def __post_init__(self) -> None:
        if not len(self.ratios) and not self.latencies:
            raise DraftsimError("nothing to price with: give --c or --latency")
        for c in self.ratios:
            if not 0 <= c < np.inf:
                raise DraftsimError(f"cost ratio c is {c}, expected a finite number >= 0")
        if not 0 < self.verify < np.inf:
            raise DraftsimError(f"--verify-ratio is {self.verify}, expected > 0 target passes")
        contexts = [k for k in self.contexts if k is not None]
        if contexts and not self.latencies:
            raise DraftsimError("--context needs a latency table: give --latency")
        if min(contexts, default=0) < 0:
            raise DraftsimError(f"context is {min(contexts)}, expected 0 tokens or more")
        if self.gpus and not self.latencies:
            raise DraftsimError("--gpu needs a latency table to start from: give --latency")
        if self.weights and not self.latencies:
            raise DraftsimError("--weights needs a latency table to start from: give --latency")
        _ = self.tables  # refused now, not in a worker

    @property
    def passes_always(self) -> int:
        """Draft passes of every round: as asked, or as a drafter of the tables runs them."""
        return max([self.always, *(passes_always(at.table) for at in self.tables)])

    @property
    def count(self) -> int:
        """Rows of every log priced."""
        return len(self.ratios) + len(self.tables) * len(self.contexts)

    @cached_property
    def tables(self) -> tuple[DeviceTable, ...]:
        """Every table on every device, in the order of the rows priced."""
        if not self.gpus and not self.weights:
            return tuple(
                DeviceTable(n, device_name(t), *_scaling(t), t) for n, t in self.latencies.items()
            )
        devices = {d.name: d for d in map(find_device, self.gpus)}
        found = []
        for name, table in self.latencies.items():
            try:
                home = home_device(table)
                for gpu, device in (devices or {home.name: home}).items():
                    same = device == home and not self.weights
                    there = table if same else carry_over(table, device, weights=self.weights)
                    found.append(DeviceTable(name, gpu, *_scaling(there), there))
            except DraftsimError as error:
                raise DraftsimError(f"{name}: {error}") from None
        return tuple(found)


def device_name(latency: LatencyTable) -> str:
    """Return the data-sheet name of a table's device where there is one, else as it was
    recorded.
    """
    try:
        return home_device(latency).name
    except DraftsimError:
        return str(latency.meta.get("device") or "unknown")


def _scaling(latency: LatencyTable) -> tuple[bool, float, float]:
    """Return whether a table was carried over, and the errors of its carrying model."""
    note = latency.meta.get("scaled")
    if not note:
        return False, 0.0, 0.0
    if not isinstance(note, Mapping):
        return True, float("nan"), float("nan")
    return True, float(note["published_median"]), float(note["fit_error"])


def blocks_of(prices: Prices) -> dict[tuple[str, str], int]:
    """Return the cache blocks of each composed table, by its name and its GPU's."""
    found = {}
    for at in prices.tables:
        if "composed" in at.table.meta and not at.scaled:
            try:
                found[at.latency, at.gpu] = kv_blocks(at.table.meta).blocks
            except DraftsimError:  # the weights alone leave no memory
                found[at.latency, at.gpu] = 0
    return found


def needed_blocks(frame: pd.DataFrame, trace: Trace) -> npt.NDArray[np.int64]:
    """Return the cache blocks that the batch of each row holds, (rows,)."""
    prompt = float(np.mean([r.prompt_length for r in trace.requests]))
    output = float(np.mean([r.tokens for r in trace.requests]))
    held = np.ceil((frame["context"].fillna(prompt).to_numpy(float) + output) / BLOCK)
    return np.asarray(frame["batch"].to_numpy(float) * held, dtype=np.int64)


def cache_fits(frame: pd.DataFrame, prices: Prices, trace: Trace) -> npt.NDArray[np.bool_]:
    """Return True for each row whose cache fits, or whose latencies do not say the memory."""
    blocks = blocks_of(prices)
    pairs = zip(frame["latency"].astype(str), frame["gpu"].astype(str), strict=True)
    held = np.array([blocks.get(pair, math.inf) for pair in pairs])
    return np.asarray(needed_blocks(frame, trace) <= held)


def fitting(frame: pd.DataFrame, prices: Prices, trace: Trace) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows whose cache fits, and a sentence for each table and context with others.

    Raises DraftsimError if no batch's cache fits.
    """
    blocks = blocks_of(prices)
    large = frame[~frame["cache_fits"]].assign(needed=lambda rows: needed_blocks(rows, trace))
    large = large.sort_values("batch", kind="stable")
    said = []
    for row in large.drop_duplicates(["latency", "gpu", "context"]).to_dict("records"):
        at = "" if math.isnan(row["context"]) else f" and context {row['context']:g}"
        said.append(
            f"{row['latency']}: left out from batch {row['batch']}{at}: its KV cache needs "
            f"{row['needed']} blocks of {BLOCK} tokens, and {blocks[row['latency'], row['gpu']]} "
            f"fit at a memory utilisation of {UTILISATION:g}"
        )
    if len(large) == len(frame):
        raise DraftsimError(said[0])
    return frame[frame["cache_fits"]], said
