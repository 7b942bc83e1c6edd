"""Latency grid of one phase, read between its points, and beyond them with a flag."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats

Origins = npt.NDArray[np.int8]
PassSizes = tuple[float | Floats, float | Floats, Floats]

MEASURED, INTERPOLATED, EXTRAPOLATED = 0, 1, 2
FAR = 1 << 20
"""Tokens beyond the longest context measured at which the last piece of a `Line` is read."""
APART = 1e-6
"""Tokens below the widest pass at which those of another kind end."""
LINES = 1 << 15
"""Lines kept of a grid: one per batch and width that occurred."""
ROUNDING = 1e-14
"""Share of the squares below which `non_negative` takes two errors as equal."""
PROMPT, GROWING = 64, 0.9
"""Tokens a sequence from which a pass that was measured at one size alone is taken for a prompt's,
and the share of its seconds that grows with its tokens: composed prompts of an 8B of 2,048 tokens
take 3.8 to 4.3 times those of 512."""


class Line(NamedTuple):
    """Seconds over contexts at one batch and width, read once: linear from each of `cuts` on."""

    cuts: list[float]
    """Contexts from 0 on."""
    seconds: list[float]
    """Seconds at each cut."""
    slopes: list[float]
    """Seconds per token of context after each cut."""
    at_cut: list[int]
    """Origin of a reading at each cut itself."""
    after: list[int]
    """Origin of the other readings up to the next cut."""


class CellGrid:
    """Interpolation over one model's cells of one phase.

    The points need not form a full grid: large batches are measured at fewer contexts.
    Reading goes context first, then new tokens, then batch, each linearly between the
    nearest measured neighbours.  Beyond the last point the nearest reading is carried
    on along a roofline-shaped fit (launch, batched tokens, cache read, attention; weights
    non-negative), so that it joins the measured range without a step.

    Parameters
    ----------
    cells:
        Columns ``batch``, ``new_tokens``, ``context``, ``median_s`` of this phase.
    flat:
        Constant table: the widest cell not wider than asked holds at every batch and
        context, and counts as measured.
    batch_free:
        Every batch is read at the one measured, where there is but one.
    any_context:
        The one context measured holds at every other, and counts as measured.
    widest_apart:
        The widest passes are another kind (full CUDA graphs): wider ones than the last but one
        cost as much as that, up to the widest.

    Attributes
    ----------
    lines:
        (contexts, seconds) by batch and width.
    """

    def __init__(
        self, cells: pd.DataFrame, flat: bool = False, batch_free: bool = False,
        any_context: bool = False, widest_apart: bool = False,
    ) -> None:  # fmt: skip
        self.flat = flat
        self.batch_free = batch_free
        self.any_context = any_context
        b, n, c, t = (
            cells[k].to_numpy(float) for k in ("batch", "new_tokens", "context", "median_s")
        )
        order = np.lexsort((c, n, b))
        b, n, c, t = b[order], n[order], c[order], t[order]
        self.lines: dict[float, dict[float, tuple[Floats, Floats]]] = {}
        for batch in np.unique(b):
            for width in np.unique(n[b == batch]):
                line = (b == batch) & (n == width)
                self.lines.setdefault(float(batch), {})[float(width)] = (c[line], t[line])
        for by_width in self.lines.values() if widest_apart else ():
            *_, near, widest = 0.0, *sorted(by_width)
            if near:
                by_width[widest - APART] = by_width[near]
        self._points = (b, n, c, t)
        self._lines: dict[tuple[float, float], Line | None] = {}

    @cached_property
    def batches(self) -> list[float]:
        """Batch sizes measured."""
        return sorted(self.lines)

    @cached_property
    def only_batch(self) -> float | None:
        """The batch at which every other is read; None where sizes are told apart."""
        return next(iter(self.lines)) if self.batch_free and len(self.lines) == 1 else None

    @cached_property
    def widths(self) -> list[float]:
        """New tokens measured, at any batch."""
        return sorted({width for by_width in self.lines.values() for width in by_width})

    @cached_property
    def contexts(self) -> tuple[float, float]:
        """The shortest and the longest context measured, at any batch and width."""
        return float(self._points[2].min()), float(self._points[2].max())

    @cached_property
    def quickest_s(self) -> float:
        """Seconds of the quickest measured pass."""
        return float(self._points[3].min())

    @cached_property
    def widest(self) -> float:
        """The largest width that was measured at every batch."""
        return min(max(by_width) for by_width in self.lines.values())

    @cached_property
    def widest_together(self) -> float:
        """The largest width of several sequences; infinite if none was measured."""
        widths = [width for batch, rows in self.lines.items() if batch > 1 for width in rows]
        return max(widths, default=math.inf)

    def line(self, batch: float, width: float) -> Line | None:
        """Return the seconds at every context; None if no batch and width measured surround it."""
        key = batch, width
        if key not in self._lines:
            if len(self._lines) >= LINES:
                self._lines.clear()
            self._lines[key] = self._line(batch, width) if self.covers(batch, width) else None
        return self._lines[key]

    def covers(self, batch: float, width: float) -> bool:
        """Return True if passes of this batch and width lie within the measured ones."""
        if self.flat:
            return True
        batches, b = self.batches, self.only_batch or batch
        if not batches[0] <= b <= batches[-1]:
            return False
        near = batches[bisect_right(batches, b) - 1], batches[bisect_left(batches, b)]
        return all(min(self.lines[own]) <= width <= max(self.lines[own]) for own in near)

    def _line(self, batch: float, width: float) -> Line:
        cuts = np.array([0.0]) if self.flat else np.unique(np.append(self._points[2], 0.0))
        ends = np.append(cuts[1:], cuts[-1] + FAR)
        asked = np.concatenate([cuts, (cuts + ends) / 2, ends])
        sizes = np.full(len(asked), batch, float), np.full(len(asked), width, float)
        seconds, origin = self.read(*sizes, asked)
        at, _, end = seconds.reshape(3, -1)
        at_cut, after, _ = origin.reshape(3, -1)
        slopes = (end - at) / (ends - cuts)
        return Line(*(column.tolist() for column in (cuts, at, slopes, at_cut, after)))

    def read(self, b: Floats, n: Floats, c: Floats) -> tuple[Floats, Origins]:
        """Return seconds and their origin at equally long arrays of batch, new tokens, context."""
        if (only := self.only_batch) is not None:
            b = np.full(len(b), only)
        if self.any_context:
            c = np.full(len(c), self.contexts[0])
        if self.flat:
            return self._constant(n, c)
        # Element by element as if alone; together they take a step per measured line.
        total, origin = np.zeros(len(b)), np.zeros(len(b), dtype=np.int8)
        for rows, batch, weight in _sides(self.batches, b):
            value, beyond, from_lines = self._at_batch(batch, n[rows], c[rows])
            total[rows] += weight * value
            from_lines[weight < 1] = np.maximum(from_lines[weight < 1], INTERPOLATED)
            from_lines[beyond] = EXTRAPOLATED
            origin[rows] = np.maximum(origin[rows], from_lines)
        nearest = np.clip(b, self.batches[0], self.batches[-1])
        if (outside := b != nearest).any():
            at = n[outside], c[outside]
            total[outside] *= self._ratio((b[outside], *at), (nearest[outside], *at))
            origin[outside] = EXTRAPOLATED
        return total, origin

    def _at_batch(
        self, batch: float, n: Floats, c: Floats
    ) -> tuple[Floats, npt.NDArray[np.bool_], Origins]:
        """Return seconds at a measured batch, whether the width lies outside, and origins."""
        value, origin = np.zeros(len(n)), np.zeros(len(n), dtype=np.int8)
        widths = sorted(self.lines[batch])
        for rows, width, weight in _sides(widths, n):
            seconds, from_line = self._along(batch, width, c[rows])
            value[rows] += weight * seconds
            from_line[weight < 1] = np.maximum(from_line[weight < 1], INTERPOLATED)
            origin[rows] = np.maximum(origin[rows], from_line)
        nearest = np.clip(n, widths[0], widths[-1])
        outside = n != nearest
        if outside.any():
            own = np.full(int(outside.sum()), batch)
            at, edge = (own, n[outside], c[outside]), (own, nearest[outside], c[outside])
            value[outside] *= self._ratio(at, edge)
        return value, outside, origin

    def _along(self, b: float, n: float, c: Floats) -> tuple[Floats, Origins]:
        """Return one measured line of contexts, carried on beyond its ends."""
        contexts, times = self.lines[b][n]
        seconds = np.interp(c, contexts, times)
        inside = np.minimum(np.maximum(c, contexts[0]), contexts[-1])
        known = contexts[contexts.searchsorted(inside)] == c
        origin = np.where(known, MEASURED, INTERPOLATED).astype(np.int8)
        if (outside := c != inside).any():
            seconds[outside] *= self._ratio((b, n, c[outside]), (b, n, inside[outside]))
            origin[outside] = EXTRAPOLATED
        return seconds, origin

    def _constant(self, n: Floats, c: Floats) -> tuple[Floats, Origins]:
        lines = next(iter(self.lines.values()))
        widths = sorted(lines)
        # A ragged verification is a wide pass, however little its mean width exceeds 1.
        wide = np.maximum(np.searchsorted(widths, np.ceil(n), side="right") - 1, 0)
        out = np.empty(len(n))
        for i in np.bincount(wide).nonzero()[0].tolist():
            out[wide == i] = np.interp(c[wide == i], *lines[widths[i]])
        return out, np.zeros(len(n), dtype=np.int8)

    def _ratio(self, at: PassSizes, base: PassSizes) -> Floats:
        """Return the growth of the fit from `base` to `at`: (batch, new tokens, contexts)."""
        above, below = _features(*at) @ self.fit, _features(*base) @ self.fit
        return np.divide(above, below, out=np.ones_like(above), where=below > 0)

    @cached_property
    def fit(self) -> Floats:
        """Non-negative weights of `_features`, fitted to relative error."""
        b, n, c, t = self._points
        features = _features(b, n, c)
        if len(t) == 1 and not c[0] and n[0] >= PROMPT:
            # One size tells no growth, and a prompt of twice the tokens takes about twice as long.
            # Decoding many requests at once does not: its passes read the weights.
            alone: Floats = np.zeros(features.shape[1])
            alone[:3] = (1 - GROWING) * t[0], 0.0, GROWING * t[0] / (b[0] * n[0])
            return alone
        # At a common scale, a size that was never varied is left to the constant term.
        size = np.maximum(features.max(axis=0), 1e-300)
        scale = np.where(t > 0, t, 1.0)
        weights = non_negative(features / size / scale[:, None], t / scale)
        unscaled: Floats = weights / size
        return unscaled


def _sides(
    points: Sequence[float], x: Floats
) -> Iterator[tuple[npt.NDArray[np.int64], float, Floats]]:
    """Yield (elements, point, weights): the points that bracket each element of `x`."""
    ordered = np.asarray(points)
    last = len(ordered) - 1
    above = np.minimum(ordered.searchsorted(x), last)
    below = np.where((ordered[above] > x) & (above > 0), above - 1, above)
    gap = ordered[above] - ordered[below]
    share = np.divide(x - ordered[below], gap, out=np.zeros(len(x)), where=gap > 0)
    every = np.arange(len(x))
    between = share.nonzero()[0]
    for elements, place, weight in ((every, below, 1 - share), (between, above, share)):
        own = place[elements]
        for i in np.bincount(own).nonzero()[0].tolist():
            rows = elements[own == i]
            yield rows, points[i], weight[rows]


def _features(b: float | Floats, n: float | Floats, c: Floats) -> Floats:
    """Return a pass's launch, sequences, batched tokens, cache read and attention."""
    return np.stack(np.broadcast_arrays(1.0, b, b * n, b * c, b * n * c), axis=1)


def non_negative(features: Floats, target: Floats) -> Floats:
    """Return (columns,) weights, none negative, of least squares of ``features @ weights``.

    ``features`` (rows, columns) has a few columns, of which all choices are tried; ``target`` is
    (rows,).  Of equally good choices it is the first, with the fewest columns.
    `scipy.optimize.nnls` finds the same, but takes half a second to load.
    """
    columns, all_of_it = features.shape[1], float(target @ target)
    found, least = np.zeros(columns), all_of_it
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            own = features[:, chosen]
            weights = np.linalg.lstsq(own, target, rcond=None)[0]
            left = target - own @ weights
            error = float(left @ left)
            # Of columns that say the same, the first; what another gains then is rounding.
            if (weights >= 0).all() and error < least - ROUNDING * all_of_it:
                least, found = error, np.zeros(columns)
                found[list(chosen)] = weights
    return found
