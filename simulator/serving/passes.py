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


class _Plan(NamedTuple):
    """A line of the grid at one (batch, width), and the passes read from it."""

    line: Line | None
    """None where no batch and width measured surround it."""
    tallies: tuple[list[float], ...]
    """[passes, lowest, highest context] by origin."""


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
        line, tallies = plan
        if line is None:
            tally = tallies[EXTRAPOLATED]
            sizes = (np.array([float(size)]) for size in (batch, new_tokens, context))
            seconds = float(self._grid.read(*sizes)[0][0])
        else:
            i = max(bisect_right(line.cuts, context) - 1, 0)
            cut = line.cuts[i]
            tally = tallies[line.at_cut[i] if context == cut else line.after[i]]
            seconds = line.seconds[i] + line.slopes[i] * (context - cut)
        passes, low, high = tally
        tally[0] = passes + 1
        # Contexts grow from round to round, so this is the usual case: no calls for it.
        if not low <= context <= high:
            tally[1] = context if context < low else low
            tally[2] = context if context > high else high
        return seconds

    def run(self, batch: float, context: float, count: int) -> float:
        """Return seconds of `count` passes in a row, a token each, from `context` tokens on."""
        plan = self._plans.get((batch, 1.0))
        last = context + (count - 1)
        if count > 1 and plan is not None and plan.line is not None:
            line, i = plan.line, bisect_right(plan.line.cuts, context)
            stop = line.cuts[i] if i < len(line.cuts) else inf
            if i and line.cuts[i - 1] < context and last < stop:
                tally = plan.tallies[line.after[i - 1]]
                tally[:] = tally[0] + count, min(context, tally[1]), max(last, tally[2])
                middle = 0.5 * (context + last) - line.cuts[i - 1]
                return count * (line.seconds[i - 1] + line.slopes[i - 1] * middle)
        return sum((self(batch, 1.0, context + step) for step in range(count)), 0.0)

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
        tallies = tuple([0, inf, -inf] for _ in ORIGINS)
        plan = self._plans[batch, width] = _Plan(self._grid.line(batch, width), tallies)
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
