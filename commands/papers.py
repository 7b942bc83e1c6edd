"""``draftsim papers``: the four papers' tables beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commands.inputs import BUNDLED, LatencyOption, TraceOption, load_latency, load_trace
from commands.output import JsonOption, emit, note
from traces.errors import DraftsimError


def papers(
    trace: TraceOption = BUNDLED,
    latency: LatencyOption = None,
    rounds: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Rounds that `profile --verify` recorded, preferred to a replay; a run folder "
            "for all of its own. Default: those beside the trace.",
        ),
    ] = None,
    table: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only tables whose name contains this.")
    ] = None,
    weights: Annotated[
        bool, typer.Option(help="Also list the cells that only the papers' models can fill.")
    ] = True,
    json: JsonOption = None,
) -> None:
    """Put every published table of CM-ASD, SpecBound, CSD and GammaTune beside ours.

    Each row says how the two relate: the same quantity (computed from the paper's own
    numbers), the same experiment on our pair, or a cell that needs the paper's weights.
    Notes say where a paper contradicts itself.
    """
    from simulator.papers import CONTRADICTIONS, Ours, side_by_side
    from traces.outputs import find_runs, read_run
    from traces.recordings import folder_of
    from traces.sources.base import Recordings
    from traces.sources.files import read_recordings

    recorded, folder = load_trace(trace), folder_of(trace)
    files = [f for path in (rounds or ([folder] if folder else [])) for f in find_runs(path)]
    ours = Ours(
        recorded,
        load_latency(latency, trace),
        [read_run(file) for file in files],
        Recordings() if folder is None else read_recordings(folder),
    )
    rows = [
        row
        for row in side_by_side(ours)
        if (table is None or table.lower() in row.table.lower())
        and (weights or row.kind != "needs their weights")
    ]
    if not rows:
        raise DraftsimError(f"--table {table!r} names no table of the papers: try SpecBound")
    emit("papers", [row._asdict() for row in rows], json)
    shown = {row.table for row in rows}
    for name, text in CONTRADICTIONS:
        if table is None or name in shown:
            note(f"{name}: {text}")
