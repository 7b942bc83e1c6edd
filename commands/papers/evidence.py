"""``draftsim papers --measured``: what others measured on GPUs, predicted from a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.latex import Shown
from commands.common.output import emit, note
from commands.common.printed import print_table, printable
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from simulator.papers.measured import Record


def print_evidence(
    logs: Path | None, study: str | None, json: str | None, out: Path | None
) -> None:
    """Print the record of every study, or with JSON every row; ``out`` gets every row too.

    Raises
    ------
    DraftsimError
        If no study's name contains `study`, or `logs` holds no logs.
    """
    from simulator.papers.measured import by_study, measured_rows, notes_on, sources

    rows = measured_rows(logs, study or "")
    if not rows:
        raise DraftsimError(f"--table {study!r} names no study: try RTX, vLLM or GammaTune")
    records = by_study(rows)
    remarks = notes_on(rows)
    more: dict[str, object] = {"records": [
        {"study": name, "given": given, **record._asdict()}
        for (name, given), record in records.items()
    ], "notes": remarks}  # fmt: skip

    table = Shown(
        [_line(*names, one) for names, one in records.items()],
        "predictions of public measurements that were not given",
    )

    def printed() -> None:
        print_table(table.rows)
        for remark in remarks:
            print(printable(remark))

    emit(
        "papers", [row._asdict() for row in rows], json, more=more, out=out, printed=printed,
        tables=lambda: [table],
    )  # fmt: skip
    shown = {row.study for row in rows}
    for name, text in sources().items():
        if any(name in other for other in shown):
            note(f"{name}: {text}")
    if logs is None:
        note("logs of EAGLE and Spec-Bench are read where --logs names their folder")


def _line(study: str, given: str, record: Record) -> Mapping[str, str]:
    def share(good: int, of: int) -> str:
        return f"{good} of {of}" if of else "–"

    return {
        "study": study, "given": given, "rows": str(record.rows),
        "median |error|": f"{record.median:.1%}", "worst": f"{record.worst:+.1%}",
        "in acceptance's interval": share(record.covered, record.intervals),
        "right side of 1x": share(record.sign_right, record.signs),
        "right rank": share(record.rank_right, record.ranks),
    }  # fmt: skip
