"""CM-ASD's confidence-modulated drafting window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any, Literal, get_args

import numpy as np

from policies.arrays import Bools, Ints
from policies.confidence import (
    COMPONENTS,
    EQUAL_WEIGHTS,
    Confident,
    EntropySign,
    shares,
)
from policies.core import DraftPolicy, Round
from policies.spec import one_of, ordered, parameter, whole, within
from policies.vectorised import Lengths, OwnStop, Starts, VectorisedPlan, grown

WindowRule = Literal["literal", "causal", "lagged"]


@dataclass(eq=False)
class CMASD(Confident, DraftPolicy):
    """Draft length from the mean confidence of the window (CM-ASD, eqs. 5-6).

    k = clip(floor(alpha mean(C) gamma_max), gamma_min, gamma_max), with C as in
    `policies.confidence.CMASDConfidence`.  There is no trigger token: the window is a
    number, not a test of one token.  The paper gives alpha, beta, the weights and the
    bounds no values; the defaults are ours.

    Parameters
    ----------
    window:
        The printed rule averages C over the k tokens it is about to choose:
        ``literal`` drafts gamma_max tokens, as the pseudocode does (one pass of the paper's
        parallel drafter, gamma_max steps of any other), and verifies k of them; ``causal``
        goes on while the tokens drafted so far allow more; ``lagged`` uses the mean of
        the round before.
    gamma_min, gamma_max:
        k_min and k_max, tokens.
    alpha:
        Scale of the window.
    beta, weights, entropy_sign, vocab_size:
        Parameters of the confidence.  `vocab_size` None takes the run's (`begin_run`).
    initial_confidence:
        The mean that the first round of ``lagged`` starts from.
    """

    reads = COMPONENTS
    window: WindowRule = parameter("causal", one_of, get_args(WindowRule))
    gamma_min: int = parameter(1, whole, 1)
    gamma_max: int = parameter(16, whole, 1)
    alpha: float = parameter(1.0, within, 0)
    beta: float = parameter(1.0, within, 0)
    weights: Sequence[float] = parameter(EQUAL_WEIGHTS, shares)
    entropy_sign: EntropySign = parameter("intended", one_of, get_args(EntropySign))
    vocab_size: int | None = parameter(None, whole, 2)
    initial_confidence: float = parameter(0.5, within, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("gamma_min", self.gamma_min, "gamma_max", self.gamma_max)
        self._sum = 0.0
        lagged = self.window == "lagged"
        self._length = self._clip(self.initial_confidence) if lagged else self.gamma_max

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if self.window != "causal":
            return n < self._length
        score, per_nat, margin, beta, softmax, top = self._confidence
        if n == 0:
            self._sum = 0.0
            return True
        # `n < self._clip(mean of self.confidence)` without its calls: the innermost loop of
        # every replay, asked before each of up to gamma_max tokens a round.
        token = draft[n - 1]
        if per_nat:
            score += per_nat * token.entropy
        if margin:
            score += margin / (1.0 + exp(-beta * token.logit_margin))
        if softmax:
            share = token.prob_margin / top
            score += softmax * (share if share < 1.0 else 1.0)
        self._sum = total = self._sum + score
        longest = self.gamma_max
        return (self.alpha * (total / n) * longest >= n + 1 or n < self.gamma_min) and n < longest

    def submit(self, draft: Sequence[Any]) -> int:
        if self.window != "literal" or not draft:
            return len(draft)
        mean = sum(map(self.confidence, draft)) / len(draft)
        return min(len(draft), self._clip(mean))

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        if self.window == "lagged" and outcome.drafted:
            self._length = self._clip(sum(map(self.confidence, draft)) / len(draft))

    def confidence(self, token: Any) -> float:
        """Return C of one drafted token, in [0, 1]."""
        return float(self._confidence(partial(getattr, token)))

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        if self.window != "causal" or self.vocab_size is None:
            return None
        return VectorisedPlan(stop=OwnStop(self._lengths))

    def _clip(self, mean: float) -> int:
        window = int(self.alpha * mean * self.gamma_max)
        return min(self.gamma_max, max(self.gamma_min, window))

    def _lengths(self, starts: Starts) -> Lengths:
        score = starts.watched(self._confidence)
        total = np.zeros(len(starts.rows))

        def keep(n: int, which: Ints) -> Bools:
            if n == 0:
                return np.ones(len(which), dtype=bool)
            total[which] += score.take(starts.rows[which] + n - 1, mode="clip")
            if n >= self.gamma_max:
                return np.zeros(len(which), dtype=bool)
            wide = self.alpha * (total[which] / n) * self.gamma_max >= n + 1
            return np.asarray(wide | (n < self.gamma_min))

        return Lengths(grown(starts, keep))
