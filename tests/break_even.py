"""The break-even cost ratio of a log with its interval: what the report's page computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from simulator.ratios import RatioSums, ratio_costs, sums_of
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog


class BreakEven(NamedTuple):
    """The cost ratio above which rounds give no speedup; bounds NaN without an interval."""

    ratio: float
    low: float
    high: float


def ratio_sums(log: RoundLog) -> RatioSums:
    """The sums over `log` in the textbook cost model."""
    return sums_of(ratio_costs(log))


def priced_at(
    log: RoundLog, ratios: npt.ArrayLike, verify: float = 1.0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Target passes' worth of time and speedup at each cost ratio, in the textbook cost model."""
    costs = ratio_costs(log)
    cost = costs.at(ratios, verify).sum(axis=1)
    return cost, costs.plain.sum() / cost


def break_even_ratio(log: RoundLog | RatioSums, verify: float = 1.0) -> BreakEven:
    """The largest c = T_draft / T_target at which the rounds of `log` still pay.

    In the textbook cost model, or that of the sums given, with every verification
    costing `verify` target passes.
    0 where they do not even pay with free drafts, infinity where nothing is drafted and nothing
    lost.  The 95% interval is that of a ratio of sums over prompts, linearised (Cochran,
    "Sampling Techniques", 1977, sec. 2.11); NaN with fewer than two prompts.

    Raises
    ------
    DraftsimError
        If `verify` is negative or not finite.
    """
    if not 0 <= verify < np.inf:
        raise DraftsimError(f"the verification cost is {verify}, expected T_verify / T_target >= 0")
    s = log if isinstance(log, RatioSums) else ratio_sums(log)
    left = s.plain - s.rest - verify * s.verified
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
    # A normal interval from 50 prompts on, as in `simulator.bootstrap`.
    reach = stats.t.ppf(0.975, s.prompts - 1) if s.prompts < 50 else stats.norm.ppf(0.975)
    low, high = ratio - reach * error, ratio + reach * error
    return BreakEven(max(0.0, ratio), max(0.0, float(low)), max(0.0, float(high)))
