"""The figures of ``draftsim serve``: curves over batch sizes or loads, and speedup grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.serve.loads import ONE_STREAM

if TYPE_CHECKING:
    from policies.batch.base import BatchPolicy
    from policies.core import DraftPolicy
    from simulator.serving import Scenario
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable


def draw(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, DraftPolicy | BatchPolicy],
    scenarios: Sequence[Scenario],
) -> list[Path]:
    """Draw what the rows show; the paths written.

    Over batch sizes that is latency against throughput, and per policy the speedup over
    batch and context; over loads, latency against load; with either, the batch and the
    cache blocks in use over time at the largest size or load.
    """
    from policies import Autoregressive
    from simulator.plots import save
    from simulator.serving import speedup_grid
    from simulator.serving.outcome import plots

    said = assumption(latency, max(s.limits.max_batch for s in scenarios))
    finished = [row for row in rows if row["requests"]]
    if not finished:
        note("no request finished: there is nothing to draw")
        return []
    base = scenarios[0]
    last = [row for row in finished if row["rate"] == finished[-1]["rate"]]
    if base.arrivals.concurrency is None:
        written = [save(plots.plot_over_time(last), folder / "over_time.png", label=said)]
        loads = {row["rate"] for row in finished}
        if loads == {None}:
            note("the arrivals span no time: there is no load to draw latency against")
            return written
        names = {row["policy"] for row in finished}
        baseline = "autoregressive" if "autoregressive" in names else None
        for metric, name in (("e2e_s", "e2e"), ("tpot_s", "tpot"), ("ttft_s", "ttft")):
            # No time per output token where every output is one token long.
            drawn = [row for row in finished if row[metric]["mean"] == row[metric]["mean"]]
            if drawn:
                figure = plots.plot_latency_load(drawn, metric, baseline)
                written.append(save(figure, folder / f"load_{name}.png", label=said))
        return written
    last = [row for row in finished if row["batch"] == finished[-1]["batch"]]
    written = [
        save(
            plots.plot_latency_throughput(finished), folder / "latency_throughput.png", label=said
        ),
        save(plots.plot_over_time(last), folder / "over_time.png", label=said),
    ]
    if base.mode in ONE_STREAM:
        return written
    batches = [s.limits.max_batch for s in scenarios]
    contexts = _contexts(trace, latency)
    small = replace(base, requests=max(64, 2 * max(batches)), replications=1, replicas=1)
    for i, (name, policy) in enumerate(policies.items()):
        if isinstance(policy, Autoregressive):
            continue
        grid = speedup_grid(trace, latency, policy, Autoregressive(), batches, contexts, small)
        figure = plots.plot_speedup_grid(grid, batches, contexts, name)
        written.append(save(figure, folder / f"speedup_{i}_{_file_name(name)}.png", label=said))
    return written


def _contexts(trace: Trace, latency: LatencyTable) -> list[int]:
    """Prompt lengths for the grid: the measured contexts, or the recording's own around."""
    cells = latency.cells
    own = cells[(cells["model"] == "target") & (cells["phase"] == "forward")]["context"]
    measured = sorted({int(c) for c in own if c > 0})
    return measured or [64, 256, 1024, 4096]


def _file_name(policy: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in policy)


def assumption(latency: LatencyTable, batch: int) -> str:
    """What a plot of figures at `batch` is labelled with; empty where nothing was assumed."""
    said = latency.said_batch_free(batch)
    return f"taken to cost nothing: {said}" if said else ""
