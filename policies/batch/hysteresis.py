"""A table by batch size that does not change K for every request that arrives or leaves."""

from __future__ import annotations

from collections.abc import Sequence

from policies.batch.tables import DEFAULT_TABLE, BatchTable, counted
from policies.core import Load
from policies.parameters import whole


class BatchTableHysteresis(BatchTable):
    """K by concurrency, changed only after several steps well beyond the end of a row.

    A batch that wanders about the end of a row makes `BatchTable` change K back and forth,
    and one prompt among few sequences ends speculation for its iteration
    (vllm-project/vllm issue 49548).  Here a row is left only where the batch lies at least
    `margin` requests beyond its end (a Schmitt trigger), and only after `patience` iterations
    in a row have said so; the K of the row that was in force holds until then.

    Parameters
    ----------
    table, in_step:
        See `BatchTable`.
    margin:
        Requests beyond the end of the row in force; 0: none.
    patience:
        Iterations that must agree; 1: the first decides.
    """

    def __init__(
        self,
        table: Sequence[Sequence[int]] = DEFAULT_TABLE,
        margin: int = 1,
        patience: int = 4,
        in_step: bool = True,
    ) -> None:
        whole("margin", margin, 0)
        whole("patience", patience, 1)
        super().__init__(table, in_step)
        self.margin = margin
        self.patience = patience
        self._row: int | None = None
        self._agreed = 0

    def row(self, loads: Sequence[Load]) -> int:
        batch = counted(loads)
        if self._row is None:
            self._row = self.row_of(batch)
        low, high = self.row_of(batch - self.margin), self.row_of(batch + self.margin)
        self._agreed = 0 if low <= self._row <= high else self._agreed + 1
        if self._agreed >= self.patience:
            self._row, self._agreed = self.row_of(batch), 0
        return self._row
