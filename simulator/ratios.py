"""A whole range of cost ratios priced at once, from the histogram of draft lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traces.errors import DraftsimError
from traces.rounds import RoundLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class RatioCurve(NamedTuple):
    """Decode cost over a range of cost ratios, in units of one target pass; shape (ratios,)."""

    ratio: Floats
    """c = T_draft / T_target."""
    cost: Floats
    """Target passes' worth of time over the whole log."""
    speedup: Floats
    """Plain decoding's cost over `cost`."""


def price_ratios(
    log: RoundLog, ratios: npt.ArrayLike, verify: float | Mapping[int, float] = 1.0
) -> RatioCurve:
    """Price `log` at every cost ratio c at once, from the histogram of its drafts.

    The textbook cost model: a target pass costs 1, a draft pass c, a verification of
    n >= 1 drafts ``verify`` (or ``verify[n]``, for the widths that occur).  The rounds
    enter through two counts per draft length only, so the price of one more ratio does
    not depend on the length of the log.

    Raises
    ------
    DraftsimError
        On a negative or non-finite ratio or verification cost, or a width `verify` lacks;
        or if the log has no rounds.
    """
    c = np.atleast_1d(np.asarray(ratios, dtype=np.float64))
    if not np.isfinite(c).all() or (c < 0).any():
        raise DraftsimError("a cost ratio is negative or not finite, expected c >= 0")
    if not len(log):
        raise DraftsimError("the log has no rounds: every request ended with its first token")
    forwards, drafted, count = draft_histogram(log)
    width_cost = np.ones(len(count))
    for i, n in enumerate(drafted.tolist()):
        if n > 0:
            width_cost[i] = verify.get(n, np.nan) if isinstance(verify, Mapping) else verify
            if not 0 <= width_cost[i] < np.inf:
                raise DraftsimError(
                    f"the verification cost of {n} drafts is {width_cost[i]}, "
                    "expected T_verify / T_target >= 0"
                )
    cost = float(count @ forwards) * c + float(count @ width_cost)
    plain = float(log.rounds["emitted"].sum(dtype=np.int64))
    return RatioCurve(c, cost, plain / cost)


def draft_histogram(log: RoundLog) -> tuple[Ints, Ints, Ints]:
    """Distinct (draft_forwards, drafted) pairs of `log` and how many rounds had each."""
    forwards = log.rounds["draft_forwards"].astype(np.int64)
    drafted = log.rounds["drafted"].astype(np.int64)
    scale = int(drafted.max(initial=0)) + 1
    count = np.bincount(forwards * scale + drafted)
    keys = np.flatnonzero(count)
    return keys // scale, keys % scale, count[keys].astype(np.int64)
