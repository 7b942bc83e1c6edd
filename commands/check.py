"""``draftsim check``: the literature's closed forms against simulation."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.drafted import DraftedOption, load_recording
from commands.common.inputs import DEFAULT_TRACE, LatencyOption, TraceOption
from commands.common.output import JsonOption, OutOption, emit, note


def check(
    trace: TraceOption = DEFAULT_TRACE,
    latency: LatencyOption = None,
    source: DraftedOption = None,
    tokens: Annotated[
        int, typer.Option(min=1000, help="Length of each synthetic output.")
    ] = 20_000,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Check the analytic speedup formulas against simulation, and where they break.

    Rows that begin with "recorded" hold the i.i.d. formulas against a real recording; they
    show how far off those are, and do not fail the command.
    """
    from simulator.check import run_checks

    recording = load_recording(trace, latency, source)
    rows = run_checks(recording.trace, recording.priced(), tokens=tokens)
    emit("check", rows, json, out=out)
    failed = rows[~rows["ok"] & ~rows["formula"].str.startswith("recorded")]
    if len(failed):
        note(f"{len(failed)} formula(s) disagree with simulation: {', '.join(failed['formula'])}")
        raise typer.Exit(1)
