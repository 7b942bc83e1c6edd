"""A setting served against no speculation, on resampled prompts, and what to deploy by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.bootstrap import ratio
from simulator.tune.choice import CONFIDENCE, Bools
from simulator.tune.served import SEARCH_CONFIDENCE
from traces.acceptance.trace import Trace

Floats = npt.NDArray[np.float64]

DRAWS = 8
"""Resamples of the prompts that are served, if not said otherwise."""
ON, OFF, MISSED = "on", "off", "SLO missed"
"""Values of `deploy`: the setting, no speculation, or neither meets the targets."""


class Resampled(NamedTuple):
    """Bootstrap resamples of the prompts; half of them from each half of the recording."""

    traces: Sequence[Trace]
    late: Bools
    """Which resamples are of the second half, shape (draws,)."""
    told: bool
    """True if every half has two prompts or more: one prompt resampled is that prompt again."""


def resampled(trace: Trace, second: Bools, held_out: bool, draws: int, seed: int) -> Resampled:
    """`draws` resamples of the prompts: of each half (`second` or not), or of all prompts.

    Parameters
    ----------
    second:
        Which prompts form the second half (`simulator.tune.choice.folds`).
    held_out:
        Whether halves are told apart, so that a choice made on one is judged on the other.
    """
    late = np.arange(draws) >= draws // 2
    halves = [np.flatnonzero(second == part if held_out else second | True) for part in late]
    drawn = [
        trace.select(np.random.default_rng(seed + i).choice(half, len(half)).tolist())
        for i, half in enumerate(halves)
    ]
    return Resampled(drawn, late, min(map(len, halves)) >= 2)


class Against(NamedTuple):
    """Tokens per second of a setting and of no speculation; arrays of shape (draws,)."""

    own: Floats
    plain: Floats
    told: bool = True
    """True if the spread of the draws measures the uncertainty of the gain."""

    @property
    def gain(self) -> tuple[float, float, float]:
        """The setting's rate over that of no speculation, with its 95% interval.

        NaN if no speculation serves nothing that counts.
        """
        return gain_of(ratio(self.own, self.plain), self.told)

    @property
    def faster(self) -> bool:
        """True if the setting serves more than no speculation, beyond the search's interval."""
        gaps = self.own - self.plain
        reach = half_width(gaps, SEARCH_CONFIDENCE) if self.told else 0.0
        # Equal runs differ by rounding alone.
        return bool(gaps.mean() - reach > 1e-9 * self.plain.mean())


def gain_of(ratios: Floats, told: bool = True) -> tuple[float, float, float]:
    """Mean of ratios over resampled prompts with its 95% interval; NaN bounds if not `told`."""
    value, reach = float(ratios.mean()), half_width(ratios) if told else float("nan")
    return value, value - reach, value + reach


def half_width(values: Floats, confidence: float = CONFIDENCE) -> float:
    """Half the width of the t interval whose standard error is the spread of the draws.

    The bootstrap t interval of Efron & Tibshirani (1993), ch. 12.
    """
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.5 + confidence / 2) * np.std(values, ddof=1))


def to_deploy(faster: bool, own_meets: bool, plain_meets: bool) -> str:
    """Return what to deploy, given whether the setting and no speculation meet the targets.

    `ON` if the setting meets them and is `faster`, or no speculation misses them; else `OFF` if no
    speculation meets them; else `MISSED`.
    """
    if own_meets and (faster or not plain_meets):
        return ON
    return OFF if plain_meets else MISSED
