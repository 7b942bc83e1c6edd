"""``draftsim papers``: the four papers' tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.inputs import BUNDLED, LatencyOption, TraceOption, load_latency, load_trace
from commands.output import JsonOption, emit, note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.papers import Sampled


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
    sampled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Run folders of the same pair profiled with --exit-layers --temperature T; "
            "repeatable. The trace's own counts as well.",
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
        sampled_runs([*([folder] if folder else []), *(sampled or [])]),
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


def sampled_runs(folders: Sequence[Path]) -> list[Sampled]:
    """What the run folders hold of early exits along sampled outputs, one per temperature."""
    from commands.sources import load_recordings
    from simulator.papers import Sampled
    from traces.files import read_trace

    found: dict[float, Sampled] = {}
    for folder in folders:
        path = folder / "sampled.parquet"
        if not path.is_file():
            continue
        trace = read_trace(path)
        recordings = load_recordings(str(path), trace)
        if recordings.exits is not None:
            found.setdefault(trace.temperature, Sampled(trace, recordings))
    return list(found.values())
