"""``draftsim check``: the literature's closed forms against simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.drafted import load_recording
from commands.common.options import DraftedOption, LatencyOption, TraceOption
from commands.common.output import JsonOption, OutOption, emit, note
from commands.common.printed import print_table
from commands.common.progress import working
from commands.common.written import Shown
from traces.store.recordings import DEFAULT_TRACE

if TYPE_CHECKING:
    import pandas as pd


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
    """Check the analytic speedup formulas against simulation, and find where they break.

    Rows that begin with "recorded" compare the i.i.d. formulas with a real recording. They show
    the error of those formulas and never fail the command.
    """
    from simulator.check import run_checks

    recording = load_recording(trace, latency, source)
    table = recording.priced()
    with working("simulating the closed forms"):
        rows = run_checks(recording.trace, table, tokens=tokens)
    recorded = rows["formula"].str.startswith("recorded")
    failed = rows[~rows["ok"] & ~recorded]
    worst = float(rows.loc[~recorded, "z"].abs().max())
    count = int((~recorded).sum())
    others = int(recorded.sum())
    also = f"; {others} rows compare them with {recording.said}" if others else ""
    note(
        f"{count - len(failed)} of {count} closed forms agree with simulation (largest difference "
        f"{worst:.1f} standard errors){also}"
    )
    shown = Shown(_worst(rows), "the largest difference of each formula from simulation")
    emit(
        "check", rows, json, out=out, tables=lambda: [shown],
        printed=lambda: print_table(shown.rows, title=f"{shown.title}; --json has every setting"),
    )  # fmt: skip
    if len(failed):
        note(f"these disagree with simulation: {', '.join(failed['formula'])}")
        raise typer.Exit(1)


def _worst(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per formula: the settings tried, and the largest difference from simulation."""
    table = []
    for formula, own in rows.groupby("formula", sort=False):
        worst = own.iloc[int(own["z"].abs().argmax())]
        table.append({
            "formula": formula, "settings": len(own), "closed form": worst["closed_form"],
            "simulated": worst["simulated"], "standard errors": worst["z"],
            "agrees": bool(own["ok"].all()),
        })  # fmt: skip
    return table
