"""Tables of ``draftsim papers``: one for each table of a paper, notes below it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from commands.common.latex import Shown
from commands.common.printed import cell_text, printable

if TYPE_CHECKING:
    from simulator.papers import Row

WIDTH = 100
ROW, COLUMN = 38, 28
"""Characters that a row's and a column's name may take before they are folded."""


def print_papers(rows: Sequence[Row]) -> None:
    """One table for the rows of each published table and kind; numbers are never cut.

    Each part of a note stands once below its table, under the number that the rows give it;
    a degenerate row has a star, and its reason below.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for (name, kind), group in groupby(rows, key=lambda row: (row.table, row.kind)):
        mine = list(group)
        notes = {part: 0 for row in mine for part in _parts(row)}
        numbers = {part: i for i, part in enumerate(notes, 1)}
        console.print(Text(f"\n{name}: {kind}", style="bold"))
        console.print(_table(mine, numbers))
        for part, number in numbers.items():
            console.print(Text(printable(f"{number}  {part}")))


def shown_papers(rows: Sequence[Row]) -> list[Shown]:
    """Return the same tables without their notes, as --out writes them."""
    groups = groupby(rows, key=lambda row: (row.table, row.kind))
    return [
        Shown(
            [
                {"row": r.row, "column": r.column, "paper": r.published, "ours": r.ours}
                for r in mine
            ],
            f"{name}: {kind}",
        )
        for (name, kind), mine in groups
    ]


def _parts(row: Row) -> list[str]:
    parts = row.note.split("; ") if row.note else []
    return [*parts, *([f"* {row.mark}"] if row.mark else [])]


def _table(rows: Sequence[Row], numbers: dict[str, int]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("row", overflow="fold", max_width=ROW)
    table.add_column("column", overflow="fold", max_width=COLUMN)
    for name in ("paper", "ours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold", max_width=10)
    before = ""
    for row in rows:
        label = "" if row.row == before else row.row
        before = row.row
        said = ",".join(str(numbers[part]) for part in _parts(row))
        ours = cell_text("", row.ours) + (" *" if row.mark else "")
        values = (cell_text("", row.published), ours)
        table.add_row(*(Text(printable(t)) for t in (label, row.column, *values, said)))
    return table
