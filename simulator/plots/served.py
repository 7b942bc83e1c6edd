"""The figures of served rows: curves over batch sizes or loads, and maps of speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from simulator.chosen import Say, silent
from simulator.plots import save_all_kinds
from simulator.plots import serving as plots
from simulator.serving import Scenario, over_batches, sweep
from simulator.serving.station import OVERLAPPED
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

MOST_CONTEXTS = 5
"""Prompt lengths of a map: as many columns as can be read."""
APART = 1.3
"""Prompt lengths nearer to each other than this factor share a column."""


def draw(
    folder: Path, rows: Sequence[Mapping[str, Any]], trace: Trace, latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy], scenarios: Sequence[Scenario],
    title: str = "", say: Say = silent,
) -> list[Path]:  # fmt: skip
    """Draw the rows, with `title` below each figure, and return the PNG files.

    Over batch sizes these are latency against throughput, and the speedup of every policy by batch
    and prompt length; over loads, latency against load; with either, tokens/s of a user against
    tokens/s in all, and the batch and the cache blocks in use over time at the largest size or
    load.  `say` is told what cannot be drawn.
    """
    said = assumption(latency, max(s.limits.max_batch for s in scenarios))

    def save(figure: Figure, name: str) -> Path:
        return save_all_kinds(figure, folder / f"{name}.png", said, title)

    finished = [row for row in rows if row["requests"]]
    if not finished:
        say("no request finished: there is nothing to draw")
        return []
    base = scenarios[0]
    last = [row for row in finished if row["rate"] == finished[-1]["rate"]]
    if base.arrivals.concurrency is None:
        written = [save(plots.plot_over_time(last), "over_time")]
        loads = {row["rate"] for row in finished}
        if loads == {None}:
            say("the arrivals span no time: there is no load to draw latency against")
            return written
        written += _pareto(finished, save)
        names = {row["policy"] for row in finished}
        baseline = "autoregressive" if "autoregressive" in names else None
        for metric, name in (("e2e_s", "e2e"), ("tpot_s", "tpot"), ("ttft_s", "ttft")):
            drawn = [row for row in finished if row[metric]["mean"] == row[metric]["mean"]]
            if drawn:
                figure = plots.plot_latency_load(drawn, metric, baseline)
                written.append(save(figure, f"load_{name}"))
        return written
    last = [row for row in finished if row["batch"] == finished[-1]["batch"]]
    written = [
        *_pareto(finished, save),
        save(plots.plot_latency_throughput(finished), "latency_throughput"),
        save(plots.plot_over_time(last), "over_time"),
    ]
    if base.mode in OVERLAPPED:
        return written
    grids = _speedups(finished, trace, latency, policies, scenarios)
    if grids:
        columns = ["as\nrecorded", *map(str, _contexts(trace, latency))]
        figure = plots.plot_speedups(grids, [s.limits.max_batch for s in scenarios], columns)
        written.append(save(figure, "speedup"))
    return written


def _pareto(rows: Sequence[Mapping[str, Any]], save: Callable[[Figure, str], Path]) -> list[Path]:
    """Draw tokens/s of a user against those of all; nothing if no output has two tokens."""
    spoken = [row for row in rows if row["tpot_s"]["mean"] > 0]
    return [save(plots.plot_pareto(spoken), "pareto")] if spoken else []


def _speedups(
    rows: Sequence[Mapping[str, Any]], trace: Trace, latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy], scenarios: Sequence[Scenario],
) -> dict[str, npt.NDArray[np.float64]]:  # fmt: skip
    """Return the speedup of every policy that drafts, by batch and prompt length.

    The first column is that of the rows.  In the others every prompt has one length, the recorded
    acceptance is taken to hold there, and the same scenario is served with fewer requests.
    """
    batches = [s.limits.max_batch for s in scenarios]
    fewer = max(64, 4 * max(batches))
    small = over_batches(replace(scenarios[0], requests=fewer, replications=1, replicas=1), batches)
    found = [rows]
    for context in _contexts(trace, latency):
        requests = [replace(r, prompt_length=context, prompt_ids=None) for r in trace.requests]
        found.append(sweep(replace(trace, requests=requests), latency, policies, small))
    drafting = [n for n, p in policies.items() if not isinstance(p, Autoregressive)]
    grids = {name: np.full((len(batches), len(found)), np.nan) for name in drafting}
    for j, column in enumerate(found):
        for row in column:
            if row["policy"] in grids:
                grids[row["policy"]][batches.index(row["batch"]), j] = row["speedup"]
    return grids


def _contexts(trace: Trace, latency: LatencyTable) -> list[int]:
    """Return up to `MOST_CONTEXTS` measured prompt lengths, spread evenly on a log scale."""
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]["context"]
    measured = sorted({int(c) for c in own if c > 0}) or [64, 256, 1024, 4096]
    chosen: list[int] = []
    for wanted in np.geomspace(measured[0], measured[-1], MOST_CONTEXTS):
        nearest = min(measured, key=lambda c: abs(np.log(c / wanted)))
        if not chosen or nearest >= APART * chosen[-1]:
            chosen.append(nearest)
    return chosen


def assumption(latency: LatencyTable, batch: int) -> str:
    """Return the label of a plot of figures at `batch`; empty if nothing was assumed."""
    said = latency.said_batch_free(batch)
    return f"taken to cost nothing: {said}" if said else ""
