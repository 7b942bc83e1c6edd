"""The measured lines of one phase of one model, and how any size is read off them.

They belong to a latency table: what one engine made of them, every other engine of the table
reads too (`lines_of`).  What was read is each reader's own (`simulator.serving.cost.reader`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

from simulator.serving.cost.surface import Line, Roofline, Surface
from traces.latency.interpolate import EXTRAPOLATED, MEASURED, Grid
from traces.latency.table import LatencyTable

BLENDS = 1 << 15
"""Sizes kept: one per batch and width that occurred."""


class Side(NamedTuple):
    """Lines at one batch near the one asked for."""

    weight: float
    nearest_width: float | None
    """Where the width asked for lies outside, the measured width that is read instead."""
    lines: list[tuple[float, Line]]
    """(weight, line) by width."""


class Segment(NamedTuple):
    """Contexts from `start` up to `stop`, whose seconds are base + slope * (context - cut)."""

    start: float
    stop: float
    cut: float
    base: float
    slope: float
    at_cut: int
    """Origin of a reading at `cut` itself."""
    inside: int
    """Origin of every other reading."""


NOWHERE = Segment(math.inf, -math.inf, 0.0, 0.0, 0.0, EXTRAPOLATED, EXTRAPOLATED)
"""It holds no context."""


class Blend:
    """The lines that one batch and width is read from, and their weights.

    Attributes
    ----------
    nearest_batch:
        The measured batch that is read where the one asked for lies outside, else None.
    surface:
        The lines together, where the width lies within those measured at each batch, else None.
    last:
        The segment last read.
    """

    __slots__ = ("_weights", "last", "nearest_batch", "sides", "surface")

    def __init__(
        self, sides: list[Side], nearest_batch: float | None, surface: Surface | None = None
    ) -> None:
        self.sides = sides
        self.nearest_batch = nearest_batch
        self.surface = surface
        self._weights = [side.weight * share for side in sides for share, _ in side.lines]
        self.last = NOWHERE

    def segment(self, surface: Surface, context: float) -> Segment:
        """The segment of `surface` that holds `context`."""
        found = self.last
        if found.start <= context < found.stop:
            return found
        stretch = surface.stretch(context)
        base = slope = 0.0
        for weight, value, rise in zip(self._weights, stretch.values, stretch.slopes, strict=True):
            base += weight * value
            slope += weight * rise
        origins = (stretch.at_cut, stretch.inside)
        if self.nearest_batch is not None:
            origins = (EXTRAPOLATED, EXTRAPOLATED)
        found = Segment(stretch.start, stretch.stop, stretch.cut, base, slope, *origins)
        self.last = found
        return found


class Lines:
    """Measured lines by batch and width, and the blends made of them so far."""

    def __init__(self, grid: Grid) -> None:
        self.flat = grid.flat
        self.only_batch = grid.only_batch
        self._grid = grid
        self._batches = sorted(grid.lines)
        self._widths = {b: sorted(by_width) for b, by_width in grid.lines.items()}
        self._rows = {
            b: {w: Line(b, w, c.tolist(), t.tolist()) for w, (c, t) in by_width.items()}
            for b, by_width in grid.lines.items()
        }
        self._surfaces: dict[tuple[tuple[float, float], ...], Surface] = {}
        self._blends: dict[tuple[float, float], Blend] = {}

    @cached_property
    def roofline(self) -> Roofline:
        """The fit that readings beyond the lines are carried on along."""
        return Roofline(self._grid.fit.tolist())

    @cached_property
    def quickest_s(self) -> float:
        """Seconds of the quickest measured pass."""
        return min(min(line.seconds) for rows in self._rows.values() for line in rows.values())

    @cached_property
    def widest(self) -> float:
        """The largest width that was measured at every batch."""
        return min(max(rows) for rows in self._rows.values())

    @cached_property
    def widest_together(self) -> float:
        """The largest width of several sequences; infinite where none was measured."""
        widths = [width for batch, rows in self._rows.items() if batch > 1 for width in rows]
        return max(widths, default=math.inf)

    def blend(self, batch: float, width: float) -> Blend:
        """How a pass over `batch` sequences of `width` tokens is read."""
        found = self._blends.get((batch, width))
        if found is None:
            if len(self._blends) >= BLENDS:
                self._blends.clear()
            found = self._constant(width) if self.flat else self._blended(batch, width)
            self._blends[batch, width] = found
        return found

    def outside(self, blend: Blend, batch: float, width: float, context: float) -> float:
        """A width outside the measured ones: the nearest reading, carried on along the fit."""
        growth, total = self.roofline.growth, 0.0
        for side in blend.sides:
            value = 0.0
            for weight, line in side.lines:
                value += weight * self.roofline.carried(line, context)
            if side.nearest_width is not None:
                b = side.lines[0][1].batch
                value *= growth((b, width, context), (b, side.nearest_width, context))
            total += side.weight * value
        if blend.nearest_batch is not None:
            total *= growth((batch, width, context), (blend.nearest_batch, width, context))
        return total

    def _blended(self, batch: float, width: float) -> Blend:
        inside, near = _around(self._batches, self.only_batch or batch)
        sides, covered = [], True
        for batch_weight, b in near:
            known, widths = _around(self._widths[b], width)
            covered = covered and known
            rows = self._rows[b]
            sides.append(
                Side(batch_weight, None if known else widths[0][1],
                     [(share, rows[w]) for share, w in widths])
            )  # fmt: skip
        surface = self._surface([line for side in sides for _, line in side.lines])
        return Blend(sides, None if inside else near[0][1], surface if covered else None)

    def _constant(self, width: float) -> Blend:
        # A ragged verification is a wide pass, however little its mean width exceeds 1.
        by_width = self._rows[self._batches[0]]
        wide = max((w for w in by_width if w <= math.ceil(width)), default=min(by_width))
        blend = Blend([], None, self._surface([by_width[wide]]))
        seconds = by_width[wide].seconds[0]
        blend.last = Segment(-math.inf, math.inf, 0.0, seconds, 0.0, MEASURED, MEASURED)
        return blend

    def _surface(self, lines: Sequence[Line]) -> Surface:
        key = tuple([(line.batch, line.width) for line in lines])
        surface = self._surfaces.get(key)
        if surface is None:
            surface = self._surfaces[key] = Surface(lines, lambda: self.roofline)
        return surface


def lines_of(latency: LatencyTable, model: str, phase: str) -> Lines:
    """The lines of a table's `phase` of `model`, made once for all who read it.

    Raises
    ------
    DraftsimError
        If nothing was measured for this model and phase.
    """
    known = _known.setdefault(latency, {})
    lines = known.get((model, phase))
    if lines is None:
        lines = known[model, phase] = Lines(latency.grid(model, phase))
    return lines


_known: WeakKeyDictionary[LatencyTable, dict[tuple[str, str], Lines]] = WeakKeyDictionary()


def _around(ordered: Sequence[float], x: float) -> tuple[bool, list[tuple[float, float]]]:
    """Return True if `x` lies within `ordered` points, and (weight, point) pairs bracketing it."""
    if not ordered[0] <= x <= ordered[-1]:
        return False, [(1.0, ordered[0] if x < ordered[0] else ordered[-1])]
    below = ordered[bisect_right(ordered, x) - 1]
    above = ordered[bisect_left(ordered, x)]
    if below == above:
        return True, [(1.0, below)]
    share = (x - below) / (above - below)
    return True, [(1 - share, below), (share, above)]
