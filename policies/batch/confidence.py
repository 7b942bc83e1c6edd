"""Batch policies that read the draft's confidence: freeze, and adaptive verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.batch.base import BatchPolicy, IterationCost, TextbookCost
from policies.core import Load
from policies.estimators import AcceptanceEstimator, DraftProbability
from policies.parameters import flag, whole, within


class ConfidenceFreeze(BatchPolicy):
    """Ends the draft where the batch's mean probability falls below `threshold`.

    vLLM ``ConfidenceThresholdPolicy`` (one stored version): k freezes at the first step
    whose mean top-1 probability over the batch is below the threshold.  The trigger
    tokens are kept.  A sequence that already finished its draft does not count.

    Parameters
    ----------
    gamma:
        K, draft steps at most.
    threshold:
        0.4 is transformers'; vLLM's default was not read.
    stop_early:
        False: all K draft steps run, as there (the decision stays on the device), and
        only k tokens are verified; True: the remaining steps are saved.
    """

    reads = ("top_prob",)

    def __init__(self, gamma: int = 5, threshold: float = 0.4, stop_early: bool = False) -> None:
        whole("gamma", gamma, 1)
        within("threshold", threshold, 0, 1)
        flag("stop_early", stop_early)
        self.gamma = gamma
        self.threshold = threshold
        self.stop_early = stop_early

    def plan(self, loads: Sequence[Load]) -> int:
        del loads
        return self.gamma

    def keep_drafting(self, drafts: Sequence[Sequence[Any]]) -> bool:
        steps = max(map(len, drafts))
        return not (self.stop_early and steps and self._below(drafts, steps - 1))

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        steps = max(map(len, drafts))
        frozen = next((i + 1 for i in range(steps) if self._below(drafts, i)), steps)
        return [min(frozen, len(draft)) for draft in drafts]

    def _below(self, drafts: Sequence[Sequence[Any]], step: int) -> bool:
        probs = [draft[step].top_prob for draft in drafts if len(draft) > step]
        return bool(sum(probs) / len(probs) < self.threshold)


class AdaptiveVerification(BatchPolicy):
    """Verifies the likeliest drafted tokens of the whole batch, as many as pay.

    vLLM "adaptive verification" (documentation): every drafted token survives with the
    running product of the acceptance estimates along its draft; the best S tokens over
    all sequences are verified, S maximising (B + sum of survivals) / cost(B, B + S).
    Drafting is paid in full.  Survival never rises along a draft, so the choice is a
    prefix of each; what falls off is not kept.

    Parameters
    ----------
    gamma:
        Tokens drafted per sequence.
    budget:
        Verified tokens per iteration at most, the B others included; None: no limit.
    cost:
        Seconds of an iteration (`policies.batch.base.IterationCost`).
    estimator:
        Acceptance of one token (`policies.estimators`); default the draft's probability.
    """

    reads = ("prob",)

    def __init__(
        self,
        gamma: int = 5,
        budget: int | None = None,
        cost: IterationCost | None = None,
        estimator: AcceptanceEstimator | None = None,
    ) -> None:
        whole("gamma", gamma, 1)
        whole("budget", budget, 1, none=True)
        self.gamma = gamma
        self.budget = budget
        self.cost = cost
        self.estimator = estimator
        self._cost = cost or TextbookCost(per_token=0.02)
        self._estimate = estimator or DraftProbability()
        vars(self)["reads"] = self._estimate.reads
        self._context = 0.0
        self._curves: dict[tuple[int, int, int], npt.NDArray[np.float64]] = {}

    def plan(self, loads: Sequence[Load]) -> int:
        self._context = sum(load.context for load in loads) / len(loads)
        return self.gamma

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        batch = len(drafts)
        survivals: list[float] = []
        owners: list[int] = []
        for i, draft in enumerate(drafts):
            survival = 1.0
            for offset, token in enumerate(draft):
                survival *= self._estimate(token, offset)
                survivals.append(survival)
                owners.append(i)
        # A stable sort keeps equal survivals in drafted order, hence prefixes.
        order = np.argsort(-np.asarray(survivals), kind="stable")
        room = len(order) if self.budget is None else max(0, min(len(order), self.budget - batch))
        gain = batch + np.concatenate([[0.0], np.cumsum(np.asarray(survivals)[order])])[: room + 1]
        steps = max(map(len, drafts))
        chosen = int(np.argmax(gain / self._curve(batch, steps)[: room + 1]))
        lengths = [0] * batch
        for slot in order[:chosen]:
            lengths[owners[slot]] += 1
        return lengths

    def _curve(self, batch: int, steps: int) -> npt.NDArray[np.float64]:
        """Seconds over the number of drafts verified, 0 to batch * steps; kept per context."""
        bucket = int(self._context) // CONTEXT_BUCKET
        key = (batch, steps, bucket)
        if key not in self._curves:
            context = (bucket + 0.5) * CONTEXT_BUCKET
            self._curves[key] = np.array(
                [self._cost(batch, steps, batch + s, context) for s in range(batch * steps + 1)]
            )
        return self._curves[key]


CONTEXT_BUCKET = 256
"""Contexts closer than this share one evaluation of the cost, tokens."""
