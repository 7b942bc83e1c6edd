"""Least squares of a few weights, none of which may be negative.

`scipy.optimize.nnls` finds the same (a test holds the two together), but importing it takes a tenth
of the time in which commands answer that fit five weights with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-12
"""Of what is missed, a share that is nothing; so is its square of the values themselves."""


def nonnegative(features: Floats, values: Floats) -> Floats:
    """(n,) weights >= 0 that minimise ``|features @ weights - values|``; (m, n) and (m,).

    The weights that are not zero solve the problem without the bound, so every choice of these
    is tried, 31 for five features; of choices that do alike, the first of the smallest is taken.
    """
    squares = float(values @ values)
    weights, least = np.zeros(features.shape[1]), squares
    for chosen in map(list, _choices(features.shape[1])):
        own = np.linalg.lstsq(features[:, chosen], values, rcond=None)[0]
        missed = features[:, chosen] @ own - values
        gained = least - float(missed @ missed)
        if own.min() >= 0 and gained > ROUNDING * least + ROUNDING**2 * squares:
            least -= gained
            weights[:] = 0.0
            weights[chosen] = own
    return weights


def _choices(count: int) -> Iterable[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(count), k + 1) for k in range(count))
