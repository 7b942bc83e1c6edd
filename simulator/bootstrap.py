"""Values with their uncertainty over prompts, the unit that is independent: the bootstrap, and a
standard error."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from traces.errors import DraftsimError

CONFIDENCE = 0.95
"""Level of intervals where no other is asked for."""
FEW = 100
"""Draws below which percentiles are too narrow: the ends of 30 draws hold 89% instead of 95%."""
FEW_PROMPTS = 50
"""Prompts below which percentiles are too narrow: those over 6 prompts hold 83% instead of 95%."""


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, reach: float) -> Interval:
        """Return the interval that reaches as far to either side of `value`."""
        return cls(value, value - reach, value + reach)

    def holds(self, other: float) -> bool:
        """Return True if `other` lies within."""
        return self.low <= other <= self.high

    def scaled(self, factor: float) -> Interval:
        """Return all three times a positive factor."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def columns(self, name: str) -> dict[str, float]:
        """Return the three as columns of a row: ``name``, ``name_lo`` and ``name_hi``."""
        return {name: self.value, f"{name}_lo": self.low, f"{name}_hi": self.high}


@lru_cache(maxsize=4)
def resamples(prompts: int, count: int, seed: int = 0) -> Floats:
    """Return how often each prompt is drawn in each resample, shape (count, prompts).

    The same arguments give the same draws, so that intervals of different policies can be
    compared.  Without any (0) there are no intervals.  Raises DraftsimError if `count` is below 0.
    """
    if count < 0:
        raise DraftsimError(f"resamples is {count}, expected at least 0")
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(prompts, np.full(prompts, 1 / prompts), count).astype(float)
    drawn.flags.writeable = False
    return drawn


def ratio(over: npt.ArrayLike, under: npt.ArrayLike) -> Floats:
    """Return the element-wise ratio; NaN where the denominator is zero."""
    a, b = np.broadcast_arrays(np.asarray(over, float), np.asarray(under, float))
    out = np.full(a.shape, np.nan)
    np.divide(a, b, out=out, where=b > 0)
    return out


def rate_ratio(own: Floats, base: Floats) -> Floats:
    """Return tokens per second of `own` over those of `base`; leading axis (tokens, seconds)."""
    return ratio(own[0] * base[1], base[0] * own[1])


def gain(own: Floats, base: Floats, weights: Floats, confidence: float = CONFIDENCE) -> Interval:
    """Return the ratio of tokens per second over all prompts, with its interval; both (2, prompts).

    Every resample has the same prompts for both (`weights`, of `resamples`), so what makes a prompt
    fast for both cancels.  The interval is NaN with one prompt; prompts without tokens and seconds,
    such as those without a phase of the answer, are none.
    """
    value = float(rate_ratio(own.sum(axis=1), base.sum(axis=1)))
    prompts = int(((own > 0) | (base > 0)).any(axis=0).sum())
    if prompts < 2:
        return Interval(value, math.nan, math.nan)
    ends = interval(rate_ratio(own @ weights.T, base @ weights.T), confidence, prompts)
    return Interval(value, *ends)


def interval(
    drawn: Floats, confidence: float = CONFIDENCE, prompts: int = FEW_PROMPTS
) -> tuple[float, float]:
    """Return the interval of the finite values of `drawn`, as `intervals` does."""
    low, high = intervals(drawn[np.isfinite(drawn)][:, None], confidence, prompts)
    return float(low[0]), float(high[0])


def intervals(
    drawn: Floats, confidence: float = CONFIDENCE, prompts: int = FEW_PROMPTS
) -> tuple[Floats, Floats]:
    """Return the interval of each column of `drawn`, shape (resamples, columns).

    It is the percentile interval, below `FEW` resamples the t interval about their mean
    (`half_width`), and NaN of fewer than two.  Draws of few `prompts` have wider ones (`widened`).
    """
    if len(drawn) < 2:
        unknown = np.full(drawn.shape[1], np.nan)
        return unknown, unknown
    if len(drawn) < FEW:
        middle = drawn.mean(axis=0)
        reach = np.array([half_width(own, confidence) for own in drawn.T])
        reach *= widened(confidence, prompts)
        return middle - reach, middle + reach
    confidence = expanded(confidence, prompts)
    ordered = np.sort(drawn, axis=0)
    places = (len(ordered) - 1) * np.array([1 - confidence, 1 + confidence]) / 2
    below = np.floor(places).astype(int)
    above = np.minimum(below + 1, len(ordered) - 1)
    part = (places - below)[:, None]
    low, high = ordered[below] * (1 - part) + ordered[above] * part
    return low, high


def widened(confidence: float, prompts: int) -> float:
    """Return the factor by which an interval from resamples of few `prompts` is widened.

    The means of resamples of n prompts have sqrt(1 - 1/n) times the standard deviation of the means
    of n other prompts.  This standard deviation is itself an estimate, which a t interval takes
    into account (Hesterberg 2015, The American Statistician 69(4), sec. 5.3).  The factor is 1 from
    `FEW_PROMPTS` on, where both are less than 4%.
    """
    if not 1 < prompts < FEW_PROMPTS:
        return 1.0
    more = standard_errors(prompts, confidence) / standard_errors(FEW_PROMPTS, confidence)
    return more * math.sqrt(prompts / (prompts - 1))


def standard_errors(prompts: int, confidence: float = CONFIDENCE) -> float:
    """Return the standard errors that an interval over `prompts` reaches to either side.

    It is a t interval below `FEW_PROMPTS`, and a normal one from there on.
    """
    from scipy.special import ndtri, stdtrit

    upper = 0.5 + confidence / 2
    few = 1 < prompts < FEW_PROMPTS
    return float(stdtrit(prompts - 1, upper) if few else ndtri(upper))


def expanded(confidence: float, prompts: int) -> float:
    """Return the level of percentiles that are further apart by the factor `widened`."""
    wider = widened(confidence, prompts)
    if wider == 1:
        return confidence
    from scipy.special import ndtr, ndtri

    return float(2 * ndtr(wider * ndtri(0.5 + confidence / 2)) - 1)


def half_width(values: Floats, confidence: float = CONFIDENCE) -> float:
    """Return half the width of the t interval whose standard error is the spread of the draws.

    The bootstrap t interval of Efron & Tibshirani (1993), ch. 12.
    """
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.5 + confidence / 2) * np.std(values, ddof=1))


class RatioEstimate(NamedTuple):
    """A value and its standard error (NaN from a single sample)."""

    value: float
    standard_error: float


def ratio_of_sums(over: npt.ArrayLike, under: npt.ArrayLike) -> RatioEstimate:
    """Return sum(over) / sum(under) over independent samples, both of shape (samples,).

    The standard error is the delta method's, with n - 1 in the variance.
    """
    a, b = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    value = float(a.sum() / b.sum())
    n = len(a)
    if n < 2:
        return RatioEstimate(value, float("nan"))
    residual = a - value * b
    error = np.sqrt((residual**2).sum() * n / (n - 1)) / abs(b.sum())
    # Rounding leaves a trace of error where every sample has the same ratio.
    return RatioEstimate(value, 0.0 if error < 1e-12 * abs(value) else float(error))
