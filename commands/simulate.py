"""``draftsim simulate`` and ``draftsim list``: replay policies and price their rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.inputs import (
    BUNDLED,
    LatencyOption,
    PolicyOption,
    TraceOption,
    load_latency,
    load_policies,
    load_trace,
    replay_all,
)
from commands.output import JsonOption, emit, note

SHOWN = (
    "policy", "tokens", "rounds", "block_efficiency", "acceptance_rate", "wall_s", "speedup",
    "speedup_lo", "speedup_hi", "fidelity",
)  # fmt: skip


def simulate(
    trace: TraceOption = BUNDLED,
    latency: LatencyOption = None,
    policy: PolicyOption = None,
    by_category: Annotated[
        bool, typer.Option("--by-category", help="One row per policy and prompt category.")
    ] = False,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Count prefill in times and speedups.")
    ] = False,
    robustness: Annotated[
        bool,
        typer.Option(
            "--robustness", help="Instead: mean and sd over twelve initial draft lengths."
        ),
    ] = False,
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples over prompts.")] = 2000,
    plots: Annotated[
        Path | None, typer.Option(help="Also draw the results as PNG files into this folder.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict every policy's speedup from a recorded trace and measured latencies."""
    from simulator.summary import summarize, summarize_by_category, to_rows

    recorded = load_trace(trace)
    table = load_latency(latency, trace)
    if robustness:
        from commands.figures import robustness_families
        from simulator.robustness import robustness as spread_over
        from simulator.robustness import speedup_by_gamma

        families = robustness_families(recorded.max_gamma or 24)
        emit("simulate", spread_over(speedup_by_gamma(recorded, families, table)), json)
        return
    chosen = load_policies(policy, recorded, table)
    # Plain decoding is the first row of every summary already.
    logs = replay_all(recorded, [c for c in chosen if c[0] != "autoregressive"] or chosen)
    summary = summarize_by_category if by_category else summarize
    frame = summary(logs, table, resamples=resamples, prefill=prefill)
    emit("simulate", to_rows(frame), json, show=[*(["category"] if by_category else []), *SHOWN])
    if plots is not None:
        from commands.figures import save_all

        for path in save_all(recorded, table, logs, plots):
            note(f"wrote {path}")


def list_recordings(json: JsonOption = None) -> None:
    """Show the bundled recordings."""
    from traces.recordings import recordings

    rows = [{"name": r.name, "summary": r.summary} for r in recordings()]
    emit("list", rows, json)
