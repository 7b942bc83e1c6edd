"""CM-ASD's confidence-modulated drafting window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, Literal

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.confidence import EQUAL_WEIGHTS, EntropySign, known_vocabulary
from policies.core import DraftPolicy, Round
from policies.parameters import one_of, ordered, whole, within
from policies.vectorised import Lengths, Starts, VectorisedPlan, grown

_COMPONENTS = ("entropy", "logit_margin", "prob_margin")


class CMASD(DraftPolicy):
    """Draft length from the mean confidence of the window (CM-ASD, eqs. 5-6).

    k = clip(floor(alpha mean(C) gamma_max), gamma_min, gamma_max), with C as in
    `policies.confidence.cmasd_confidence`.  There is no trigger token: the window is a
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

    reads = _COMPONENTS

    def __init__(
        self,
        window: Literal["literal", "causal", "lagged"] = "causal",
        gamma_min: int = 1,
        gamma_max: int = 16,
        alpha: float = 1.0,
        beta: float = 1.0,
        weights: Sequence[float] = EQUAL_WEIGHTS,
        entropy_sign: EntropySign = "intended",
        vocab_size: int | None = None,
        initial_confidence: float = 0.5,
    ) -> None:
        one_of("window", window, ("literal", "causal", "lagged"))
        whole("gamma_min", gamma_min, 1)
        whole("gamma_max", gamma_max, 1)
        ordered("gamma_min", gamma_min, "gamma_max", gamma_max)
        within("alpha", alpha, 0)
        within("beta", beta, 0)
        if len(weights) != 3 or min(weights) < 0 or abs(sum(weights) - 1) > 1e-6:
            raise ValueError(
                f"weights is {list(weights)}, expected three numbers >= 0 that sum to 1 "
                "(entropy, margin, softmax)"
            )
        one_of("entropy_sign", entropy_sign, ("intended", "literal"))
        whole("vocab_size", vocab_size, 2, none=True)
        within("initial_confidence", initial_confidence, 0, 1)
        self.window = window
        self.gamma_min = gamma_min
        self.gamma_max = gamma_max
        self.alpha = alpha
        self.beta = beta
        self.weights = weights
        self.entropy_sign: EntropySign = entropy_sign
        self.vocab_size = vocab_size
        self.initial_confidence = initial_confidence
        vars(self)["reads"] = tuple(
            name for name, weight in zip(_COMPONENTS, weights, strict=True) if weight
        )
        self._set_constants()
        self._sum = 0.0
        self._length = self._clip(initial_confidence) if window == "lagged" else gamma_max

    def begin_run(self, vocab_size: int | None) -> None:
        """Take the run's vocabulary size where none was given; ValueError if neither is known."""
        self.vocab_size = known_vocabulary(self.vocab_size, vocab_size, type(self).__name__)
        self._set_constants()

    def _set_constants(self) -> None:
        """Set the constants of `cmasd_confidence`, taken out of the inner loop."""
        w_entropy, self._w_margin, self._w_softmax = self.weights
        if self.vocab_size is None:
            return
        sign = -1.0 if self.entropy_sign == "intended" else 1.0
        self._base = w_entropy if self.entropy_sign == "intended" else 0.0
        self._per_nat = sign * w_entropy / log(self.vocab_size)
        self._top = 1.0 - 1.0 / self.vocab_size

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if self.window != "causal":
            return n < self._length
        if n == 0:
            self._check_vocabulary()
            self._sum = 0.0
            return True
        # `n < self._clip(mean of self.confidence)` without its calls: the innermost loop of
        # every replay, asked before each of up to gamma_max tokens a round.
        token = draft[n - 1]
        score = self._base
        if weight := self._per_nat:
            score += weight * token.entropy
        if weight := self._w_margin:
            score += weight / (1.0 + exp(-self.beta * token.logit_margin))
        if weight := self._w_softmax:
            margin, top = token.prob_margin, self._top
            score += weight * (margin / top if margin < top else 1.0)
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
        """Return C of one drafted token, in [0, 1]: `cmasd_confidence` under these parameters.

        A component of weight 0 is not read, so that its signal costs nothing.  Raises ValueError
        where no vocabulary size was given, by the caller or by a run.
        """
        self._check_vocabulary()
        score = self._base
        if weight := self._per_nat:
            score += weight * token.entropy
        if weight := self._w_margin:
            score += weight / (1.0 + exp(-self.beta * token.logit_margin))
        if weight := self._w_softmax:
            margin, top = token.prob_margin, self._top
            score += weight * (margin / top if margin < top else 1.0)
        return score

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        del batch
        if self.window != "causal" or self.vocab_size is None:
            return None
        confidence = _Confidence(
            self._base, self._per_nat, self._w_margin, self.beta, self._w_softmax, self._top
        )
        return VectorisedPlan(stop=_Window(confidence, self.alpha, self.gamma_min, self.gamma_max))

    def _check_vocabulary(self) -> None:
        if self.vocab_size is None:
            known_vocabulary(None, None, type(self).__name__)

    def _clip(self, mean: float) -> int:
        window = int(self.alpha * mean * self.gamma_max)
        return min(self.gamma_max, max(self.gamma_min, window))


@dataclass(frozen=True)
class _Confidence:
    """`CMASD.confidence` of every row; the attributes are its constants."""

    base: float
    per_nat: float
    margin: float
    beta: float
    softmax: float
    top: float

    def values(self, starts: Starts) -> Floats:
        score: Any = np.full(len(starts.signal(self._reads()[0])), self.base)
        if self.per_nat:
            score = score + self.per_nat * starts.signal("entropy")
        if self.margin:
            # The library's exp, as in one token: numpy's may differ in the last bit.
            falls = map(exp, (-self.beta * starts.signal("logit_margin")).tolist())
            score = score + self.margin / (1.0 + np.fromiter(falls, np.float64, len(score)))
        if self.softmax:
            margin = starts.signal("prob_margin")
            score = score + self.softmax * np.where(margin < self.top, margin / self.top, 1.0)
        return np.asarray(score)

    def _reads(self) -> list[str]:
        weights = (self.per_nat, self.margin, self.softmax)
        return [name for name, weight in zip(_COMPONENTS, weights, strict=True) if weight]


@dataclass(frozen=True)
class _Window:
    """The causal window over the confidence of what was drafted so far."""

    confidence: _Confidence
    alpha: float
    gamma_min: int
    gamma_max: int

    def lengths(self, starts: Starts) -> Lengths:
        score = starts.watched(self.confidence)
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
