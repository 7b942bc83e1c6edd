"""GammaTune: the draft length follows an exponential average of what was accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.core import DraftPolicy, Round
from policies.spec import one_of, ordered, parameter, whole, within
from policies.vectorised import Below, VectorisedPlan, VectorisedState

FullAccept = Literal["sent", "budget"]


@dataclass(eq=False)
class GammaTune(DraftPolicy):
    """Length from a moving average of accepted tokens (GammaTune, eqs. 7-8, Algorithm 1).

    After a round with A accepted, A <- A + delta if the whole draft was accepted;
    mean <- clip((1 - eta) mean + eta A, gamma_min, gamma_max); gamma <- ceil(mean).
    Reads no signal, so there is no trigger token.

    The printed algorithm assigns gamma <- A + delta and overwrites gamma four lines later,
    under which gamma could never grow; the prose says that A is increased, as done here.
    The paper gives no values for eta, delta and the bounds: the defaults are ours.

    Parameters
    ----------
    gamma:
        Initial length.
    eta:
        Weight of the newest round in the average, in [0, 1].
    delta:
        Optimism after full acceptance, tokens.
    gamma_min, gamma_max:
        Bounds of the average, tokens.
    full_accept_means:
        ``sent``: all tokens sent were accepted; ``budget``: gamma tokens were, so that a
        draft cut short by EOS, the limit or confidence earns no delta.
    """

    gamma: int = parameter(5, whole, 1)
    eta: float = parameter(0.3, within, 0, 1)
    delta: float = parameter(2.0, within, 0)
    gamma_min: int = parameter(1, whole, 1)
    gamma_max: int = parameter(24, whole, 1)
    full_accept_means: FullAccept = parameter("sent", one_of, get_args(FullAccept))

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("gamma_min", self.gamma_min, "gamma_max", self.gamma_max)
        whole("gamma", self.gamma, self.gamma_min)
        ordered("gamma", self.gamma, "gamma_max", self.gamma_max)
        self._mean = float(self.gamma)
        self._length = self.gamma

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self._length

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        if not outcome.drafted:
            return  # nothing was tried, so nothing was learnt
        accepted: float = outcome.accepted
        if accepted == (outcome.drafted if self.full_accept_means == "sent" else self._length):
            accepted += self.delta
        mean = (1 - self.eta) * self._mean + self.eta * accepted
        self._mean = min(self.gamma_max, max(self.gamma_min, mean))
        self._length = math.ceil(self._mean)

    def _average(self) -> _MovingAverage:
        return _MovingAverage.of(self, budget=self.full_accept_means == "budget")

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(state=self._average())


@dataclass(eq=False)
class GammaTunePlus(GammaTune):
    """GammaTune that also stops where the draft's top-1 probability is below `threshold`.

    GammaTune+, sec. 4.  The probability is of the draft's softmax at T = 1 before any top-p,
    whichever token was drawn.  The trigger token is kept, as in transformers' assistant
    threshold, with which the paper says it is integrated.  `threshold` is not given there; 0.4
    is transformers'.
    """

    reads = ("top_prob",)
    threshold: float = parameter(0.4, within, 0, 1)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        return n < self._length and not (n and draft[-1].top_prob < self.threshold)

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(stop=Below("top_prob", self.threshold), state=self._average())


@dataclass
class _MovingAverage(VectorisedState):
    """The average and the length of many runs."""

    mean: Floats
    length: Ints
    eta: Floats
    delta: Floats
    gamma_min: Ints
    gamma_max: Ints
    budget: Bools

    def caps(self) -> Ints:
        return self.length

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        full = accepted == np.where(self.budget, self.length, drafted)
        mean = (1 - self.eta) * self.mean + self.eta * (accepted + full * self.delta)
        mean = np.minimum(self.gamma_max, np.maximum(self.gamma_min, mean))
        self.mean = np.where(drafted > 0, mean, self.mean)
        self.length = np.ceil(self.mean).astype(np.int64)
