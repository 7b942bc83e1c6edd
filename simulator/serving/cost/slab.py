"""Many readings of a latency grid at one batch, as numpy reads them.

`simulator.serving.cost.reader.PassReader` reads one size; a span of iterations asks for many at
the same batch.  Between measured widths its reading is linear in the width and, piece by piece,
in the context, so a cell of the grid is four numbers.  Widths beyond the measured ones are left
to the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.serving.cost.surface import Line, Roofline
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED, Origins

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FAR = 1e9
"""A context that no cache reaches: the last cell ends there."""


class Slab:
    """The grid at one batch, made of measured lines at one batch or the two around it.

    Parameters
    ----------
    sides:
        (weight, lines by width) of each measured batch; weights sum to one.
    fit:
        What every line is carried on along beyond its contexts; None: contexts that some line
        lacks are left out.

    Attributes
    ----------
    widths, contexts:
        Where cells meet, ascending.
    endless:
        Whether it goes on beyond the contexts measured.
    usable:
        False where the lines of the sides share no range.
    """

    def __init__(
        self, sides: Sequence[tuple[float, dict[float, Line]]], fit: Roofline | None = None
    ) -> None:
        lines = [line for _, side in sides for line in side.values()]
        low, high = max(min(side) for _, side in sides), min(max(side) for _, side in sides)
        self.sides, self.endless = sides, fit is not None
        first, last = 0.0, FAR
        if fit is None:
            first, last = _shared(lines)
        self.usable = low <= high and first <= last
        self.widths = _between({w for _, side in sides for w in side}, low, high)
        cuts = {c for line in lines for c in line.contexts}
        self.contexts = _between({first, *cuts, last}, first, last)
        if not self.usable:
            return
        values = np.zeros((len(self.widths), len(self.contexts)))
        for weight, side in sides:
            own = sorted(side)
            read = Line.at if fit is None else fit.carried
            rows = np.array([[read(side[w], c) for c in self.contexts.tolist()] for w in own])
            values += (
                weight * np.array([np.interp(self.widths, own, column) for column in rows.T]).T
            )
        self._cells = _coefficients(self.widths, self.contexts, values)
        self._columns = max(len(self.contexts) - 1, 1)
        self._measured = np.zeros(values.shape, bool)
        if len(sides) == 1:
            for i, width in enumerate(self.widths):
                measured = sides[0][1].get(width)
                if measured is not None:
                    self._measured[i] = np.isin(self.contexts, measured.contexts)
        # The contexts that every line read has: at each width, and between each and the next.
        middles = (self.widths[1:] + self.widths[:-1]) / 2
        self._at = np.array([_shared(_read_at(sides, w)) for w in self.widths])
        self._between = np.array([_shared(_read_at(sides, w)) for w in (*middles, low)])

    def holds(self, widths: Floats, contexts: Floats) -> bool:
        """Whether every reading lies within the slab."""
        # Their ufuncs at once: a span asks this of few numbers, a thousand times.
        least, most = np.minimum.reduce, np.maximum.reduce
        return bool(
            self.usable
            and least(widths) >= self.widths[0] and most(widths) <= self.widths[-1]
            and (
                self.endless
                or (least(contexts) >= self.contexts[0] and most(contexts) <= self.contexts[-1])
            )
        )  # fmt: skip

    def read(self, widths: Floats, contexts: Floats) -> Floats:
        """Seconds at pairs of width and context that the slab `holds`."""
        cell = self.widths[1:-1].searchsorted(widths, side="right") * self._columns
        cell += self.contexts[1:-1].searchsorted(contexts, side="right")
        base, per_width, per_context, both = self._cells[:, cell]
        seconds: Floats = base + per_width * widths + (per_context + both * widths) * contexts
        return seconds

    def origins(self, widths: Floats, contexts: Floats) -> Origins:
        """Where each of the readings comes from."""
        i = self.widths.searchsorted(widths)
        exact = self.widths[i] == widths
        first, last = np.where(exact[:, None], self._at[i], self._between[i - 1]).T
        found = np.full(len(widths), INTERPOLATED, dtype=np.int8)
        found[(contexts < first) | (contexts > last)] = EXTRAPOLATED
        if self._measured.any():
            j = self.contexts.searchsorted(contexts)
            found[exact & self._measured[i, j] & (self.contexts[j] == contexts)] = MEASURED
        return found


def _read_at(sides: Sequence[tuple[float, dict[float, Line]]], width: float) -> list[Line]:
    """The lines that a reading at this width is made of."""
    read = []
    for _, side in sides:
        below = max(w for w in side if w <= width)
        above = min(w for w in side if w >= width)
        read += [side[below], side[above]]
    return read


def _shared(lines: Sequence[Line]) -> tuple[float, float]:
    """First and last context that all the lines have; the first is past the last if none is."""
    return max(line.contexts[0] for line in lines), min(line.contexts[-1] for line in lines)


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
