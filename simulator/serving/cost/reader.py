"""A latency grid read one size at a time, fast, with a record of what was not measured.

`traces.latency.table.LatencyTable.estimate` reads arrays; an engine asks for one batch, width
and context per pass.  `PassReader` gives the same seconds (a test holds the two
together) and remembers which sizes lay between or outside the measured ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from simulator.serving.cost.slab import Floats, Slab
from simulator.serving.cost.surface import Line, Roofline, Surface
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED, Grid
from traces.latency.table import LatencyTable

ORIGINS = ("measured", "interpolated", "extrapolated")
PLANS = 1 << 14
"""Readings kept: one per batch and width that occurred, for passes differ in little else."""


class Span(NamedTuple):
    """Smallest and largest value."""

    low: float
    high: float


class Coverage(NamedTuple):
    """Passes of one model priced at cells of one origin, and the sizes they had."""

    model: str
    phase: str
    origin: str
    passes: int
    batch: Span
    new_tokens: Span
    context: Span


class _Side(NamedTuple):
    """Lines at one batch near the one asked for."""

    weight: float
    nearest_width: float | None
    """Where the width asked for lies outside, the measured width that is read instead."""
    lines: list[tuple[float, Line]]
    """(weight, line) by width."""


class _Plan:
    """How to read one (batch, width) at every context, and the passes read so.

    ``start`` to ``stop`` are the contexts of the stretch last read, ``base`` its seconds
    at ``cut`` and ``slope`` those per token.  A tally is [passes, lowest, highest context].
    """

    __slots__ = (
        "at_cut", "base", "cut", "inside", "nearest_batch", "sides", "slope", "start", "stop",
        "surface", "tallies", "weights",
    )  # fmt: skip

    def __init__(self, sides: list[_Side], nearest_batch: float | None) -> None:
        self.sides = sides
        self.nearest_batch = nearest_batch
        self.surface: Surface | None = None
        self.weights: list[float] = []
        self.tallies: tuple[list[float], ...] = tuple([0, math.inf, -math.inf] for _ in ORIGINS)
        # No context lies in there: the first reading looks for its stretch.
        self.start, self.stop, self.cut = math.inf, -math.inf, 0.0
        self.base = self.slope = 0.0
        self.at_cut = self.inside = self.tallies[EXTRAPOLATED]

    def move(self, surface: Surface, context: float) -> None:
        """Make the stretch that holds `context` the one read."""
        found = surface.stretch(context)
        self.start, self.stop, self.cut = found.start, found.stop, found.cut
        self.base = self.slope = 0.0
        for weight, value, slope in zip(self.weights, found.values, found.slopes, strict=True):
            self.base += weight * value
            self.slope += weight * slope
        if self.nearest_batch is None:
            self.at_cut, self.inside = self.tallies[found.at_cut], self.tallies[found.inside]


class PassReader(Grid):
    """Seconds of one phase of one model at (batch, new tokens, context), each maybe fractional.

    Raises
    ------
    DraftsimError
        If nothing was measured for this model and phase.
    """

    def __init__(self, table: LatencyTable, model: str, phase: str = "forward") -> None:
        if not table.has(model, phase):
            table.estimate(model, phase)  # raises, naming what the table does have
        cells = table.cells
        own = cells[(cells["model"] == model) & (cells["phase"] == phase)]
        super().__init__(own, table.is_constant, table.batch_free)
        self.model, self.phase = model, phase
        self._check = partial(table.check_sizes, model, phase)
        self._batches = sorted(self._lines)
        self._widths = {b: sorted(by_width) for b, by_width in self._lines.items()}
        self._rows = {
            b: {w: Line(b, w, c.tolist(), t.tolist()) for w, (c, t) in by_width.items()}
            for b, by_width in self._lines.items()
        }
        self._surfaces: dict[tuple[tuple[float, float], ...], Surface] = {}
        self._plans: dict[tuple[float, float], _Plan] = {}
        self._seen: list[Coverage | None] = [None, None, None]
        self._slabs: dict[float, Slab] = {}

    def __call__(self, batch: float, new_tokens: float, context: float) -> float:
        """Seconds of one pass over `batch` sequences of `new_tokens` after `context` tokens."""
        plan = self._plans.get((batch, new_tokens))
        if plan is None:
            plan = self._plan(batch, new_tokens)
        if not plan.start <= context < plan.stop and plan.surface is not None:
            plan.move(plan.surface, context)
        tally = plan.inside if context != plan.cut else plan.at_cut
        passes, low, high = tally
        tally[0] = passes + 1
        # Contexts grow from round to round, so this is the usual case: no calls for it.
        if not low <= context <= high:
            tally[1] = context if context < low else low
            tally[2] = context if context > high else high
        if plan.surface is None:
            return self._outside(plan, batch, new_tokens, context)
        seconds = plan.base + plan.slope * (context - plan.cut)
        if plan.nearest_batch is not None:
            nearest = plan.nearest_batch, new_tokens, context
            seconds *= self._roofline.growth((batch, new_tokens, context), nearest)
        return seconds

    def run(self, batch: float, context: float, count: int) -> float:
        """Seconds of `count` passes in a row, a token each, from `context` tokens on."""
        plan = self._plans.get((batch, 1.0))
        last = context + (count - 1)
        if plan is None or plan.nearest_batch is not None or not (
            plan.start <= context and last < plan.stop and context != plan.cut and count > 0
        ):  # fmt: skip
            seconds = 0.0
            for step in range(count):
                seconds += self(batch, 1.0, context + step)
            return seconds
        tally = plan.inside
        passes, low, high = tally
        tally[0] = passes + count
        if context < low or last > high:
            tally[1] = context if context < low else low
            tally[2] = last if last > high else high
        return count * (plan.base + plan.slope * (0.5 * (context + last) - plan.cut))

    def many(self, batch: float, widths: Floats, contexts: Floats) -> Floats | None:
        """Seconds of passes over `batch` sequences, one per width and context, not yet counted.

        As reading them in turn, to rounding.  None if any lies beyond the measured sizes.
        """
        if self.flat:
            own = next(iter(self._lines.values()))
            seconds = np.array([own[w][1][0] for w in sorted(own)])
            at = np.array(sorted(own)).searchsorted(np.ceil(widths), side="right") - 1
            constant: Floats = seconds[np.maximum(at, 0)]
            return constant
        slab = self._slab(batch)
        return slab.read(widths, contexts) if slab and slab.holds(widths, contexts) else None

    def count(self, batch: float, widths: Floats, contexts: Floats) -> None:
        """Count passes that `many` read."""
        slab = None if self.flat else self._slab(batch)
        if slab is None:
            self._count(MEASURED, batch, widths, contexts)
        elif not slab.exact.any():
            self._count(INTERPOLATED, batch, widths, contexts)
        else:
            hit = slab.measured(widths, contexts)
            self._count(MEASURED, batch, widths[hit], contexts[hit])
            self._count(INTERPOLATED, batch, widths[~hit], contexts[~hit])

    def _slab(self, batch: float) -> Slab | None:
        slab = self._slabs.get(batch)
        if slab is None:
            inside, near = _around(self._batches, batch)
            if not inside:
                return None
            slab = self._slabs[batch] = Slab([(weight, self._rows[b]) for weight, b in near])
        return slab

    def _count(self, origin: int, batch: float, widths: Floats, contexts: Floats) -> None:
        if not len(widths):
            return
        old = self._seen[origin] or self._nothing(origin)
        self._seen[origin] = old._replace(
            passes=old.passes + len(widths),
            batch=_wider(old.batch, batch, batch),
            new_tokens=_wider(old.new_tokens, float(widths.min()), float(widths.max())),
            context=_wider(old.context, float(contexts.min()), float(contexts.max())),
        )

    def _nothing(self, origin: int) -> Coverage:
        return Coverage(
            self.model, self.phase, ORIGINS[origin], 0, *[Span(math.inf, -math.inf)] * 3
        )

    @property
    def coverage(self) -> list[Coverage]:
        """One entry per origin that occurred."""
        self._fold()
        return [entry for entry in self._seen if entry is not None]

    def _plan(self, batch: float, width: float) -> _Plan:
        if batch <= 0 or width <= 0:
            raise DraftsimError(f"a pass over {batch} sequences of {width} tokens has no latency")
        self._check(batch, width)
        if len(self._plans) >= PLANS:
            self._fold()
            self._plans.clear()
        if self.flat:
            plan = self._plans[batch, width] = self._constant_plan(width)
            return plan
        inside, near = _around(self._batches, self.only_batch or batch)
        sides, covered = [], True
        for batch_weight, b in near:
            known, widths = _around(self._widths[b], width)
            covered = covered and known
            rows = self._rows[b]
            sides.append(
                _Side(batch_weight, None if known else widths[0][1],
                      [(share, rows[w]) for share, w in widths])
            )  # fmt: skip
        plan = self._plans[batch, width] = _Plan(sides, None if inside else near[0][1])
        if covered:
            key = tuple([(line.batch, line.width) for side in sides for _, line in side.lines])
            surface = self._surfaces.get(key)
            if surface is None:
                lines = [line for side in sides for _, line in side.lines]
                surface = self._surfaces[key] = Surface(lines, lambda: self._roofline)
            plan.surface = surface
            plan.weights = [side.weight * share for side in sides for share, _ in side.lines]
        return plan

    def _constant_plan(self, width: float) -> _Plan:
        # A ragged verification is a wide pass, however little its mean width exceeds 1.
        by_width = self._rows[self._batches[0]]
        wide = max((w for w in by_width if w <= math.ceil(width)), default=min(by_width))
        plan = _Plan([], None)
        plan.surface = Surface([by_width[wide]], lambda: self._roofline)
        plan.start, plan.stop = -math.inf, math.inf
        plan.base = by_width[wide].seconds[0]
        plan.at_cut = plan.inside = plan.tallies[MEASURED]
        return plan

    def _outside(self, plan: _Plan, batch: float, width: float, context: float) -> float:
        """A width outside the measured ones: the nearest reading, carried on along the fit."""
        growth, total = self._roofline.growth, 0.0
        for side in plan.sides:
            value = 0.0
            for weight, line in side.lines:
                edge = min(max(context, line.contexts[0]), line.contexts[-1])
                own = line.batch, line.width
                value += weight * line.at(context) * growth((*own, context), (*own, edge))
            if side.nearest_width is not None:
                b = side.lines[0][1].batch
                value *= growth((b, width, context), (b, side.nearest_width, context))
            total += side.weight * value
        if plan.nearest_batch is not None:
            total *= growth((batch, width, context), (plan.nearest_batch, width, context))
        return total

    def _fold(self) -> None:
        """Add the plans' tallies to what was seen, and begin them anew."""
        for (batch, width), plan in self._plans.items():
            for origin, tally in enumerate(plan.tallies):
                if not tally[0]:
                    continue
                old = self._seen[origin] or self._nothing(origin)
                self._seen[origin] = old._replace(
                    passes=old.passes + int(tally[0]),
                    batch=_wider(old.batch, batch, batch),
                    new_tokens=_wider(old.new_tokens, width, width),
                    context=_wider(old.context, tally[1], tally[2]),
                )
                tally[:] = [0, math.inf, -math.inf]

    @cached_property
    def _roofline(self) -> Roofline:
        return Roofline(self._fit.tolist())


def _wider(span: Span, low: float, high: float) -> Span:
    return Span(min(span.low, low), max(span.high, high))


def _around(ordered: Sequence[float], x: float) -> tuple[bool, list[tuple[float, float]]]:
    """Whether `x` lies within `ordered` points, and (weight, point) pairs bracketing it."""
    if not ordered[0] <= x <= ordered[-1]:
        return False, [(1.0, ordered[0] if x < ordered[0] else ordered[-1])]
    below = ordered[bisect_right(ordered, x) - 1]
    above = ordered[bisect_left(ordered, x)]
    if below == above:
        return True, [(1.0, below)]
    share = (x - below) / (above - below)
    return True, [(1 - share, below), (share, above)]
