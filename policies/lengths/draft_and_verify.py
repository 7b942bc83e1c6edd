"""Draft&Verify's adaptive exit: a confidence threshold that seeks an acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.core import DraftPolicy, Round
from policies.lengths.threshold import AdaptiveThreshold, ThresholdState
from policies.parameters import whole, within
from policies.vectorised import Signal, VectorisedPlan


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

    def __init__(
        self,
        threshold: float = 0.8,
        gamma_max: int = 8,
        target: float = 0.9,
        step: float = 0.01,
        rate_memory: float = 0.5,
        value_memory: float = 0.9,
    ) -> None:
        within("threshold", threshold, 0, 1)
        whole("gamma_max", gamma_max, 1)
        within("target", target, 0, 1)
        within("step", step, 0, 1)
        within("rate_memory", rate_memory, 0, 1)
        within("value_memory", value_memory, 0, 1)
        self.threshold = threshold
        self.gamma_max = gamma_max
        self.target = target
        self.step = step
        self.rate_memory = rate_memory
        self.value_memory = value_memory
        self._threshold = AdaptiveThreshold(threshold, target, step, rate_memory, value_memory)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n == 0:
            return True
        return n < self.gamma_max and not draft[-1].raw_prob < self._threshold.value

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        del draft
        self._threshold.update(
            outcome.drafted, outcome.accepted, at_maximum=outcome.drafted == self.gamma_max
        )

    def vectorised(self, batch: int) -> VectorisedPlan:
        del batch
        return VectorisedPlan(
            self.gamma_max,
            state=ThresholdState.of(self._threshold, self.gamma_max, by_accepted=False),
            watch=Signal("raw_prob"),
        )
