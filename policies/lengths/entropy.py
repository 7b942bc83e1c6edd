"""Stopping on the draft's entropy: SVIP and AdaEDL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.core import DraftPolicy, Round
from policies.lengths.draft_and_verify import AdaptiveThreshold, ThresholdState
from policies.spec import flag, parameter, whole, within
from policies.vectorised import EntropyAbove, EntropyBound, VectorisedPlan


@dataclass(eq=False)
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
    threshold: float = parameter(0.3, within, 0)
    scale: float = parameter(0.15, within, 0)
    gamma_max: int = parameter(40, whole, 1)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        if not draft:
            return True
        return len(draft) < self.gamma_max and not (
            math.sqrt(self.scale * draft[-1].entropy) > self.threshold
        )

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(self.gamma_max, EntropyAbove(self.scale, self.threshold))


@dataclass(eq=False)
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
    threshold: float = 0.5
    entropy_scale: float = parameter(0.2, within, 0)
    gamma_max: int = parameter(16, whole, 1)
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    value_memory: float = 0.9
    initial_rate: float = parameter(0.0, within, 0, 1)
    keep_trigger_token: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lambda = AdaptiveThreshold(
            self.threshold, self.target, self.step, self.rate_memory, self.value_memory,
            self.initial_rate,
        )  # fmt: skip

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return not draft or (len(draft) < self.gamma_max and not self._triggers(draft[-1]))

    def submit(self, draft: Sequence[Any]) -> int:
        n = len(draft)
        dropped = n > 0 and not self.keep_trigger_token and self._triggers(draft[-1])
        return n - dropped

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self._lambda.update(
            outcome.drafted, outcome.accepted, at_maximum=outcome.accepted == self.gamma_max
        )

    def _triggers(self, token: Any) -> bool:
        return 1.0 - math.sqrt(self.entropy_scale * token.entropy) < self._lambda.value

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(
            self.gamma_max,
            state=ThresholdState.of(self._lambda, longest=self.gamma_max, by_accepted=True),
            watch=EntropyBound(self.entropy_scale),
            drops=not self.keep_trigger_token,
        )
