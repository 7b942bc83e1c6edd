"""Published numbers beside ours, one row per cell of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """What is degenerate about the run behind ours, in words (`simulator.degenerate`)."""


@dataclass(frozen=True)
class PaperTable:
    """A published table: rows by name, values in the order of the columns."""

    name: str
    source: str
    columns: tuple[str, ...]
    cells: Mapping[str, tuple[float | None, ...]]

    def value(self, row: str, column: str) -> float | None:
        """The published number of a cell; None where the paper gives none."""
        return self.cells[row][self.columns.index(column)]

    def number(self, row: str, column: str) -> float:
        """The same where it is known to be there."""
        value = self.value(row, column)
        return math.nan if value is None else value

    def missing(self, done: list[Row]) -> list[Row]:
        """Rows for the cells that `done` does not compare: they need the paper's models."""
        compared = {(row.row, row.column) for row in done if row.table == self.name}
        return [
            Row(self.name, row, column, value, None, WEIGHTS)
            for row, values in self.cells.items()
            for column, value in zip(self.columns, values, strict=True)
            if value is not None and (row, column) not in compared
        ]
