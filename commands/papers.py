"""``draftsim papers`` and ``check``: published tables and formulas compared with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pandas as pd
import typer

from commands.common.options import Inputs, Recorded, TraceOption
from commands.common.output import JsonOption, OutOption, emit, note
from commands.common.printed import cell_text
from commands.common.progress import working
from commands.common.written import Shown
from simulator.check import run_checks
from simulator.executors import results_of
from simulator.papers.compare import side_by_side
from simulator.papers.measured import measured_rows
from simulator.papers.measured.rows import by_study, notes_on
from simulator.papers.ours import Ours, Row
from simulator.published import CONTRADICTIONS, SOURCES
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.early_exit import EarlyExit
from traces.sources.found import find_recordings, read_recordings
from traces.sources.recording import Recordings
from traces.store.files import read_trace
from traces.store.identity import check_folder
from traces.store.outputs import find_runs, read_run
from traces.store.recordings import PAPERS_TRACE, SAMPLED, folder_of, pair_of

TableOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Print only tables or studies whose name has this."),
]


@dataclass(frozen=True)
class PapersInputs(Recorded):
    """The recording that the papers are compared with."""

    trace: TraceOption = PAPERS_TRACE


def tables(
    inputs: PapersInputs,
    rounds: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Use the rounds that `profile decode` recorded instead of a replay: a file, or "
            "a run folder for all of them. Default: those recorded with the trace.",
        ),
    ] = None,
    sampled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Run folder of the same pair, of `profile sources --exit-layers --temperature T "
            "[--top-p P]`; repeatable. The trace's own folder is always read. Default: also the "
            "folders next to it.",
        ),
    ] = None,
    table: TableOption = None,
    missing: Annotated[
        bool, typer.Option(help="Also list the cells that only the papers' models can fill.")
    ] = False,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Compare every published table of CM-ASD, SpecBound, CSD and GammaTune with ours.

    Each row says how the two relate: the same quantity (computed from the paper's own numbers), the
    same experiment on our pair, or a cell that needs the paper's weights. Notes say where a paper
    contradicts itself.
    """
    recording = inputs.load()
    if recording.source is not None:
        raise DraftsimError(
            f"these latencies are those of {recording.trace.source}, and the papers draft with a "
            "draft model: name a recording of one with --trace (`draftsim list`)"
        )
    recorded, folder = recording.trace, folder_of(inputs.trace)
    if folder is not None and rounds is None:
        check_folder(folder, find_runs(folder))
    files = [f for path in (rounds or ([folder] if folder else [])) for f in find_runs(path)]

    def beside() -> Recordings:
        return {} if folder is None else read_recordings(folder)

    reading: list[Callable[[], Any]] = [beside, partial(sampled_runs, recorded, folder, sampled)]
    with working("reading recordings", alone=True) as say:
        # Ten values of a recorded token take as long to read as it takes to replay.
        recordings, sampled_ones = results_of(reading, recorded.tokens * 10)
        ours = Ours(
            recorded,
            recording.latency,
            [read_run(file) for file in files],
            recordings,
            sampled_ones,
        )
        compared = side_by_side(ours, partial(say, "comparing tables"))
    found = [row for row in compared if table is None or table.lower() in row.table.lower()]
    rows = [row for row in found if missing or row.kind != "needs their weights"]
    if not found:
        raise DraftsimError(f"--table {table!r} names no table of the papers: try SpecBound")
    note(f"{recording.said}: {_counted(rows)}")
    emit(
        "papers", [row._asdict() for row in rows], json, out=out,
        tables=lambda: shown_papers(rows),
    )  # fmt: skip
    if left := len(found) - len(rows):
        note(
            f"{left} of {len(found)} published cells need the papers' own models (--missing lists "
            "them)"
        )
    shown = {row.table for row in found}
    for name, text in CONTRADICTIONS:
        if table is None or name in shown:
            note(f"{name}: {text}")


def _counted(rows: Sequence[Row]) -> str:
    """Return how many published figures are compared, and how close those we can compute are."""
    same = [r for r in rows if r.kind == "same quantity" and r.published and r.ours is not None]
    errors = [abs(r.ours / r.published - 1) for r in same if r.published and r.ours]
    tables = len({row.table for row in rows})
    published = sum(row.published is not None for row in rows)
    said = f"{published} published figures of {tables} tables"
    if not errors:
        return f"{said}."
    apart = f"{median(errors):.1%} (median)"
    return f"{said}; {len(errors)} from the papers' own numbers differ by {apart}."


def sampled_runs(
    trace: Trace, folder: Path | None, named: Sequence[Path] | None
) -> list[tuple[Trace, Recordings]]:
    """Return sampled outputs of the pair of `trace` and their early exits, one of each sampling.

    Looked for in the trace's own `folder` and in the `named` run folders, or if None, in the
    folders next to its own.  Raises DraftsimError if a named one holds no sampled outputs, or those
    of another pair.
    """
    for run in named or ():
        if not (run / SAMPLED).is_file():
            raise DraftsimError(
                f"--sampled {run}: holds no sampled outputs: record some with "
                "`draftsim profile sources --exit-layers --temperature T`"
            )
    runs = list(named or ())
    if folder is not None:
        beside = [f.parent for f in sorted(folder.parent.glob(f"*/{SAMPLED}"))]
        own = [folder] if (folder / SAMPLED).is_file() else []
        runs = [*own, *(beside if named is None else named)]
    found: dict[Sampling, tuple[Trace, Recordings]] = {}
    for run in dict.fromkeys(runs):
        asked = run == folder or named is not None
        try:
            sampled = read_trace(run / SAMPLED)
            if run != folder and pair_of(sampled) != pair_of(trace):
                if asked:
                    raise DraftsimError(f"--sampled {run}: was recorded of another pair: drop it")
                continue
            recordings = find_recordings(str(run / SAMPLED), sampled)
        except DraftsimError as error:
            if asked:
                raise
            note(f"sampled outputs found with the trace are left out: {error}")
            continue
        if EarlyExit.name in recordings:
            found.setdefault(sampled.sampling, (sampled, recordings))
    return list(found.values())


def measured(
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with eagle_logs/ or specbench_logs/: predict these logs, too.",
        ),
    ] = None,
    table: TableOption = None,
    out: OutOption = None,
    json: JsonOption = None,
) -> None:
    """Predict public GPU measurements from a part of each study.

    A row is a study: what part of it was given, the error of the rest, and how often the side of 1x
    and the ranking are right. --out and --json hold every measurement.
    """
    with working("predicting public measurements"):
        rows = measured_rows(logs, table or "")
    if not rows:
        raise DraftsimError(f"--table {table!r} names no study: try RTX, vLLM or GammaTune")
    remarks = notes_on(rows)
    records = [
        {"study": name, "given": given, **record._asdict()}
        for (name, given), record in by_study(rows).items()
    ]
    title = "errors of public measurements, predicted from the others of each study"
    if json is None:
        errors = [record["median"] for record in records]
        right, signs = (sum(record[n] for record in records) for n in ("sign_right", "signs"))
        side = f"; {right} of {signs} speedups are on the right side of 1x" if signs else ""
        note(
            f"{len(rows)} public measurements of {len({row.study for row in rows})} studies, "
            "predicted from others: median error "
            f"{min(errors):.1%} to {max(errors):.1%} by study{side}"
        )

    emit(
        "papers", [row._asdict() for row in rows], json, out=out,
        more={"records": records, "notes": remarks},
        tables=lambda: [Shown([_line(record) for record in records], title, notes=remarks)],
    )  # fmt: skip
    shown = {row.study for row in rows}
    for name, text in SOURCES.items():
        if any(name in other for other in shown):
            note(f"{name}: {text}")
    if logs is None:
        note("--logs FOLDER adds the logs of EAGLE and Spec-Bench")


def _line(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the printed row of a study's record: one that fits a line."""

    def share(good: str, of: str) -> str | None:
        return f"{record[good]} of {record[of]}" if record[of] else None

    return {
        "study, and what was given": f"{record['study']}: {record['given']}",
        "rows": record["rows"], "median": record["median"], "worst": record["worst"],
        "in interval": share("covered", "intervals"),
        "right side of 1x": share("sign_right", "signs"),
        "right rank": share("rank_right", "ranks"),
    }  # fmt: skip


def shown_papers(rows: Sequence[Row]) -> list[Shown]:
    """Return one table for the rows of each published table and kind.

    Each part of a note stands once below its table, under the number that the rows give it;
    a degenerate row has a star, and its reason below.
    """
    found = []
    for (name, kind), group in groupby(rows, key=lambda row: (row.table, row.kind)):
        mine = list(group)
        parts = dict.fromkeys(part for row in mine for part in _parts(row))
        numbers = {part: i for i, part in enumerate(parts, 1)}
        before = [None, *(row.row for row in mine)]
        lines = [
            {
                "row": "" if row.row == last else row.row, "column": row.column,
                "paper": row.published, "ours": cell_text("", row.ours) + " *" * bool(row.mark),
                "notes": ",".join(str(numbers[part]) for part in _parts(row)) or None,
            }
            for row, last in zip(mine, before, strict=False)
        ]  # fmt: skip
        notes = [f"{number}  {part}" for part, number in numbers.items()]
        found.append(Shown(lines, f"{name}: {kind}", notes=notes))
    return found


def _parts(row: Row) -> list[str]:
    parts = row.note.split("; ") if row.note else []
    return [*parts, *([f"* {row.mark}"] if row.mark else [])]


def check(
    inputs: Inputs,
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
    recording = inputs.load()
    table = inputs.priced(recording)
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
    title = "the largest difference of each formula from simulation"
    emit("check", rows, json, out=out, tables=lambda: [Shown(_worst(rows), title)])
    if json is None:
        note("--json has every setting")
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
