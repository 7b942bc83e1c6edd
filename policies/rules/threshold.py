"""Lossy rules that compare one number per drafted token with a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np

from policies.arrays import Bools
from policies.confidence import (
    COMPONENTS,
    EQUAL_WEIGHTS,
    CMASDConfidence,
    EntropySign,
    confidence_reads,
    each,
    known_vocabulary,
    shares,
)
from policies.rules.base import TokenRule
from policies.spec import one_of, parameter, ratio, whole, within


@dataclass(eq=False)
class SpecVerification(TokenRule):
    """Spec-Verification (Xia et al., 2203.16487): top-`beta`, and within `tau` of the best.

    Parameters
    ----------
    beta:
        The token must be among the target's `beta` best.
    tau:
        Largest gap to the best token's logit, which is also the gap in log-probability.

    The released code defaults to ``beta=1, tau=0``, which is `ExactMatch`, except that a token tied
    with the best, as bfloat16 logits often are, is accepted too.  The defaults here are those of
    its published script.
    """

    needs = ("top1", "draft_logit", "draft_rank")
    beta: int = parameter(5, whole, 1)
    tau: float = parameter(3.0, within, 0)

    def accepts(self, token: Any, score: Any) -> Any:
        """Rank below `beta` and gap at most `tau`."""
        return (score.draft_rank < self.beta) & (score.top1 - score.draft_logit <= self.tau)

    accepts_each = accepts


@dataclass(eq=False)
class CMASDVerification(TokenRule):
    """CM-ASD's adaptive verification: Spec-Verification with a threshold per token.

    ``tau_t = tau_base + gamma * C_t`` with the drafter's confidence C_t
    (`policies.confidence.CMASDConfidence`).

    Parameters
    ----------
    tau_base, gamma:
        Threshold at confidence 0, and what full confidence adds.  The paper suggests
        0.1 for the first and gives no value for the second: 1 is ours.
    tau_sign:
        The printed equation adds ``gamma * (1 - C_t)`` (``literal``).  Since a larger
        threshold is the more lenient one, it is lenient where the drafter is unsure,
        while the prose asks for strictness there: ``intended`` adds ``gamma * C_t``.
    top:
        The token must be among the target's `top` best, as in Spec-Verification.
    beta, weights, entropy_sign, vocab_size:
        Parameters of the confidence.  `vocab_size` None takes the run's.

    A refused token is replaced by the target's own, as in Spec-Verification; the paper
    only says that acceptance halts.
    """

    reads = COMPONENTS
    needs = ("top1", "draft_logit", "draft_rank")
    tau_base: float = parameter(0.1, within, 0)
    gamma: float = parameter(1.0, within, 0)
    tau_sign: EntropySign = parameter("intended", one_of, get_args(EntropySign))
    top: int = parameter(5, whole, 1)
    beta: float = parameter(1.0, within, 0)
    weights: Sequence[float] = parameter(EQUAL_WEIGHTS, shares)
    entropy_sign: EntropySign = parameter("intended", one_of, get_args(EntropySign))
    vocab_size: int | None = parameter(None, whole, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A component of weight 0 is never read, so that its signal need not be there.
        vars(self)["reads"] = confidence_reads(self.weights)

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """Take the run's vocabulary size where none was given."""
        self.vocab_size = known_vocabulary(self.vocab_size, vocab_size, type(self).__name__)

    @cached_property
    def _confidence(self) -> CMASDConfidence:
        size = known_vocabulary(self.vocab_size, None, type(self).__name__)
        return CMASDConfidence.of(size, self.beta, self.weights, self.entropy_sign)

    def threshold(self, token: Any) -> Any:
        """Return tau_t, in nats, of a drafted token, or of many whose signals are arrays."""
        confidence = self._confidence(partial(getattr, token))
        share = confidence if self.tau_sign == "intended" else 1.0 - confidence
        return self.tau_base + self.gamma * share

    def accepts(self, token: Any, score: Any) -> Any:
        """Rank below `top` and gap at most the token's threshold."""
        gap = score.top1 - score.draft_logit
        return (score.draft_rank < self.top) & (gap <= self.threshold(token))

    accepts_each = accepts


@dataclass(eq=False)
class GlobalThreshold(TokenRule):
    """Lossy speculative decoding with one threshold on the probability ratio.

    Accepts ``p(draft token) / p(best token) >= tau`` at T = 1.  The CSD paper compares
    with "Lossy SD, global tau = 0.6" without defining it: this reading is ours.
    """

    needs = ("top1", "draft_logit")
    tau: float = parameter(0.6, ratio)

    def accepts(self, token: Any, score: Any) -> Any:
        """Return True if the probability ratio to the target's best token reaches `tau`."""
        return score.draft_logit - score.top1 >= math.log(self.tau)

    accepts_each = accepts


@dataclass(eq=False)
class TypicalAcceptance(TokenRule):
    """Medusa's typical acceptance (Cai et al., 2401.10774, sec. 2.3.1).

    Accepts ``p(d) > min(epsilon, delta * exp(-H))`` with the target's probability and
    entropy at the same temperature.

    Parameters
    ----------
    epsilon, delta:
        Hard threshold and entropy-dependent one; the paper's 0.09 and 0.3.
    temperature:
        0, where the rule is `ExactMatch`, or 1: a target score holds the entropy at
        T = 1 only.
    """

    needs = ("logsumexp", "entropy", "draft_logit")
    epsilon: float = parameter(0.09, within, 0, 1)
    delta: float = parameter(0.3, within, 0, 1)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature not in (0, 1):
            raise ValueError(
                f"temperature is {self.temperature}, expected 0 or 1: the target's entropy is "
                "known at temperature 1 only"
            )
        if self.temperature == 0:
            vars(self)["needs"] = ("match",)

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the token is probable enough, given the target's uncertainty."""
        if self.temperature == 0:
            return bool(score.match)
        prob = math.exp(score.draft_logit - score.logsumexp)
        return bool(prob > min(self.epsilon, self.delta * math.exp(-score.entropy)))

    def accepts_each(self, tokens: Any, scores: Any) -> Bools:
        if self.temperature == 0:
            return np.asarray(scores.match)
        prob = each(math.exp, scores.draft_logit - scores.logsumexp)
        return prob > np.fmin(self.epsilon, self.delta * each(math.exp, -scores.entropy))


@dataclass(eq=False)
class BiLDRollback(TokenRule):
    """BiLD's rollback policy (Kim et al., 2302.07863): roll back where the target objects.

    Accepts ``-log p(d) <= threshold`` (nats, T = 1).  A token equal to the target's
    argmax is never rolled back, as in the released code.  What that code spends beyond
    a round, one more single-token target step after a rollback, is a matter of the
    length policy, not of this rule.
    """

    needs = ("match", "logsumexp", "draft_logit")
    threshold: float = parameter(5.0, within, 0)

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the target's surprise stays within the threshold."""
        return bool(score.match or score.logsumexp - score.draft_logit <= self.threshold)

    def accepts_each(self, tokens: Any, scores: Any) -> Bools:
        return np.asarray(scores.match | (scores.logsumexp - scores.draft_logit <= self.threshold))
