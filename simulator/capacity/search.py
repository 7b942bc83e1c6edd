"""Searches that ask yes-or-no questions of a noisy, monotone answer, as generators.

Each yields what it wants to know of, is sent whether the targets are kept there, and returns
what it found, so that many searches can be answered side by side.
"""

from __future__ import annotations

import math
from collections.abc import Generator


def fewest(guess: int, most: int) -> Generator[int, bool, int | None]:
    """The fewest replicas, up to `most`, that keep the targets; None if `most` do not.

    It looks around `guess` in growing steps, halves what is between, and then makes sure that
    one more keeps them too: where that is not so, the answer was chance, and it goes on above.
    """
    low, high, at, step = 0, most + 1, min(max(guess, 1), most), 1
    while True:
        if (yield at):
            high = at
        else:
            low = at
        if high - low == 1:
            if high > most:
                return None
            if high == most or (yield high + 1):
                return high
            low, high, step = high + 1, most + 1, 1
            if low == most:
                return None
        if high > most:
            at, step = min(low + step, most), 2 * step
        elif low == 0:
            at, step = max(high - step, 1), 2 * step
        else:
            at = (low + high) // 2


def highest(
    start: float, step: float, tolerance: float, least: float, most: float
) -> Generator[float, bool, float]:
    """The highest rate that keeps the targets, to a relative `tolerance`.

    0 if it is below `least`, infinite if it is above `most`.

    From `start` it goes up or down by factors of `step`, then halves on a logarithmic scale.
    """
    low, high, at = 0.0, math.inf, start
    while True:
        if (yield at):
            low = at
        else:
            high = at
        if not low:
            at = high / step
            if at < least:
                return 0.0
        elif math.isinf(high):
            if low >= most:
                return math.inf
            at = low * step
        elif high <= low * (1 + tolerance):
            return low
        else:
            at = math.sqrt(low * high)
