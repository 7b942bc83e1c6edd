"""BiLD's fallback: the target takes over where the small model is unsure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.arrays import Bools, Ints
from policies.core import DraftPolicy, Round
from policies.spec import flag, parameter, whole, within
from policies.vectorised import Below, VectorisedPlan, VectorisedState


@dataclass(eq=False)
class BiLDFallback(DraftPolicy):
    """Hands over to the target at a token below `threshold`, which is dropped (BiLD, sec. 3.2).

    Kim et al. 2023, "Speculative decoding with Big Little Decoder", and its released
    code.  The trigger token is NOT kept: its draft pass is paid, and the target decides
    that position.  Meant with BiLD's rollback rule, it works with any rule.

    Parameters
    ----------
    threshold:
        Fallback threshold on the largest probability of the draft's softmax at T = 1, 0.6 in
        the released code.
    gamma_max:
        Steps of the small model at most, 10 there.
    target_first:
        True if the first step is the target's alone.  It is in BiLD; where prefill
        already emits the first token that step has happened, hence the default.
    target_after_rollback:
        True if a rejection costs one further target step without a draft, as follows
        from the released control flow.
    """

    reads = ("top_prob",)
    threshold: float = parameter(0.6, within, 0, 1)
    gamma_max: int = parameter(10, whole, 1)
    target_first: bool = parameter(False, flag)
    target_after_rollback: bool = parameter(True, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target_alone = self.target_first

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        if not draft:
            return not self._target_alone
        return len(draft) < self.gamma_max and not draft[-1].top_prob < self.threshold

    def submit(self, draft: Sequence[Any]) -> int:
        n = len(draft)
        return n - (n > 0 and draft[-1].top_prob < self.threshold)

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        self._target_alone = self.target_after_rollback and outcome.accepted < outcome.drafted

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(
            stop=Below("top_prob", self.threshold, drops=True), state=_TargetAlone.of(self)
        )


@dataclass
class _TargetAlone(VectorisedState):
    """The state of many runs: whether the target decodes the next step alone."""

    target_alone: Bools
    gamma_max: Ints
    target_after_rollback: Bools

    def caps(self) -> Ints:
        return np.where(self.target_alone, 0, self.gamma_max)

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        self.target_alone = self.target_after_rollback & (accepted < drafted)
