"""transformers' assisted generation: confidence stop, ROC update, +2/-1 heuristic.

Read in transformers 4.38 to 5.23 (generation/candidate_generator.py,
stopping_criteria.py); where versions differ, a parameter chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from policies.arrays import Bools, Ints
from policies.core import DraftPolicy, Round
from policies.spec import one_of, ordered, parameter, whole, within
from policies.vectorised import UNBOUNDED, Below, VectorisedPlan, VectorisedState

RocUpdate = Literal["off", "in_call", "next_call"]


def roc_threshold(probs: Sequence[float], matches: Sequence[int]) -> float | None:
    """Return the threshold minimising fpr + 3 fnr, the largest on ties; None before one exists.

    `probs` are draft probabilities of verified tokens and `matches` their outcomes (1
    accepted), equally long.  transformers asks for more than five samples of both
    classes and takes the first minimum over ``sklearn.metrics.roc_curve``; a token is
    called a match where its probability is at least the threshold.
    """
    label = np.asarray(matches, dtype=np.int64)
    positives = int(label.sum())
    if len(label) <= 5 or positives in (0, len(label)):
        return None
    score = np.asarray(probs, dtype=np.float64)
    order = np.argsort(-score, kind="stable")
    score, label = score[order], label[order]
    # A threshold can only stand at the last of equal scores.
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    true_positives = np.cumsum(label)[last]
    false_positives = last + 1 - true_positives
    negatives = len(label) - positives
    cost = false_positives / negatives + 3 * (1 - true_positives / positives)
    return float(score[last[np.argmin(cost)]])


@dataclass(eq=False, repr=False)
class Confidence(DraftPolicy):
    """Stops after a token the draft gave less than `confidence_threshold` (transformers >= 4.45).

    The trigger token is kept.  The length cap does not change (schedule ``constant``).
    The probability is the one after temperature and top-p, as transformers reads it.

    Parameters
    ----------
    gamma:
        Cap, ``num_assistant_tokens``.
    confidence_threshold:
        ``assistant_confidence_threshold``; 0 switches the test off.
    roc_update:
        Re-choosing the threshold after each round from the ROC curve of what was
        verified so far in the call: ``in_call`` takes effect at once and is forgotten with
        the call (5.23); ``next_call`` acts only from the next call on, and is kept (4.49;
        learns across requests); ``off``.
    """

    reads = ("prob",)
    gamma: int = parameter(20, whole, 1)
    confidence_threshold: float = parameter(0.4, within, 0, 1)
    roc_update: RocUpdate = parameter("off", one_of, get_args(RocUpdate))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learns_across_requests = self.roc_update == "next_call"
        self._cap = self.gamma
        self._threshold = self._next_threshold = self.confidence_threshold
        # Verified tokens of one generate() call: their draft probabilities, and 1 if they matched.
        self._probs: list[float] = []
        self._matches: list[int] = []
        if not self.confidence_threshold:
            vars(self)["reads"] = ()  # without the test, no signal is fetched

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n >= self._cap:
            return False
        return not (n and self._threshold and draft[-1].prob < self._threshold)

    def begin_request(self) -> None:
        if self.roc_update == "next_call":
            self._threshold = self._next_threshold
            self._probs, self._matches = [], []

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        if self.roc_update == "off" or not self.confidence_threshold:
            return
        verified = draft[: outcome.accepted + 1]
        self._probs += [token.prob for token in verified]
        self._matches += [int(i < outcome.accepted) for i in range(len(verified))]
        chosen = roc_threshold(self._probs, self._matches)
        if chosen is None:
            return
        self._next_threshold = chosen
        if self.roc_update == "in_call":
            self._threshold = chosen

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        return VectorisedPlan(self._cap, self._test()) if self.roc_update == "off" else None

    def _test(self) -> Below | None:
        return Below("prob", self._threshold) if self._threshold else None


class HFHeuristic(Confidence):
    """Two more after a fully accepted draft, one fewer otherwise (transformers ``heuristic``).

    N <- N + 2 if every candidate matched, else max(1, N - 1).  With a confidence
    threshold it also stops early, keeping the trigger token.

    Parameters
    ----------
    gamma:
        Initial N (``num_assistant_tokens``; 5 in 4.38).
    full_accept_means:
        ``sent``: all candidates actually sent matched, so a draft cut by confidence or
        EOS and fully accepted, or an empty one, counts as a hit (>= 4.49); ``budget``:
        N candidates matched, so a cut draft is a miss (<= 4.46, the versions used in
        papers of 2024).
    confidence_threshold, roc_update:
        As in `Confidence`; 0 and ``off`` here.
    persist:
        ``transient`` starts every request at `gamma`; ``persistent`` carries N over
        (learns across requests), as schedule ``heuristic`` does between calls.
    gamma_max:
        Upper bound on N.  transformers has none; SVIP's re-implementation uses 40.
    """

    def __init__(
        self,
        gamma: int = 5,
        full_accept_means: Literal["sent", "budget"] = "sent",
        confidence_threshold: float = 0.0,
        roc_update: RocUpdate = "off",
        persist: Literal["transient", "persistent"] = "transient",
        gamma_max: int | None = None,
    ) -> None:
        super().__init__(gamma, confidence_threshold, roc_update)
        one_of("full_accept_means", full_accept_means, ("sent", "budget"))
        one_of("persist", persist, ("transient", "persistent"))
        whole("gamma_max", gamma_max, 1, none=True)
        ordered("gamma", gamma, "gamma_max", gamma_max)
        if persist == "persistent" and roc_update == "in_call":
            raise ValueError(
                "roc_update is 'in_call', which ends with the call, but persist is 'persistent', "
                "which outlives it: expected roc_update off or next_call"
            )
        self.full_accept_means = full_accept_means
        self.persist = persist
        self.gamma_max = gamma_max
        self.learns_across_requests = self.learns_across_requests or persist == "persistent"
        # What persists is either N or the threshold, never the other along with it.
        self._restart_cap = roc_update == "next_call" and persist == "transient"

    def longest_draft(self) -> int | None:
        return self.gamma_max

    def begin_request(self) -> None:
        super().begin_request()
        if self._restart_cap:
            self._cap = self.gamma

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        super().observe(outcome, draft)
        wanted = outcome.drafted if self.full_accept_means == "sent" else self._cap
        if outcome.accepted == wanted:
            grown = self._cap + 2
            self._cap = grown if self.gamma_max is None else min(grown, self.gamma_max)
        else:
            self._cap = max(1, self._cap - 1)

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        if self.roc_update != "off":
            return None
        most = UNBOUNDED if self.gamma_max is None else self.gamma_max
        state = _UpTwoDownOne.of(self, most=most, budget=self.full_accept_means == "budget")
        return VectorisedPlan(stop=self._test(), state=state)


@dataclass
class _UpTwoDownOne(VectorisedState):
    """N of many runs."""

    cap: Ints
    most: Ints
    budget: Bools

    def caps(self) -> Ints:
        return self.cap

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        full = accepted == np.where(self.budget, self.cap, drafted)
        fewer = np.maximum(1, self.cap - 1)
        self.cap = np.where(full, np.minimum(self.cap + 2, self.most), fewer)
