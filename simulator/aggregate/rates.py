"""Tokens a round where an acceptance rate, or counts, are all that is known.

One number fits many texts: even acceptance, and easy and hard stretches.  What is said of a draft
length from it is an interval, over the two-state family of `simulator.aggregate.acceptance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from simulator.aggregate.acceptance import MEMORIES, UNEVENNESS, TwoState, iid_mean
from simulator.aggregate.hazard import Interval, emitted_at
from traces.errors import DraftsimError

LENGTHS = (1, 2, 3, 4, 5, 6, 8)
"""Draft lengths that are told where none are asked for."""


def emitted_of_rate(rate: float, gamma: int, later: Sequence[float] = (1.0,)) -> Interval:
    """Return tokens a round of `gamma`, where positions match at `rate`: i.i.d., least and largest.

    ``rate`` is the chance that the draft's token is the target's at any position of the text, as
    an alpha is; ``later`` as in `simulator.aggregate.acceptance.members`.  Rounds begin more often
    in hard stretches, so that the middle may lie below what independent positions give.

    Raises
    ------
    DraftsimError
        If the rate is no chance.

    >>> emitted_of_rate(0.8, 1).value
    1.8
    """
    if not 0 <= rate <= 1:
        raise DraftsimError(f"acceptance is {rate:g}, expected 0 to 1")
    shapes = [
        TwoState(rate, uneven, memory=memory, later=factor)
        for uneven, memory, factor in product(UNEVENNESS, MEMORIES, later)
    ]
    values = [shape.emitted(gamma) for shape in shapes if shape.possible]
    even = TwoState(rate).emitted(gamma)
    return Interval(even, min([even, *values]), max([even, *values]))


def known_totals(
    accepted: float, longest: int, survival: Sequence[float] | None, fixed: bool
) -> dict[int, float]:
    """Return tokens a round by draft length, so far as counts tell; empty if they tell of none.

    ``accepted``: drafted tokens accepted in a round; ``survival``: chances that the first 1, 2, ...
    are, where known.  These tell every length up to the longest, the sum alone that one, and either
    only where all drafts were as long (`fixed`).
    """
    if not fixed or longest < 1:
        return {}
    if survival is None:
        return {longest: 1 + accepted}
    return {k + 1: 1 + float(total) for k, total in enumerate(np.cumsum(survival))}


def emitted_rows(
    totals: Mapping[int, float], lengths: Sequence[int] = LENGTHS
) -> list[dict[str, Any]]:
    """Return tokens a round by draft length, with intervals and the i.i.d. reading, from totals.

    ``known``: True if the totals hold the length itself.
    """
    near = max(totals)
    even = TwoState(iid_mean(near, totals[near]))
    rows = []
    for gamma in sorted({*lengths, *totals}):
        found = emitted_at(totals, gamma)
        rows.append({
            "draft_length": gamma, "tokens_a_round": found.value, "low": found.low,
            "high": found.high, "independent": even.emitted(gamma), "known": gamma in totals,
        })  # fmt: skip
    return rows
