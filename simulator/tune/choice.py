"""Choosing among settings by recorded prompts, with prompts as the unit of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.bootstrap import gain, ratio

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class Objective:
    """Tokens per second of several options over the same prompts.

    Parameters
    ----------
    tokens, seconds:
        Tokens that count and seconds spent, per option and prompt: shape (options,
        prompts).  Options stand in order of preference between equals, the one that
        drafts least first.
    weights:
        How often each prompt counts in each bootstrap resample, shape (resamples,
        prompts); of all prompts or of a part.
    """

    tokens: Floats
    seconds: Floats
    weights: Floats

    @cached_property
    def rates(self) -> Floats:
        """Tokens per second of each option over all prompts, shape (options,)."""
        return np.asarray(self.tokens.sum(axis=1) / self.seconds.sum(axis=1))

    def on(self, prompts: Bools) -> Objective:
        """Return the same options on some of the prompts, resampled among themselves."""
        weights = self.weights[:, prompts]
        return Objective(self.tokens[:, prompts], self.seconds[:, prompts], weights)

    @property
    def admissible(self) -> Bools:
        """Options that the best does not beat beyond the interval, shape (options,).

        The interval is the paired percentile bootstrap over prompts of the ratio of
        their rates; a single prompt has none, and only the best is admissible.
        """
        best = int(np.argmax(self.rates))
        equal = self.rates >= self.rates[best] * (1 - 1e-12)
        if self.tokens.shape[1] < 2:
            return np.asarray(equal)
        tokens, seconds = self.tokens @ self.weights.T, self.seconds @ self.weights.T
        drawn = ratio(tokens[best] * seconds, tokens * seconds[best])
        # An option without tokens that count is beaten by any that has them.
        drawn[np.isnan(drawn)] = np.inf
        low = np.percentile(drawn, 50 * (1 - CONFIDENCE), axis=1, method="lower")
        return np.asarray(equal | (low <= 1))


class Choice(NamedTuple):
    """An option and what it brings over a default, as a ratio of tokens per second."""

    option: int
    gain: float
    lo: float
    hi: float


def choose(objective: Objective) -> int:
    """The first admissible option: the one that drafts least of those as good as the best."""
    return int(np.flatnonzero(objective.admissible)[0])


def folds(categories: Sequence[str]) -> Bools:
    """Return every second prompt of each category: True if it belongs to the second half."""
    seen: dict[str, int] = {}
    second: Bools = np.zeros(len(categories), dtype=bool)
    for i, category in enumerate(categories):
        seen[category] = seen.get(category, 0) + 1
        second[i] = seen[category] % 2 == 0
    # Categories of one prompt each would all land in the first half.
    return second if 4 * second.sum() >= len(second) else np.arange(len(second)) % 2 == 1


def can_hold_back(second: Bools) -> bool:
    """Return True if both halves have two prompts or more, the fewest that can be resampled."""
    return bool(min(second.sum(), (~second).sum()) >= 2)


def cross_fitted(
    objective: Objective,
    second: Bools,
    default: tuple[Floats, Floats],
    option: int,
    halves: tuple[int, int] | None = None,
    default_option: int | None = None,
    confidence: float = CONFIDENCE,
) -> Choice:
    """Return the gain of choosing over `default`, on prompts the choice was not made on.

    Each half of the prompts is run under the option chosen on the other half; the gain
    is that of both together, with its percentile bootstrap interval.

    Parameters
    ----------
    objective, second:
        The options, and which prompts form the second half (`folds`).
    default:
        Tokens and seconds of the default per prompt, each of shape (prompts,).
    option:
        What was chosen on all prompts, and is reported.
    halves:
        What is chosen on the first and on the second half.  None: too few prompts to
        hold some back, the gain is that of `option` on the prompts that chose it.
    default_option:
        The default among the options, if it is one: choosing it gains nothing, exactly.
    confidence:
        Of the interval.
    """
    if option == default_option:
        return Choice(option, 1.0, 1.0, 1.0)
    chosen = np.full(len(second), option)
    if halves is not None:
        chosen = np.where(second, halves[0], halves[1])
    prompt = np.arange(len(second))
    own = np.stack([objective.tokens[chosen, prompt], objective.seconds[chosen, prompt]])
    return Choice(option, *gain(own, np.stack(default), objective.weights, confidence))


def shared_by_neighbours(allowed: Bools) -> Bools:
    """Along the first axis, options that a whole run of neighbours shares; (n, m, options).

    Runs are as long as every place along the second axis still has a shared option, which
    gives the fewest runs.
    """
    out = allowed.copy()
    start, common = 0, allowed[0]
    for i in range(1, len(allowed) + 1):
        both = common & allowed[i] if i < len(allowed) else np.zeros_like(common)
        if both.any(axis=1).all():
            common = both
            continue
        out[start:i] = common
        if i < len(allowed):
            start, common = i, allowed[i]
    return out
