"""Lossy rules that weigh the target's probability against the draft's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from policies.rules.base import TokenRule
from policies.spec import one_of, parameter, ratio, whole

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
        the sampled one).  ``sample``: accept with probability ``min(1, p(d) / (l q(d)))``,
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
