"""Stopping on the draft's entropy: SVIP and AdaEDL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from policies.core import DraftPolicy, Round
from policies.lengths.draft_and_verify import AdaptiveThreshold, ThresholdState
from policies.parameters import flag, whole, within
from policies.vectorised import EntropyAbove, EntropyBound, VectorisedPlan


class SVIP(DraftPolicy):
    """Stops after a token with sqrt(scale H) > threshold (SVIP, released code).

    H is the entropy of the draft's full distribution at T = 1 in nats, so with the
    defaults the test is H > 0.6.  The trigger token is kept.

    Parameters
    ----------
    threshold, scale:
        0.3 and 0.15 in the released code.
    gamma_max:
        Hard cap on the draft, 40 there.
    """

    reads = ("entropy",)

    def __init__(self, threshold: float = 0.3, scale: float = 0.15, gamma_max: int = 40) -> None:
        within("threshold", threshold, 0)
        within("scale", scale, 0)
        whole("gamma_max", gamma_max, 1)
        self.threshold = threshold
        self.scale = scale
        self.gamma_max = gamma_max

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n == 0:
            return True
        return n < self.gamma_max and not (
            math.sqrt(self.scale * draft[-1].entropy) > self.threshold
        )

    def vectorised(self, batch: int) -> VectorisedPlan:
        del batch
        return VectorisedPlan(self.gamma_max, EntropyAbove(self.scale, self.threshold))


class AdaEDL(DraftPolicy):
    """Stops when 1 - sqrt(entropy_scale H) < lambda, lambda adapting (AdaEDL, eqs. 3-6).

    1 - sqrt(entropy_scale H) estimates a lower bound on the acceptance probability.
    lambda follows `AdaptiveThreshold`, held where the whole maximum was accepted.

    Parameters
    ----------
    threshold:
        Initial lambda; the paper sweeps 0.3 to 0.9, 0.5 is ours.
    entropy_scale:
        The paper's gamma, 0.2.
    gamma_max:
        Maximum draft length L; not given, 16 is ours.
    target, step, rate_memory, value_memory:
        Parameters of `AdaptiveThreshold`: the paper's alpha, epsilon, beta_1, beta_2.
    initial_rate:
        First value of the acceptance average; implementations start at 0 or at `target`.
    keep_trigger_token:
        The paper tests before drafting the next token, so the token whose entropy was
        too high is paid and dropped (False); another implementation sends it (True).
    """

    reads = ("entropy",)

    def __init__(
        self,
        threshold: float = 0.5,
        entropy_scale: float = 0.2,
        gamma_max: int = 16,
        target: float = 0.9,
        step: float = 0.01,
        rate_memory: float = 0.5,
        value_memory: float = 0.9,
        initial_rate: float = 0.0,
        keep_trigger_token: bool = True,
    ) -> None:
        within("entropy_scale", entropy_scale, 0)
        whole("gamma_max", gamma_max, 1)
        within("initial_rate", initial_rate, 0, 1)
        flag("keep_trigger_token", keep_trigger_token)
        self.threshold = threshold
        self.entropy_scale = entropy_scale
        self.gamma_max = gamma_max
        self.target = target
        self.step = step
        self.rate_memory = rate_memory
        self.value_memory = value_memory
        self.initial_rate = initial_rate
        self.keep_trigger_token = keep_trigger_token
        self._lambda = AdaptiveThreshold(
            threshold, target, step, rate_memory, value_memory, initial_rate
        )

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n == 0:
            return True
        return n < self.gamma_max and not self._triggers(draft[-1])

    def submit(self, draft: Sequence[Any]) -> int:
        n = len(draft)
        dropped = n > 0 and not self.keep_trigger_token and self._triggers(draft[-1])
        return n - dropped

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        del draft
        self._lambda.update(
            outcome.drafted, outcome.accepted, at_maximum=outcome.accepted == self.gamma_max
        )

    def _triggers(self, token: Any) -> bool:
        return 1.0 - math.sqrt(self.entropy_scale * token.entropy) < self._lambda.value

    def vectorised(self, batch: int) -> VectorisedPlan:
        del batch
        return VectorisedPlan(
            self.gamma_max,
            state=ThresholdState.of(self._lambda, self.gamma_max, by_accepted=True),
            watch=EntropyBound(self.entropy_scale),
            drops=not self.keep_trigger_token,
        )
