"""Which points of a latency grid to measure: only as many as interpolation needs.

A coarse grid comes first.  Then the middle of every gap is measured as a held-out point and
compared with what the grid so far predicts there.  Where the two agree the point stays held
out and is evidence; where they do not it joins the grid, and the two smaller gaps are next.
Gaps may be looked into later than the grid, and by another run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from profiler.suite.latency.passes import table_of


class Point(NamedTuple):
    """Tokens fed and tokens in the cache, per sequence."""

    width: int
    context: int


class _Gap(NamedTuple):
    """Two grid points that differ in one size, and the point between them."""

    low: Point
    high: Point

    @property
    def middle(self) -> Point:
        return Point(
            (self.low.width + self.high.width) // 2, (self.low.context + self.high.context) // 2
        )


@dataclass
class Refiner:
    """A choice of points to measure: ask `next`, measure it, and `tell` the seconds.

    Parameters
    ----------
    widths, contexts:
        The coarse grid.
    tolerance:
        Largest relative interpolation error that leaves a gap as it is.
    least_gap:
        Contexts closer than this are not told apart.
    """

    widths: Sequence[int]
    contexts: Sequence[int]
    tolerance: float = 0.02
    least_gap: int = 128
    seconds: dict[Point, float] = field(default_factory=dict)
    """The grid: points to interpolate between, and their times; those given are not asked for."""
    held_out: dict[Point, float] = field(default_factory=dict)
    """Points not on the grid, with the relative error of interpolating there."""

    def __post_init__(self) -> None:
        coarse = (Point(w, c) for w in self.widths for c in self.contexts)
        self._wanted = deque(at for at in coarse if at not in self.seconds)
        self._gaps: deque[_Gap] | None = None
        self._asked: _Gap | None = None

    @property
    def unchecked(self) -> int:
        """Gaps not looked into yet."""
        gaps = self._gaps if self._gaps is not None else self._first_gaps()
        return sum(self._open(gap) for gap in gaps)

    @property
    def coarse_done(self) -> bool:
        """Return True if the coarse grid is complete."""
        return all(Point(w, c) in self.seconds for w in self.widths for c in self.contexts)

    def next(self) -> Point | None:
        """The point to measure next, or None when every gap has been looked into."""
        self._asked = None
        if self._wanted:
            return self._wanted[0]
        if self._gaps is None:
            self._gaps = deque(self._first_gaps())
        while self._gaps:
            gap = self._gaps.popleft()
            if self._open(gap):
                self._asked = gap
                return gap.middle
        return None

    def tell(self, seconds: float) -> None:
        """The time of the point that `next` named."""
        if self._asked is None:
            self.seconds[self._wanted.popleft()] = seconds
            return
        gap, middle = self._asked, self._asked.middle
        error = self._between(gap) / seconds - 1
        if abs(error) <= self.tolerance:
            self.held_out[middle] = error
            return
        assert self._gaps is not None
        self.seconds[middle] = seconds
        halves = [_Gap(gap.low, middle), _Gap(middle, gap.high)]
        if gap.low.width != gap.high.width:
            # A width is read along its own line of contexts, which must be complete.
            line = [Point(middle.width, c) for c in self.contexts]
            self._wanted.extend(at for at in line if at not in self.seconds)
        self._gaps.extendleft(reversed([half for half in halves if self._wide(half)]))

    def grid(self) -> dict[Point, float]:
        """The points to interpolate between, lines that were left unfinished taken out."""
        whole = {
            w for w in {p.width for p in self.seconds}
            if all(Point(w, c) in self.seconds for c in self.contexts)
        }  # fmt: skip
        return {p: s for p, s in sorted(self.seconds.items()) if p.width in whole}

    def at_random(self, count: int, seed: int = 0) -> list[Point]:
        """Return at most `count` points of the grid's range that were never measured."""
        rng = np.random.default_rng(seed)
        drawn = zip(
            rng.integers(self.widths[0], self.widths[-1] + 1, count).tolist(),
            rng.integers(self.contexts[0], self.contexts[-1] + 1, count).tolist(),
            strict=True,
        )
        points = (Point(width, context) for width, context in drawn)
        return [at for at in dict.fromkeys(points) if at not in {**self.seconds, **self.held_out}]

    def _between(self, gap: _Gap) -> float:
        low, high, middle = gap.low, gap.high, gap.middle
        span = (high.width - low.width) or (high.context - low.context)
        part = ((middle.width - low.width) or (middle.context - low.context)) / span
        return float((1 - part) * self.seconds[low] + part * self.seconds[high])

    def _wide(self, gap: _Gap) -> bool:
        return (
            gap.high.width - gap.low.width > 1
            or gap.high.context - gap.low.context >= 2 * self.least_gap
        )

    def _open(self, gap: _Gap) -> bool:
        return gap.middle not in self.held_out and gap.middle not in self.seconds

    def _first_gaps(self) -> Iterator[_Gap]:
        """Between neighbours of the grid as it is: the widths at both ends of the contexts."""
        lines: dict[int, list[int]] = {}
        for width, context in sorted(self.grid()):
            lines.setdefault(width, []).append(context)
        ends = dict.fromkeys((self.contexts[0], self.contexts[-1]))
        gaps = [_Gap(Point(a, c), Point(b, c)) for a, b in pairwise(lines) for c in ends]
        gaps += [
            _Gap(Point(w, a), Point(w, b)) for w, line in lines.items() for a, b in pairwise(line)
        ]
        return (gap for gap in gaps if self._wide(gap))


def held_out(
    rows: Sequence[Sequence[Any]], errors: Iterable[float], random: bool
) -> list[dict[str, Any]]:
    """Return what is kept of cells (`traces.latency.schema.CELL_COLUMNS`) outside a table."""
    return [
        {"model": r[0], "phase": r[1], "batch": r[2], "width": r[3], "context": r[4],
         "seconds": r[5], "error": error, "random": random}
        for r, error in zip(rows, errors, strict=True)
    ]  # fmt: skip


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Median and largest |error| and their number, of held-out points."""
    sizes = np.abs(np.asarray(errors, dtype=float))
    if not len(sizes):
        return {"points": 0}
    return {
        "points": len(sizes), "median": float(np.median(sizes)), "largest": float(sizes.max()),
    }  # fmt: skip


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
