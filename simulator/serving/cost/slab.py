"""Many readings of a latency grid at one batch, as numpy reads them.

`simulator.serving.cost.reader.PassReader` reads one size; a span of iterations asks for many at
the same batch.  Between measured sizes its reading is linear in the context and in the
width, so a cell of the grid is four numbers.  Sizes beyond the measured ones are left to
the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.serving.cost.surface import Line

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Slab:
    """The grid at one batch, made of measured lines at one batch or the two around it.

    Parameters
    ----------
    sides:
        (weight, lines by width) of each measured batch; weights sum to one.

    Attributes
    ----------
    widths, contexts:
        Where cells meet, ascending.
    usable:
        False where the lines of the sides share no range.
    """

    def __init__(self, sides: Sequence[tuple[float, dict[float, Line]]]) -> None:
        lines = [line for _, side in sides for line in side.values()]
        low = max(min(side) for _, side in sides), max(line.contexts[0] for line in lines)
        high = min(max(side) for _, side in sides), min(line.contexts[-1] for line in lines)
        self.usable = low[0] <= high[0] and low[1] <= high[1]
        self.widths = _between({w for _, side in sides for w in side}, low[0], high[0])
        self.contexts = _between({c for line in lines for c in line.contexts}, low[1], high[1])
        self.exact = np.zeros((len(self.widths), len(self.contexts)), bool)
        """Where a reading is a measured cell."""
        if not self.usable:
            return
        values = np.zeros((len(self.widths), len(self.contexts)))
        for weight, side in sides:
            own = sorted(side)
            rows = np.array([[side[w].at(c) for c in self.contexts] for w in own])
            values += (
                weight * np.array([np.interp(self.widths, own, column) for column in rows.T]).T
            )
        if len(sides) == 1:
            for i, width in enumerate(self.widths):
                measured = sides[0][1].get(width)
                if measured is not None:
                    self.exact[i] = np.isin(self.contexts, measured.contexts)
        self._cells = _coefficients(self.widths, self.contexts, values)
        self._columns = max(len(self.contexts) - 1, 1)

    def holds(self, widths: Floats, contexts: Floats) -> bool:
        """Whether every reading lies within the measured sizes."""
        return bool(
            self.usable
            and widths.min() >= self.widths[0] and widths.max() <= self.widths[-1]
            and contexts.min() >= self.contexts[0] and contexts.max() <= self.contexts[-1]
        )  # fmt: skip

    def read(self, widths: Floats, contexts: Floats) -> Floats:
        """Seconds at pairs of width and context that the slab `holds`."""
        cell = self.widths[1:-1].searchsorted(widths, side="right") * self._columns
        cell += self.contexts[1:-1].searchsorted(contexts, side="right")
        base, per_width, per_context, both = self._cells[:, cell]
        seconds: Floats = base + per_width * widths + (per_context + both * widths) * contexts
        return seconds

    def measured(self, widths: Floats, contexts: Floats) -> Flags:
        """Which of the readings are measured cells."""
        i = self.widths.searchsorted(widths)
        j = self.contexts.searchsorted(contexts)
        hit: Flags = self.exact[i, j] & (self.widths[i] == widths) & (self.contexts[j] == contexts)
        return hit


def _between(points: set[float], low: float, high: float) -> Floats:
    return np.array(sorted(p for p in points if low <= p <= high))


def _coefficients(widths: Floats, contexts: Floats, values: Floats) -> Floats:
    """(4, cells): base, per token of width, per token of context, and per both."""
    rows, columns = max(len(widths) - 1, 1), max(len(contexts) - 1, 1)
    out = np.zeros((4, rows, columns))
    for i in range(rows):
        for j in range(columns):
            # A single width or context is a cell of its own, flat that way.
            i1, j1 = min(i + 1, len(widths) - 1), min(j + 1, len(contexts) - 1)
            dw = widths[i1] - widths[i] or 1.0
            dc = contexts[j1] - contexts[j] or 1.0
            at = values[i, j]
            per_w, per_c = (values[i1, j] - at) / dw, (values[i, j1] - at) / dc
            twist = (values[i1, j1] - values[i1, j] - values[i, j1] + at) / (dw * dc)
            w, c = widths[i], contexts[j]
            out[:, i, j] = (
                at - per_w * w - per_c * c + twist * w * c,
                per_w - twist * c, per_c - twist * w, twist,
            )  # fmt: skip
    return out.reshape(4, rows * columns)
