"""Lossy rules that judge a drafted token by its own scores alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from policies.arrays import Bools
from policies.confidence import (
    COMPONENTS,
    EQUAL_WEIGHTS,
    Confident,
    EntropySign,
    each,
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
class CMASDVerification(Confident, TokenRule):
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
class RelaxedAcceptance(TokenRule):
    """TensorRT-LLM's relaxed acceptance, which it uses while DeepSeek-R1 thinks.

    Accepts a token among the target's `topk` best whose probability is at most `delta` below the
    best one's, at T = 1.  Here it judges every token, not those of the thinking phase alone.

    Parameters
    ----------
    topk, delta:
        ``relaxed_topk`` and ``relaxed_delta`` of the engine, whose defaults (1 and 0) are
        `ExactMatch`.  The defaults here are those of its guide to DeepSeek-R1.

    Source: NVIDIA/TensorRT-LLM, ``mtpRelaxedAcceptanceKernel`` and ``_torch/speculative/mtp.py``.
    """

    needs = ("match", "top1", "logsumexp", "draft_logit", "draft_rank")
    topk: int = parameter(10, whole, 1)
    delta: float = parameter(0.6, within, 0)

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the token is the best, or one of the `topk` best and probable enough."""
        best = math.exp(score.top1 - score.logsumexp)
        gap = best - math.exp(score.draft_logit - score.logsumexp)
        return bool(score.match or (score.draft_rank < self.topk and gap <= self.delta))

    def accepts_each(self, tokens: Any, scores: Any) -> Bools:
        best, own = (each(math.exp, logit - scores.logsumexp)
                     for logit in (scores.top1, scores.draft_logit))  # fmt: skip
        close = (scores.draft_rank < self.topk) & (best - own <= self.delta)
        return np.asarray(scores.match | close)


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


RatioMode = Literal["greedy", "sample"]
Undecided = Literal["reject", "accept"]


def seed_of_coins(name: str, seed: int | np.random.Generator) -> None:
    """Require a seed of coins: a generator, or an integer of at least 0."""
    if not isinstance(seed, np.random.Generator):
        whole(name, seed, 0)


@dataclass(eq=False)
class Lenience(TokenRule):
    """Leviathan et al.'s lenience (2211.17192, app. A.5): the target's veto is discounted.

    Parameters
    ----------
    factor:
        l of the paper, in (0, 1]; 1 is lossless, and smaller accepts more.  The default
        is ours.  In ``greedy`` mode 1 also accepts tokens tied with the best, as bfloat16 logits
        often are.
    mode:
        ``greedy``: accept ``p(d) >= l * p(best)`` (this form is ours; the paper states
        the sampled one), in a sampled run next to what the coin accepts, so that 1 is not
        lossless there.  ``sample``: accept with probability ``min(1, p(d) / (l q(d)))``,
        which needs a run sampled at temperature 1 from all tokens: the target's scores are
        those.
    seed:
        Seed of the coins in ``sample`` mode: an integer or a numpy Generator.

    A token that the lossless coin accepted is always accepted, so the coin here is that
    of the conditional probability: at ``factor=1`` nothing changes, coin for coin.
    """

    reads = ("prob",)
    needs = ("match", "top1", "logsumexp", "draft_logit")
    factor: float = parameter(0.5, ratio)
    mode: RatioMode = parameter("greedy", one_of, get_args(RatioMode))
    seed: int | np.random.Generator = parameter(0, seed_of_coins)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = np.random.default_rng(self.seed)

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """Refuse a run whose sampling the mode cannot serve."""
        if self.mode == "sample" and (temperature != 1 or top_p != 1):
            cut = f" with top-p {top_p:g}" if top_p != 1 else ""
            raise ValueError(
                f"lenience with mode=sample needs a run sampled at temperature 1, not "
                f"{temperature:g}{cut}: target probabilities are known at 1, of all tokens, only; "
                "use mode=greedy"
            )

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the discounted veto spares the token."""
        if score.match:
            return True
        if self.mode == "greedy":
            return bool(score.draft_logit - score.top1 >= math.log(self.factor))
        share = math.exp(score.draft_logit - score.logsumexp) / token.prob
        lossless = min(1.0, share)
        lenient = min(1.0, share / self.factor)
        # P(lenient accepts | the lossless coin refused), 0 where it never refuses.
        rescue = (lenient - lossless) / (1.0 - lossless) if lossless < 1 else 0.0
        return bool(self._rng.random() < rescue)


@dataclass(eq=False)
class Ensemble(TokenRule):
    """Verification against ``w * target + (1 - w) * draft`` (transformers 5.23
    ``assistant_ensemble_weight``, citing DIVERSE, 2604.07622).

    Parameters
    ----------
    weight:
        w in (0, 1]; 1 is lossless.
    mode:
        ``sample``: accept with probability ``min(1, 1 - w + w p(d) / q(d))``.  Given
        that the lossless coin refused, that leaves a coin of exactly ``1 - w``.
        ``greedy``: accept if the token is the argmax of the mixture, for drafts that are
        the drafter's own argmax.
    undecided:
        The greedy argmax ranges over both full distributions, of which only the leading
        values are known.  They settle most tokens: d wins for certain if
        ``(1 - w)(q1 - q2) > w (p1 - p(d))``, and loses for certain if
        ``w p(d) + (1 - w) q(d) <= w p1``.  The rest is rejected or accepted as said here:
        the two settings bracket the true rule.
    seed:
        Seed of the coins in ``sample`` mode: an integer or a numpy Generator.
    """

    reads = ("prob", "prob_margin")
    needs = ("match", "top1", "logsumexp", "draft_logit")
    weight: float = parameter(0.5, ratio)
    mode: RatioMode = parameter("greedy", one_of, get_args(RatioMode))
    undecided: Undecided = parameter("reject", one_of, get_args(Undecided))
    seed: int | np.random.Generator = parameter(0, seed_of_coins)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = np.random.default_rng(self.seed)

    def begin_run(self, vocab_size: int | None, temperature: float, top_p: float = 1.0) -> None:
        """Refuse a mode that does not fit how the run decodes."""
        if (self.mode == "sample") != (temperature > 0):
            fitting = "sample" if temperature > 0 else "greedy"
            raise ValueError(
                f"ensemble with mode={self.mode} does not fit temperature {temperature:g}: "
                f"use mode={fitting}"
            )

    def accepts(self, token: Any, score: Any) -> bool:
        """Return True if the mixture accepts the token."""
        if score.match:
            return True
        w = self.weight
        if self.mode == "sample":
            return bool(self._rng.random() < 1.0 - w)
        best = math.exp(score.top1 - score.logsumexp)
        own = math.exp(score.draft_logit - score.logsumexp)
        if (1.0 - w) * token.prob_margin > w * (best - own):
            return True
        lost = w * own + (1.0 - w) * token.prob <= w * best
        return not lost and self.undecided == "accept"
