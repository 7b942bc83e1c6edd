"""Measured seconds along the context, several neighbouring batches and widths at a time.

A reading between two batches and two widths weighs four measured lines.  Each is linear
between its contexts, and along a roofline fit beyond them (`traces.latency.interpolate.Grid`), so
their sum is linear too between the contexts of all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED


class Line(NamedTuple):
    """Measured seconds over contexts at one batch and width."""

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


class Roofline:
    """The fitted growth of a pass with its sizes: see `traces.latency.interpolate.Grid`."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights

    def shape(self, batch: float, width: float, context: float) -> float:
        """Fitted seconds."""
        launch, sequence, token, cache, attention = self.weights
        per_context = cache + width * attention
        return launch + batch * (sequence + width * token + context * per_context)

    def slope(self, batch: float, width: float) -> float:
        """Fitted seconds per token of context."""
        return batch * (self.weights[3] + width * self.weights[4])

    def growth(self, at: tuple[float, float, float], base: tuple[float, float, float]) -> float:
        """How much the fit grows from `base` to `at`, points of (batch, width, context)."""
        below = self.shape(*base)
        return self.shape(*at) / below if below > 0 else 1.0

    def carried(self, line: Line, context: float) -> float:
        """Seconds of a line at any context, beyond its own as the fit grows."""
        edge, own = min(max(context, line.contexts[0]), line.contexts[-1]), (line.batch, line.width)
        return line.at(context) * self.growth((*own, context), (*own, edge))


class Stretch(NamedTuple):
    """Contexts from `start` up to `stop`, on which every line is linear from `cut` on."""

    start: float
    stop: float
    cut: float
    values: tuple[float, ...]
    slopes: tuple[float, ...]
    at_cut: int
    """Origin of a reading at `cut` itself."""
    inside: int
    """Origin of every other reading."""


class Surface:
    """Lines read together; their stretches are made when first read.

    `fit` gives the roofline, asked for only where a reading leaves the lines: few do.
    """

    def __init__(self, lines: Sequence[Line], fit: Callable[[], Roofline]) -> None:
        self.lines = lines
        self.fit = fit
        self.cuts = sorted({c for line in lines for c in line.contexts})
        self._low = max(line.contexts[0] for line in lines)
        self._high = min(line.contexts[-1] for line in lines)
        self._stretches: dict[int, Stretch] = {}

    def stretch(self, context: float) -> Stretch:
        """The stretch that holds `context`."""
        i = bisect_right(self.cuts, context)
        found = self._stretches.get(i)
        if found is None:
            found = self._stretches[i] = self._make(i)
        return found

    def _make(self, i: int) -> Stretch:
        cuts = self.cuts
        start, cut = (cuts[i - 1], cuts[i - 1]) if i else (-math.inf, cuts[0])
        stop = cuts[i] if i < len(cuts) else math.inf
        ends = []
        for line in self.lines:
            if start >= line.contexts[-1] or stop <= line.contexts[0]:
                ends.append(_beyond(line, cut, self.fit()))
            else:
                ends.append((line.at(cut), (line.at(stop) - line.at(cut)) / (stop - cut)))
        values, slopes = zip(*ends, strict=True)
        known = self._low <= cut <= self._high and i > 0
        at_cut = (INTERPOLATED if self.lines[1:] else MEASURED) if known else EXTRAPOLATED
        inside = INTERPOLATED if known and stop <= self._high else EXTRAPOLATED
        return Stretch(start, stop, cut, values, slopes, at_cut, inside)


def _beyond(line: Line, cut: float, fit: Roofline) -> tuple[float, float]:
    """Seconds at `cut` and per token of context, before the first or after the last context."""
    edge = min(max(cut, line.contexts[0]), line.contexts[-1])
    seconds, size = line.at(edge), (line.batch, line.width)
    below = fit.shape(*size, edge)
    if below <= 0:
        return seconds, 0.0
    return seconds * (fit.shape(*size, cut) / below), seconds * fit.slope(*size) / below
