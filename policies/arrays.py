"""Types of numpy arrays, and indices into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def next_true(which: Bools) -> Ints:
    """Return for each position the index of the first True at or after it; their number if none."""
    places = np.where(which, np.arange(len(which)), len(which))
    found: Ints = np.minimum.accumulate(places[::-1])[::-1]
    return found


def half_iqr(values: npt.ArrayLike) -> Any:
    """Return half the interquartile range along the first axis: how widely seconds spread."""
    low, high = np.quantile(np.asarray(values), [0.25, 0.75], axis=0)
    return (high - low) / 2


def ranges(lengths: npt.NDArray[np.integer], begin: Ints | int = 0) -> Ints:
    """Return begin, begin + 1, ... for each of `lengths`, one range after another.

    >>> ranges(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    found: Ints = np.arange(int(lengths.sum())) + np.repeat(begin - before, lengths)
    return found
