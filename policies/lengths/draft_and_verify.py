"""Draft&Verify's adaptive exit: a confidence threshold that seeks an acceptance rate.

AdaEDL (`policies.lengths.entropy`) moves its threshold in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.core import DraftPolicy, Round
from policies.spec import parameter, whole, within
from policies.vectorised import Signal, VectorisedPlan, VectorisedState


@dataclass(eq=False)
class DraftAndVerify(DraftPolicy):
    """Stops after a token the draft gave less than an adapting threshold (Draft&Verify, eq. 4).

    Zhang et al. 2024, "Draft & Verify: lossless LLM acceleration via self-speculative
    decoding", and its released code.  The trigger token is kept.  As there, the threshold is
    compared with the token's probability in the draft's softmax at T = 1 before any top-p, even if
    tokens are drawn otherwise.

    Parameters
    ----------
    threshold:
        Initial threshold: 0.8 in the released code for exact decoding, 0.5 elsewhere.
    gamma_max:
        Maximum draft length, 8 in the released code.
    target, step, rate_memory, value_memory:
        Parameters of `AdaptiveThreshold`, which does not change after a draft of maximum length.
    """

    reads = ("raw_prob",)
    threshold: float = 0.8
    gamma_max: int = parameter(8, whole, 1)
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    value_memory: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threshold = AdaptiveThreshold(
            self.threshold, self.target, self.step, self.rate_memory, self.value_memory
        )

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        if not draft:
            return True
        return len(draft) < self.gamma_max and not draft[-1].raw_prob < self._threshold.value

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self._threshold.update(
            outcome.drafted, outcome.accepted, at_maximum=outcome.drafted == self.gamma_max
        )

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(
            self.gamma_max,
            state=ThresholdState.of(self._threshold, longest=self.gamma_max, by_accepted=False),
            watch=Signal("raw_prob"),
        )


@dataclass(eq=False, slots=True)
class AdaptiveThreshold:
    """Moves a stop threshold towards a target acceptance rate (Zhang et al. 2024, eq. 4).

    After a round with A of n accepted:

    * rate <- b1 rate + (1 - b1) A / n;
    * wish = value + step if rate < target; value if the draft was at its maximum; else
      value - step;
    * value <- b2 value + (1 - b2) wish.

    Parameters
    ----------
    value:
        Initial threshold.
    target, step:
        Acceptance rate aimed at, and the size of a step.
    rate_memory, value_memory:
        b1 and b2 above, in [0, 1].
    rate:
        Initial rate; the released code starts at 0.
    """

    value: float
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    value_memory: float = 0.9
    rate: float = 0.0

    def __post_init__(self) -> None:
        within("threshold", self.value, 0, 1)
        for name in ("target", "step", "rate_memory", "value_memory"):
            within(name, getattr(self, name), 0, 1)

    def update(self, drafted: int, accepted: int, at_maximum: bool) -> None:
        """Take in a round; one without a draft changes nothing."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1 - self.rate_memory) * accepted / drafted
        if self.rate < self.target:
            wish = self.value + self.step
        elif at_maximum:
            wish = self.value
        else:
            wish = self.value - self.step
        self.value = self.value_memory * self.value + (1 - self.value_memory) * wish


@dataclass
class ThresholdState(VectorisedState):
    """The thresholds of many runs; ``by_accepted``: `longest` counts as accepted, not drafted."""

    value: Floats
    rate: Floats
    target: Floats
    step: Floats
    rate_memory: Floats
    value_memory: Floats
    longest: Ints
    by_accepted: Bools

    def caps(self) -> Ints:
        return self.longest

    def thresholds(self) -> Floats:
        return self.value

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        tried = drafted > 0
        share = (1 - self.rate_memory) * accepted / np.maximum(drafted, 1)
        rate = self.rate_memory * self.rate + share
        at_maximum = np.where(self.by_accepted, accepted, drafted) == self.longest
        lower = np.where(at_maximum, self.value, self.value - self.step)
        wish = np.where(rate < self.target, self.value + self.step, lower)
        value = self.value_memory * self.value + (1 - self.value_memory) * wish
        self.rate = np.where(tried, rate, self.rate)
        self.value = np.where(tried, value, self.value)
