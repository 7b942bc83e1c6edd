"""Published numbers and ours, one row per cell of a table."""

from __future__ import annotations

from typing import Literal, NamedTuple

from simulator.published import PaperTable

Kind = Literal["same quantity", "same experiment on our pair", "needs their weights"]
"""How a row's two numbers relate: computed from the paper's own published numbers; the same
experiment with another pair of models, so that shapes compare and values need not; or ours
missing, because only the paper's models could tell."""

QUANTITY: Kind = "same quantity"
EXPERIMENT: Kind = "same experiment on our pair"
WEIGHTS: Kind = "needs their weights"


class Row(NamedTuple):
    """One cell."""

    table: str
    row: str
    column: str
    published: float | None
    ours: float | None
    kind: Kind
    note: str = ""
    """How ours was got, or what is wrong with the published number."""
    mark: str = ""
    """Reason why the run of our value is degenerate (`simulator.degenerate`)."""


def missing(table: PaperTable, done: list[Row]) -> list[Row]:
    """Return rows for the cells that `done` does not compare: they need the paper's models."""
    compared = {(row.row, row.column) for row in done if row.table == table.name}
    return [
        Row(table.name, row, column, value, None, WEIGHTS)
        for row, values in table.cells.items()
        for column, value in zip(table.columns, values, strict=True)
        if value is not None and (row, column) not in compared
    ]
