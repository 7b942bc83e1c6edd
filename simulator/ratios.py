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

NORMAL_95 = 1.959964
"""Standard errors that a 95 % interval reaches to either side."""


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


class BreakEven(NamedTuple):
    """The cost ratio at which rounds stop paying; bounds NaN where there is no interval."""

    ratio: float
    low: float
    high: float


class RatioSums(NamedTuple):
    """What rounds cost and bring, summed over prompts, and the products that intervals need.

    A prompt's rounds bring ``gain`` = tokens less rounds without drafts; they cost ``verified``
    rounds with drafts and ``forwards`` draft passes.
    """

    prompts: int
    emitted: int
    forwards: int
    plain: int
    """Rounds without drafts."""
    verified: int
    """Rounds with drafts."""
    gain_gain: int
    gain_verified: int
    gain_forwards: int
    verified_verified: int
    verified_forwards: int
    forwards_forwards: int


def ratio_sums(log: RoundLog) -> RatioSums:
    """The sums over `log` that `break_even_ratio` needs, at any verification cost."""
    drafts = log.rounds["drafted"] > 0
    emitted, forwards, verified, plain = (
        log.per_request(values).astype(np.int64)
        for values in (log.rounds["emitted"], log.rounds["draft_forwards"], drafts, ~drafts)
    )
    own = np.stack([emitted - plain, verified, forwards])
    products = (own @ own.T)[np.triu_indices(3)]
    totals = (emitted.sum(), forwards.sum(), plain.sum(), verified.sum())
    used = int((emitted > 0).sum())
    return RatioSums(used, *(int(n) for n in (*totals, *products)))


def break_even_ratio(log: RoundLog | RatioSums, verify: float = 1.0) -> BreakEven:
    """The largest c = T_draft / T_target at which the rounds of `log` still pay.

    In the cost model of `price_ratios`, with every verification costing `verify` target passes.
    0 where they do not even pay with free drafts, infinity where nothing is drafted and nothing
    lost.  The 95 % interval is that of a ratio of sums over prompts, linearised (Cochran,
    "Sampling Techniques", 1977, sec. 2.11); NaN with fewer than two prompts.

    Raises
    ------
    DraftsimError
        If `verify` is negative or not finite.
    """
    if not 0 <= verify < np.inf:
        raise DraftsimError(f"the verification cost is {verify}, expected T_verify / T_target >= 0")
    s = log if isinstance(log, RatioSums) else ratio_sums(log)
    left = s.emitted - s.plain - verify * s.verified
    if s.forwards == 0:
        return BreakEven(np.inf if left >= 0 else 0.0, np.nan, np.nan)
    ratio = left / s.forwards
    if s.prompts < 2:
        return BreakEven(max(0.0, ratio), np.nan, np.nan)
    squares = (
        s.gain_gain + verify**2 * s.verified_verified + ratio**2 * s.forwards_forwards
        - 2 * verify * s.gain_verified - 2 * ratio * s.gain_forwards
        + 2 * verify * ratio * s.verified_forwards
    )  # fmt: skip
    error = np.sqrt(max(squares, 0.0) * s.prompts / (s.prompts - 1)) / s.forwards
    low, high = ratio - NORMAL_95 * error, ratio + NORMAL_95 * error
    return BreakEven(max(0.0, ratio), max(0.0, float(low)), max(0.0, float(high)))


def draft_histogram(log: RoundLog) -> tuple[Ints, Ints, Ints]:
    """Distinct (draft_forwards, drafted) pairs of `log` and how many rounds had each."""
    forwards = log.rounds["draft_forwards"].astype(np.int64)
    drafted = log.rounds["drafted"].astype(np.int64)
    scale = int(drafted.max(initial=0)) + 1
    count = np.bincount(forwards * scale + drafted)
    keys = np.flatnonzero(count)
    return keys // scale, keys % scale, count[keys].astype(np.int64)
