"""A latency grid read one size at a time, fast, with a record of what was not measured.

`traces.latency.LatencyTable.estimate` reads arrays; an engine asks for one batch, width
and context per pass.  `PassReader` gives the same seconds (a test holds the two
together) and remembers which sizes lay between or outside the measured ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from traces.errors import DraftsimError
from traces.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED, Grid
from traces.latency import LatencyTable

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


class _Line(NamedTuple):
    """Measured seconds over contexts at one batch and width, and its share in a reading."""

    weight: float
    batch: float
    width: float
    contexts: list[float]
    seconds: list[float]

    def at(self, context: float) -> float:
        """Linear between the contexts, constant beyond them."""
        contexts, seconds = self.contexts, self.seconds
        i = bisect_right(contexts, context) - 1
        if i < 0:
            return seconds[0]
        value = seconds[i]
        if i + 1 < len(contexts) and context != contexts[i]:
            step = (context - contexts[i]) / (contexts[i + 1] - contexts[i])
            value += step * (seconds[i + 1] - value)
        return value


class _Plan:
    """How to read every context at one (batch, width): nearby lines, and where they end."""

    __slots__ = ("between", "common", "high", "lines", "low", "nearest_batch", "sides")

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.sides: list[tuple[float, float | None, list[_Line]]] = []
        """Per nearby batch: its weight, the nearest width if outside, lines by width."""
        self.nearest_batch: float | None = None
        self.low, self.high = -math.inf, math.inf
        self.between = False
        self.common: frozenset[float] = frozenset()


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
        super().__init__(own, flat=table.is_constant)
        self.model, self.phase = model, phase
        self._lists = {
            b: {w: (c.tolist(), t.tolist()) for w, (c, t) in by_width.items()}
            for b, by_width in self._lines.items()
        }
        self._plans: dict[tuple[float, float], _Plan] = {}
        self._seen: list[list[float] | None] = [None, None, None]

    def __call__(self, batch: float, new_tokens: float, context: float) -> float:
        """Seconds of one pass over `batch` sequences of `new_tokens` after `context` tokens."""
        plan = self._plans.get((batch, new_tokens))
        if plan is None:
            plan = self._plan(batch, new_tokens)
        if not plan.low <= context <= plan.high:
            self._note(EXTRAPOLATED, batch, new_tokens, context)
            return self._beyond(plan, batch, new_tokens, context)
        total = 0.0
        for line in plan.lines:
            total += line.weight * line.at(context)
        measured = not plan.between and (self.flat or context in plan.common)
        self._note(MEASURED if measured else INTERPOLATED, batch, new_tokens, context)
        return total

    @property
    def coverage(self) -> list[Coverage]:
        """One entry per origin that occurred."""
        return [
            Coverage(
                self.model, self.phase, origin, int(s[0]), Span(s[1], s[2]), Span(s[3], s[4]),
                Span(s[5], s[6]),
            )
            for origin, s in zip(ORIGINS, self._seen, strict=True) if s is not None
        ]  # fmt: skip

    def _note(self, origin: int, batch: float, width: float, context: float) -> None:
        seen = self._seen[origin]
        if seen is None:
            self._seen[origin] = [1, batch, batch, width, width, context, context]
            return
        seen[0] += 1
        for at, value in ((1, batch), (3, width), (5, context)):
            if value < seen[at]:
                seen[at] = value
            elif value > seen[at + 1]:
                seen[at + 1] = value

    def _plan(self, batch: float, width: float) -> _Plan:
        if batch <= 0 or width <= 0:
            raise DraftsimError(f"a pass over {batch} sequences of {width} tokens has no latency")
        if len(self._plans) >= PLANS:
            self._plans.clear()
        plan = self._plans[batch, width] = _Plan()
        if self.flat:
            # A ragged verification is a wide pass, however little its mean width exceeds 1.
            by_width = next(iter(self._lines.values()))
            wide = max((w for w in by_width if w <= math.ceil(width)), default=min(by_width))
            plan.lines = [_Line(1.0, batch, wide, [0.0], [float(by_width[wide][1][0])])]
            return plan
        inside, near = _around(self._lines, batch)
        plan.nearest_batch = None if inside else near[0][1]
        for batch_weight, b in near:
            covered, widths = _around(self._lines[b], width)
            side = [_Line(share, b, w, *self._lists[b][w]) for share, w in widths]
            plan.sides.append((batch_weight, None if covered else widths[0][1], side))
            plan.lines += [line._replace(weight=batch_weight * line.weight) for line in side]
            inside = inside and covered
        plan.between = len(plan.lines) > 1
        plan.low = max(line.contexts[0] for line in plan.lines) if inside else math.inf
        plan.high = min(line.contexts[-1] for line in plan.lines) if inside else -math.inf
        plan.common = frozenset.intersection(*(frozenset(line.contexts) for line in plan.lines))
        return plan

    def _beyond(self, plan: _Plan, batch: float, width: float, context: float) -> float:
        total = 0.0
        for batch_weight, nearest_width, side in plan.sides:
            value = 0.0
            for line in side:
                edge = min(max(context, line.contexts[0]), line.contexts[-1])
                grown = self._growth(
                    (line.batch, line.width, context), (line.batch, line.width, edge)
                )
                value += line.weight * line.at(context) * grown
            if nearest_width is not None:
                b = side[0].batch
                value *= self._growth((b, width, context), (b, nearest_width, context))
            total += batch_weight * value
        if plan.nearest_batch is not None:
            total *= self._growth((batch, width, context), (plan.nearest_batch, width, context))
        return total

    def _growth(self, at: tuple[float, float, float], base: tuple[float, float, float]) -> float:
        below = self._shape(*base)
        return self._shape(*at) / below if below > 0 else 1.0

    def _shape(self, b: float, n: float, c: float) -> float:
        w0, w1, w2, w3, w4 = self._weights
        return w0 + b * (w1 + n * w2 + c * (w3 + n * w4))

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        return tuple(self._fit.tolist())


def _around(points: Iterable[float], x: float) -> tuple[bool, list[tuple[float, float]]]:
    """Whether `x` lies within `points`, and (weight, point) pairs bracketing it."""
    ordered = sorted(points)
    if not ordered[0] <= x <= ordered[-1]:
        return False, [(1.0, ordered[0] if x < ordered[0] else ordered[-1])]
    below = ordered[bisect_right(ordered, x) - 1]
    above = ordered[bisect_left(ordered, x)]
    if below == above:
        return True, [(1.0, below)]
    share = (x - below) / (above - below)
    return True, [(1 - share, below), (share, above)]
