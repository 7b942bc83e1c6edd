"""The grid of one model's passes at one batch size: coarse first, finer where time allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from profiler.suite.latency.passes import table_of
from profiler.suite.latency.points import Point, Refiner, held_out

Rows = list[list[Any]]
"""Rows of `traces.latency.schema.CELL_COLUMNS`."""


class Passes(NamedTuple):
    """A kind of passes: a model, a phase and a batch size."""

    model: str
    phase: str
    batch: int


class PassGrid:
    """Measurement of a grid's points, except those among `known` cells.

    Parameters
    ----------
    widths, contexts:
        The coarse grid.
    measure:
        Times the pass at a point: its row of `traces.latency.schema.CELL_COLUMNS`.
    known:
        Cells measured before, of any passes.
    booked:
        Points held out before (`profiler.suite.latency.points.held_out`), of any passes.
    """

    def __init__(
        self, of: Passes, widths: Sequence[int], contexts: Sequence[int],
        measure: Callable[[Point], list[Any]], *, tolerance: float, least_gap: int,
        known: Rows, booked: Sequence[dict[str, Any]],
    ) -> None:  # fmt: skip
        self.of, self.widths, self.contexts, self.measure = of, widths, contexts, measure
        self.tolerance, self.least_gap = tolerance, least_gap
        self._rows = {Point(r[3], r[4]): r for r in known if Passes(*r[:3]) == of}
        self._apart = {
            Point(h["width"], h["context"]): float(h["error"])
            for h in booked if Passes(h["model"], h["phase"], h["batch"]) == of
        }  # fmt: skip

    def coarse(self, check: Callable[[], None], contexts: Sequence[int] | None = None) -> Rows:
        """The rows of the coarse grid, or at `contexts` of it, that were not known.

        `check`, asked before each, may raise.
        """
        new = []
        for at in (Point(w, c) for w in self.widths for c in contexts or self.contexts):
            if at not in self._rows:
                new.append(self._measured(at, check))
        return new

    def at_random(self, count: int, check: Callable[[], None]) -> list[dict[str, Any]]:
        """Interpolation errors at points that have no part in choosing the grid.

        A middle that misses the tolerance joins the grid, so those left out always meet it:
        only points that stay out whatever their error is tell what reading the table is off by.
        """
        rows = []
        for at in self._refiner().at_random(count, seed=self.of.batch):
            check()
            rows.append(self.measure(at))
        errors = reading_errors(rows, list(self._rows.values()))
        return held_out(rows, errors, True)

    def finer(self, late: Callable[[], bool]) -> tuple[Rows, list[dict[str, Any]], int]:
        """Measure what interpolation needs beyond the coarse grid, until it is `late`.

        Returns the rows that join the grid, the middles held out, and how many gaps were not
        examined.
        """
        refiner, before = self._refiner(), set(self._rows)
        while (at := refiner.next()) is not None and not late():
            refiner.tell(self._measured(at)[5])
        rows = [self._rows[at] for at in refiner.grid() if at not in before]
        apart = {at: e for at, e in refiner.held_out.items() if at not in self._apart}
        middles = held_out([self._rows[at] for at in apart], apart.values(), False)
        return rows, middles, refiner.unchecked + (at is not None)

    def _measured(self, at: Point, check: Callable[[], None] = lambda: None) -> list[Any]:
        check()
        self._rows[at] = self.measure(at)
        return self._rows[at]

    def _refiner(self) -> Refiner:
        seconds = {at: float(row[5]) for at, row in self._rows.items()}
        return Refiner(
            self.widths, self.contexts, self.tolerance, self.least_gap, seconds, dict(self._apart)
        )


RESOLUTION_S = 1e-9
"""No pass is shorter; on a disturbed machine a difference of two timings can be nothing."""


def reading_errors(rows: Rows, cells: Rows) -> list[float]:
    """Relative errors of reading a table of `cells` where `rows` were measured."""
    table = table_of(cells)
    return [
        float(table.seconds(r[0], r[1], batch=r[2], new_tokens=r[3], context=r[4]))
        / max(r[5], RESOLUTION_S)
        - 1
        for r in rows
    ]


def read_again(booked: Sequence[dict[str, Any]], cells: Rows) -> list[dict[str, Any]]:
    """Points at random with the error that reading all `cells` has there.

    One that became a point of the grid since is left out: it says nothing any more.
    """
    grid = {tuple(row[:5]) for row in cells}
    kept = []
    for h in booked:
        row = [h[k] for k in ("model", "phase", "batch", "width", "context", "seconds")]
        if not h["random"]:
            kept.append(h)
        elif tuple(row[:5]) not in grid:
            own = [c for c in cells if c[:2] == row[:2]]
            kept.append({**h, "error": reading_errors([row], own)[0]})
    return kept
