"""Seconds of an engine's passes, one at a time, and the sizes that they had.

`traces.latency.table.LatencyTable.estimate` reads arrays; an engine asks for one batch, width and
context per pass.  `PassReader` keeps the lines of the grid that it read
(`traces.latency.interpolate.Line`) and counts which sizes lay between or outside the measured ones.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, Line
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


class _Plan:
    """A line of the grid at one (batch, width), and the passes read from it.

    The piece last read holds the contexts ``start`` to ``stop``: ``base`` seconds at ``start`` and
    ``slope`` per token.  A tally is [passes, lowest, highest context].
    """

    __slots__ = ("at_cut", "base", "inside", "line", "slope", "start", "stop", "tallies")

    def __init__(self, line: Line | None) -> None:
        self.line = line
        self.tallies = [0, inf, -inf], [0, inf, -inf], [0, inf, -inf]
        self.start, self.stop = inf, -inf
        self.base = self.slope = 0.0
        self.at_cut = self.inside = self.tallies[EXTRAPOLATED]

    def move(self, line: Line, context: float) -> None:
        """Make the piece that holds `context` the one read."""
        cuts = line.cuts
        i = max(bisect_right(cuts, context) - 1, 0)
        self.start, self.stop = cuts[i], cuts[i + 1] if i + 1 < len(cuts) else inf
        self.base, self.slope = line.seconds[i], line.slopes[i]
        self.at_cut, self.inside = self.tallies[line.at_cut[i]], self.tallies[line.after[i]]


class PassReader:
    """Seconds of one phase of one model at (batch, new tokens, context), each maybe fractional.

    Raises
    ------
    DraftsimError
        If nothing was measured for this model and phase.
    """

    def __init__(self, table: LatencyTable, model: str, phase: str = "forward") -> None:
        self._grid = table.grid(model, phase)
        self.model, self.phase = model, phase
        self._check = partial(table.check_sizes, model, phase)
        self._plans: dict[tuple[float, float], _Plan] = {}
        # By origin: passes, least and largest batch, width and context.
        self._seen = [[0.0, *[inf, -inf] * 3] for _ in ORIGINS]

    def __call__(self, batch: float, new_tokens: float, context: float) -> float:
        """Return seconds of one pass over `batch` sequences of `new_tokens` after `context`
        tokens.
        """
        plan = self._plans.get((batch, new_tokens))
        if plan is None:
            plan = self._plan(batch, new_tokens)
        if not plan.start <= context < plan.stop and plan.line is not None:
            plan.move(plan.line, context)
        tally = plan.inside if context != plan.start else plan.at_cut
        passes, low, high = tally
        tally[0] = passes + 1
        # Contexts grow from round to round, so this is the usual case: no calls for it.
        if not low <= context <= high:
            tally[1] = context if context < low else low
            tally[2] = context if context > high else high
        if plan.line is None:
            sizes = (np.array([float(size)]) for size in (batch, new_tokens, context))
            return float(self._grid.read(*sizes)[0][0])
        return plan.base + plan.slope * (context - plan.start)

    def run(self, batch: float, context: float, count: int) -> float:
        """Return seconds of `count` passes in a row, a token each, from `context` tokens on."""
        plan = self._plans.get((batch, 1.0))
        last = context + (count - 1)
        if plan is None or not (plan.start < context and last < plan.stop and count > 0):
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
        return count * (plan.base + plan.slope * (0.5 * (context + last) - plan.start))

    @property
    def coverage(self) -> list[Coverage]:
        """One entry per origin that occurred."""
        self._fold()
        return [
            Coverage(
                self.model, self.phase, origin, int(passes), Span(*ends[:2]), Span(*ends[2:4]),
                Span(*ends[4:]),
            )
            for origin, (passes, *ends) in zip(ORIGINS, self._seen, strict=True) if passes
        ]  # fmt: skip

    def _plan(self, batch: float, width: float) -> _Plan:
        if batch <= 0 or width <= 0:
            raise DraftsimError(f"a pass over {batch} sequences of {width} tokens has no latency")
        self._check(batch, width)
        if len(self._plans) >= PLANS:
            self._fold()
            self._plans.clear()
        plan = self._plans[batch, width] = _Plan(self._grid.line(batch, width))
        return plan

    def _fold(self) -> None:
        """Add the plans' tallies to the totals, and reset them."""
        for (batch, width), plan in self._plans.items():
            for origin, tally in enumerate(plan.tallies):
                if not tally[0]:
                    continue
                n, batch0, batch1, width0, width1, context0, context1 = self._seen[origin]
                self._seen[origin] = [
                    n + tally[0], min(batch, batch0), max(batch, batch1), min(width, width0),
                    max(width, width1), min(tally[1], context0), max(tally[2], context1),
                ]  # fmt: skip
                tally[:] = [0, inf, -inf]
