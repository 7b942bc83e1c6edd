"""Measured seconds of every step of decoding, and how to read between the points.

A table is a long list of cells: the median time of one step of one model at a batch,
a number of new tokens and a context.  Between measured points it interpolates
linearly; outside them it never extrapolates silently: the estimate comes from a
non-negative roofline-shaped fit and is flagged `EXTRAPOLATED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]

MEASURED, INTERPOLATED, EXTRAPOLATED = 0, 1, 2

CELL_COLUMNS: dict[str, tuple[str, str]] = {
    "model": ("str", "target, draft, or another part that runs by itself"),
    "phase": ("str", "the step that was timed, see PHASES"),
    "batch": ("int32", "sequences in the step"),
    "new_tokens": ("int32", "tokens fed per sequence"),
    "context": ("int32", "tokens already in the cache, per sequence"),
    "median_s": ("float64", "median over the repeats, seconds"),
    "spread_s": ("float64", "half the interquartile range over the repeats, seconds"),
    "repeats": ("int32", "timed repeats"),
}

PHASES: dict[str, str] = {
    "prefill": "the prompt in one pass (new_tokens = prompt length, context = 0)",
    "forward": "one pass as the decoder runs it: model, argmax and cache placement",
    "layer": "one transformer layer of that pass",
    "head": "final norm, output projection and argmax",
    "signal": "computing one drafted token's signals and bringing them to the host",
    "host_round": "per round: everything around the passes (accepting, bookkeeping, policy)",
    "host_draft": "per drafted token: everything around the pass",
    "rollback": "taking rejected tokens out of the cache",
}


class Estimate(NamedTuple):
    """Seconds with their origin, element by element."""

    seconds: Floats
    origin: npt.NDArray[np.int8]
    """MEASURED, INTERPOLATED or EXTRAPOLATED."""


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Latency cells (columns as in `CELL_COLUMNS`) and where they were measured.

    Raises
    ------
    DraftsimError
        On missing columns, unknown phases, repeated cells, or times that are not
        finite and positive (zero is allowed for host phases).
    """

    cells: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cells = self.cells
        if missing := [c for c in CELL_COLUMNS if c not in cells.columns]:
            raise DraftsimError(f"latency table lacks the column(s) {', '.join(missing)}")
        if unknown := sorted(set(cells["phase"]) - set(PHASES)):
            raise DraftsimError(f"latency table has unknown phase(s) {', '.join(unknown)}")
        key = ["model", "phase", "batch", "new_tokens", "context"]
        if (repeated := cells[cells.duplicated(key)]).shape[0]:
            raise DraftsimError(f"latency table repeats the cell {tuple(repeated[key].iloc[0])}")
        times = cells["median_s"].to_numpy(float)
        if not np.isfinite(times).all() or (times < 0).any():
            raise DraftsimError("latency table column 'median_s' holds a negative or non-finite time")

    @classmethod
    def constant(
        cls, target: float, draft: float, verify: float | None = None, **others: float
    ) -> LatencyTable:
        """The textbook model: every pass of a model costs the same (seconds).

        ``verify`` is the target's pass over two or more tokens (default: ``target``);
        ``others`` gives further single-cell phases of the target by name (``host_round``).
        """
        rows = [("target", "forward", 1, target), ("draft", "forward", 1, draft)]
        if verify is not None:
            rows.append(("target", "forward", 2, verify))
        rows += [("target", phase, 1, value) for phase, value in others.items()]
        for name, _, _, value in rows:
            if not np.isfinite(value) or value < 0:
                raise DraftsimError(f"constant latency of {name} is {value}, expected >= 0 seconds")
        frame = pd.DataFrame(
            [(m, p, 1, n, 0, float(v), 0.0, 1) for m, p, n, v in rows], columns=list(CELL_COLUMNS)
        )
        return cls(frame, {"kind": "constant", "device": "constant"})

    @property
    def is_constant(self) -> bool:
        """Whether the cells stand for every batch, width and context."""
        return self.meta.get("kind") == "constant"

    def has(self, model: str, phase: str) -> bool:
        """Whether the table holds any cell of this model and phase."""
        return (model, phase) in self._grids

    def scaled(self, factors: Mapping[str, float], note: str) -> LatencyTable:
        """The table with each model's times multiplied, marked as scaled with `note`."""
        cells = self.cells.copy()
        factor = cells["model"].map(dict(factors)).fillna(1.0).to_numpy(float)
        cells["median_s"] *= factor
        cells["spread_s"] *= factor
        return LatencyTable(cells, {**self.meta, "scaled": note})

    def estimate(
        self,
        model: str,
        phase: str,
        *,
        batch: npt.ArrayLike = 1,
        new_tokens: npt.ArrayLike = 1,
        context: npt.ArrayLike = 0,
    ) -> Estimate:
        """Seconds of a step; the three sizes broadcast against each other.

        Raises
        ------
        DraftsimError
            If nothing was measured for this model and phase.
        """
        grid = self._grids.get((model, phase))
        if grid is None:
            have = ", ".join(sorted({m for m, p in self._grids if p == phase})) or "no model"
            raise DraftsimError(
                f"latency table has no {phase!r} cells of {model!r} (it has them of {have}): "
                "profile that model, or use const:target=...,draft=..."
            )
        sizes = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (batch, new_tokens, context)))
        flat = [v.ravel() for v in sizes]
        seconds, origin = grid.read(*flat)
        return Estimate(seconds.reshape(sizes[0].shape), origin.reshape(sizes[0].shape))

    def seconds(self, model: str, phase: str, **sizes: npt.ArrayLike) -> Floats:
        """The seconds of `estimate` alone, zero for a host phase nobody measured."""
        if phase not in ("prefill", "forward", "layer", "head") and not self.has(model, phase):
            return np.zeros(np.broadcast_shapes(*(np.shape(v) for v in sizes.values())))
        return self.estimate(model, phase, **sizes).seconds

    @cached_property
    def _grids(self) -> dict[tuple[str, str], _Grid]:
        return {
            (str(model), str(phase)): _Grid(part, flat=self.is_constant)
            for (model, phase), part in self.cells.groupby(["model", "phase"], sort=False)
        }


class _Grid:
    """Interpolation over one model's cells of one phase.

    The points need not form a full grid: large batches are measured at fewer contexts.
    Reading goes context first, then new tokens, then batch, each linearly between the
    nearest measured neighbours.  Width 1 and width 2 are always measured apart, because
    kernels differ there.
    """

    def __init__(self, cells: pd.DataFrame, flat: bool) -> None:
        self._flat = flat
        ordered = cells.sort_values(["batch", "new_tokens", "context"])
        b, n, c, t = (ordered[k].to_numpy(float) for k in ("batch", "new_tokens", "context", "median_s"))
        self._lines: dict[float, dict[float, tuple[Floats, Floats]]] = {}
        for batch in np.unique(b):
            for width in np.unique(n[b == batch]):
                line = (b == batch) & (n == width)
                self._lines.setdefault(float(batch), {})[float(width)] = (c[line], t[line])
        self._points = (b, n, c, t)

    @cached_property
    def _fit(self) -> Floats:
        """Weights of `_features`, non-negative, fitted to relative error."""
        b, n, c, t = self._points
        scale = np.maximum(t, 1e-12)
        weights, _ = nnls(_features(b, n, c) / scale[:, None], np.ones(len(t)))
        return np.asarray(weights, dtype=float)

    def read(self, b: Floats, n: Floats, c: Floats) -> tuple[Floats, npt.NDArray[np.int8]]:
        out, origin = np.empty(len(b)), np.empty(len(b), dtype=np.int8)
        pairs, inverse = np.unique(np.stack([b, n]), axis=1, return_inverse=True)
        inverse = inverse.ravel()
        # One pass per distinct (batch, width): there are few, and contexts are many.
        order = np.argsort(inverse, kind="stable")
        stops = np.searchsorted(inverse[order], np.arange(pairs.shape[1] + 1))
        for i, (batch, width) in enumerate(pairs.T):
            rows = order[stops[i] : stops[i + 1]]
            out[rows], origin[rows] = self._read_pair(float(batch), float(width), c[rows])
        return out, origin

    def _read_pair(self, batch: float, width: float, c: Floats) -> tuple[Floats, npt.NDArray[np.int8]]:
        total, origin = np.zeros(len(c)), np.zeros(len(c), dtype=np.int8)
        outside = np.zeros(len(c), dtype=bool)
        for bw, b in _neighbours(list(self._lines), batch):
            if b is None:
                outside[:] = True
                continue
            for nw, n in _neighbours(list(self._lines[b]), width):
                if n is None:
                    outside[:] = True
                    continue
                contexts, times = self._lines[b][n]
                total += bw * nw * np.interp(c, contexts, times)
                outside |= (c < contexts[0]) | (c > contexts[-1])
                if bw * nw < 1:
                    origin[:] = INTERPOLATED
                origin = np.where(np.isin(c, contexts), origin, INTERPOLATED).astype(np.int8)
        if self._flat:
            return self._nearest(batch, width, c), np.zeros(len(c), dtype=np.int8)
        if outside.any():
            far = c[outside]
            total[outside] = _features(np.full(len(far), batch), np.full(len(far), width), far) @ self._fit
            origin[outside] = EXTRAPOLATED
        return total, origin

    def _nearest(self, batch: float, width: float, c: Floats) -> Floats:
        """Constant tables: the widest cell not wider than asked, at any batch and context."""
        del batch
        lines = next(iter(self._lines.values()))
        contexts, times = lines[max((w for w in lines if w <= width), default=min(lines))]
        return np.interp(c, contexts, times)


def _neighbours(points: Sequence[float], x: float) -> list[tuple[float, float | None]]:
    """(weight, point) pairs bracketing x; a None point where x lies outside the points."""
    ordered = np.array(sorted(points))
    if x < ordered[0] or x > ordered[-1]:
        return [(1.0, None)]
    i = int(np.searchsorted(ordered, x))
    if ordered[i] == x:
        return [(1.0, float(x))]
    lo, hi = float(ordered[i - 1]), float(ordered[i])
    w = (x - lo) / (hi - lo)
    return [(1 - w, lo), (w, hi)]


def _features(b: Floats, n: Floats, c: Floats) -> Floats:
    """Cost shapes of a pass: launch, batched tokens, cache read, attention."""
    return np.stack([np.ones_like(b), b, b * n, b * c, b * n * c], axis=1)
