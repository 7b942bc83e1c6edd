"""Least squares over a handful of weights none of which may be negative.

`scipy.optimize.nnls` finds the same, and loading scipy's optimisers takes half a second of every
command that reads a latency beyond its cells.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from policies.arrays import Floats

ROUNDING = 1e-14
"""Share of the squares below which errors are the same."""


def non_negative(features: Floats, target: Floats) -> Floats:
    """Return (columns,) weights, none negative, with the least squared error of ``features @
    weights``.

    The solution is plain least squares over the columns that it uses, so it is the best of all
    choices of columns (2 to their number) that leaves no weight negative.  Of equally good choices
    it is the first: the one of the fewest columns, and the foremost.

    Parameters
    ----------
    features:
        (rows, columns), of a few columns.
    target:
        (rows,)
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
