"""A ratio of sums with its standard error, the estimator of speedups and rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Estimate(NamedTuple):
    """A value and its standard error (NaN from a single sample)."""

    value: float
    standard_error: float


def ratio(over: npt.ArrayLike, under: npt.ArrayLike) -> Estimate:
    """sum(over) / sum(under) over independent samples, both of shape (samples,).

    The standard error is the delta method's, with n - 1 in the variance.
    """
    a, b = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    value = float(a.sum() / b.sum())
    n = len(a)
    if n < 2:
        return Estimate(value, float("nan"))
    residual = a - value * b
    error = np.sqrt((residual**2).sum() * n / (n - 1)) / abs(b.sum())
    # Rounding leaves a trace of error where every sample has the same ratio.
    return Estimate(value, 0.0 if error < 1e-12 * abs(value) else float(error))
