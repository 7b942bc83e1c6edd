"""Reading a latency grid between its points, and beyond them with a flag."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]
Origins = npt.NDArray[np.int8]

MEASURED, INTERPOLATED, EXTRAPOLATED = 0, 1, 2


class Grid:
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

    Attributes
    ----------
    lines:
        (contexts, seconds) by batch and width.
    """

    def __init__(self, cells: pd.DataFrame, flat: bool = False, batch_free: bool = False) -> None:
        self.flat = flat
        self.batch_free = batch_free
        ordered = cells.sort_values(["batch", "new_tokens", "context"])
        b, n, c, t = (
            ordered[k].to_numpy(float) for k in ("batch", "new_tokens", "context", "median_s")
        )
        self.lines: dict[float, dict[float, tuple[Floats, Floats]]] = {}
        for batch in np.unique(b):
            for width in np.unique(n[b == batch]):
                line = (b == batch) & (n == width)
                self.lines.setdefault(float(batch), {})[float(width)] = (c[line], t[line])
        self._points = (b, n, c, t)

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

    def read(self, b: Floats, n: Floats, c: Floats) -> tuple[Floats, Origins]:
        """Seconds and their origin at equally long arrays of batch, new tokens, context."""
        if (only := self.only_batch) is not None:
            b = np.full(len(b), only)
        out, origin = np.empty(len(b)), np.empty(len(b), dtype=np.int8)
        # As one complex number each, which sort several times faster than rows of a matrix.
        pairs, inverse = np.unique(b + 1j * n, return_inverse=True)
        # One pass per distinct (batch, width): there are few, and contexts are many.
        order = np.argsort(inverse, kind="stable")
        stops = np.searchsorted(inverse[order], np.arange(len(pairs) + 1))
        read = self._constant if self.flat else self._interpolate
        for i, pair in enumerate(pairs):
            rows = order[stops[i] : stops[i + 1]]
            out[rows], origin[rows] = read(float(pair.real), float(pair.imag), c[rows])
        return out, origin

    def _interpolate(self, batch: float, width: float, c: Floats) -> tuple[Floats, Origins]:
        total, origin = np.zeros(len(c)), np.zeros(len(c), dtype=np.int8)
        for batch_weight, b in _neighbours(self.lines, batch):
            near = _neighbours(self.lines[b], width)
            value = np.zeros(len(c))
            for width_weight, n in near:
                seconds, from_line = self._along(b, n, c)
                value += width_weight * seconds
                origin = np.maximum(origin, from_line)
            if len(near) > 1 or batch_weight < 1:
                origin = np.maximum(origin, np.int8(INTERPOLATED))
            if not min(self.lines[b]) <= width <= max(self.lines[b]):
                value *= self._ratio((b, width, c), (b, near[0][1], c))
                origin[:] = EXTRAPOLATED
            total += batch_weight * value
        if not min(self.lines) <= batch <= max(self.lines):
            nearest = _neighbours(self.lines, batch)[0][1]
            total *= self._ratio((batch, width, c), (nearest, width, c))
            origin[:] = EXTRAPOLATED
        return total, origin

    def _along(self, b: float, n: float, c: Floats) -> tuple[Floats, Origins]:
        """One measured line of contexts, carried on beyond its ends."""
        contexts, times = self.lines[b][n]
        seconds = np.interp(c, contexts, times)
        origin = np.where(np.isin(c, contexts), MEASURED, INTERPOLATED).astype(np.int8)
        inside = np.clip(c, contexts[0], contexts[-1])
        if (outside := c != inside).any():
            seconds[outside] *= self._ratio((b, n, c[outside]), (b, n, inside[outside]))
            origin[outside] = EXTRAPOLATED
        return seconds, origin

    def _constant(self, batch: float, width: float, c: Floats) -> tuple[Floats, Origins]:
        del batch
        lines = next(iter(self.lines.values()))
        contexts, times = lines[max((w for w in lines if w <= width), default=min(lines))]
        return np.interp(c, contexts, times), np.zeros(len(c), dtype=np.int8)

    def _ratio(self, at: tuple[float, float, Floats], base: tuple[float, float, Floats]) -> Floats:
        """How much the fit grows from `base` to `at`, points of (batch, new tokens, contexts)."""
        above, below = _features(*at) @ self.fit, _features(*base) @ self.fit
        return np.divide(above, below, out=np.ones_like(above), where=below > 0)

    @cached_property
    def fit(self) -> Floats:
        """Non-negative weights of `_features`, fitted to relative error."""
        # Imported here: few readings leave the grid, and scipy.optimize is slow to load.
        from scipy.optimize import nnls

        b, n, c, t = self._points
        features = _features(b, n, c)
        # At a common scale, a size that was never varied is left to the constant term.
        size = np.maximum(features.max(axis=0), 1e-300)
        scale = np.where(t > 0, t, 1.0)
        weights, _ = nnls(features / size / scale[:, None], t / scale)
        return np.asarray(weights / size, dtype=float)


def _neighbours(points: Iterable[float], x: float) -> list[tuple[float, float]]:
    """(weight, point) pairs bracketing x; outside the points, the nearest one alone."""
    ordered = np.array(sorted(points))
    i = int(np.clip(np.searchsorted(ordered, x), 0, len(ordered) - 1))
    if ordered[i] == x or x < ordered[0] or x > ordered[-1]:
        return [(1.0, float(ordered[i]))]
    lo, hi = float(ordered[i - 1]), float(ordered[i])
    w = (x - lo) / (hi - lo)
    return [(1 - w, lo), (w, hi)]


def _features(b: float | Floats, n: float | Floats, c: Floats) -> Floats:
    """Cost shapes of a pass: launch, sequences, batched tokens, cache read, attention."""
    return np.stack(np.broadcast_arrays(1.0, b, b * n, b * c, b * n * c), axis=1)
