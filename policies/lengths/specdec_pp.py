"""Stopping on an estimated acceptance probability: SpecDec++ and DISCO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from policies.arrays import Bools, Ints
from policies.core import DraftPolicy
from policies.estimators import AcceptanceEstimator, DraftProbability
from policies.spec import flag, ordered, parameter, whole, within
from policies.vectorised import Lengths, OwnStop, Starts, VectorisedPlan, grown, reader, tells_many


@dataclass(eq=False)
class SpecDecPP(DraftPolicy):
    """Stops when some drafted token has probably been rejected (SpecDec++, sec. 3, released code).

    Stop after a token if 1 - prod of the estimates > threshold.  The trigger token is
    kept.  SpecDec++ reads its trained head one token late: the product after token i runs
    over tokens 1 to i - 1.  Any calibrated estimator stands in for the head, which makes
    this SpecDec++-like.

    Parameters
    ----------
    threshold:
        h, 0.3 in the released code.
    gamma_min, gamma_max:
        2 and 20 there; below and at them the estimate is not asked.
    lag:
        True as released; False includes the newest token in the product.
    estimator:
        Object as in `policies.estimators`; default the draft's own probability.
    """

    reads = ("prob",)
    threshold: float = parameter(0.3, within, 0, 1)
    gamma_min: int = parameter(2, whole, 1)
    gamma_max: int = parameter(20, whole, 1)
    lag: bool = parameter(True, flag)
    estimator: AcceptanceEstimator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("gamma_min", self.gamma_min, "gamma_max", self.gamma_max)
        self._estimate = self.estimator or DraftProbability()
        vars(self)["reads"] = self._estimate.reads
        self._survival = 1.0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n == 0:
            self._survival = 1.0
            return True
        before = self._survival
        self._survival = before * self._estimate(draft[-1], n - 1)
        if n < self.gamma_min or n >= self.gamma_max:
            return n < self.gamma_min
        return not 1.0 - (before if self.lag else self._survival) > self.threshold

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        if not tells_many(self._estimate):
            return None
        known = self._estimate, self.threshold, self.gamma_min, self.gamma_max, self.lag
        return VectorisedPlan(stop=OwnStop(partial(doubted, *known)))


@dataclass(eq=False)
class Disco(DraftPolicy):
    """Continues while a classifier calls the newest token acceptable (DISCO, sec. 3.2).

    Mamou et al. 2024, "Dynamic speculation lookahead".  The trigger token is kept.  The
    paper's classifier is a small network on the top probabilities, the entropy and the
    offset; fit `policies.estimators.LogisticAcceptance` on a recording in its place.
    With the default estimator the policy is a plain confidence threshold.

    Parameters
    ----------
    threshold:
        Continue while the estimate is at least this; 0.5 is ours.
    gamma_max:
        Longest draft; 20 is ours.
    estimator:
        Object as in `policies.estimators`; default the draft's own probability.
    """

    reads = ("prob",)
    threshold: float = parameter(0.5, within, 0, 1)
    gamma_max: int = parameter(20, whole, 1)
    estimator: AcceptanceEstimator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._estimate = self.estimator or DraftProbability()
        vars(self)["reads"] = self._estimate.reads

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        if n == 0:
            return True
        return n < self.gamma_max and not self._estimate(draft[-1], n - 1) < self.threshold

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        if not tells_many(self._estimate):
            return None
        known = self._estimate, self.threshold, 1, self.gamma_max, None
        return VectorisedPlan(stop=OwnStop(partial(doubted, *known)))


def doubted(
    estimator: Any, threshold: float, gamma_min: int, gamma_max: int, lag: bool | None,
    starts: Starts,
) -> Lengths:  # fmt: skip
    """Return drafts that end with a token called unlikely, or once some token is.

    ``lag`` None compares the newest token's estimate with the threshold; otherwise the product of
    the estimates up to it, or up to the one before it.
    """
    survival = np.ones(len(starts.rows))

    def keep(n: int, which: Ints) -> Bools:
        if n == 0:
            return np.ones(len(which), dtype=bool)
        chance = estimator.chances(reader(starts, starts.rows[which] + n - 1), n - 1)
        before = survival[which]
        survival[which] = before * chance
        if n < gamma_min or n >= gamma_max:
            return np.full(len(which), n < gamma_min)
        if lag is None:
            return np.asarray(~(chance < threshold))
        return np.asarray(~(1.0 - (before if lag else survival[which]) > threshold))

    return Lengths(grown(starts, keep))
