"""Estimators of a drafted token's acceptance probability from the draft's signals.

SpecDec++ and DISCO train networks for this; here a small estimator is calibrated on a recording.
An estimator is any object like those below.  If it also has the method ``chances(read, offset)``,
which gives for many tokens exactly what a call gives for one, many settings are replayed at once
(`policies.vectorised`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from policies.arrays import Floats
from policies.vectorised import Read


class AcceptanceEstimator(Protocol):
    """Estimates how likely verification is to accept a drafted token, its prefix given."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The draft signals it reads, of `policies.core.SIGNALS`."""

    def __call__(self, token: Any, offset: int) -> float:
        """Return the probability in [0, 1]; `offset` is the token's place in the draft, from 0."""


class DraftProbability:
    """The draft's own probability of the token, uncalibrated."""

    reads: tuple[str, ...] = ("prob",)

    def __call__(self, token: Any, offset: int) -> float:
        return float(token.prob)

    def chances(self, read: Read, offset: int) -> Floats:
        return read("prob")


class ConstantAcceptance:
    """The same chance for every token: all that a recording without signals can tell."""

    reads: tuple[str, ...] = ()

    def __init__(self, chance: float = 0.7) -> None:
        if not 0 <= chance <= 1:
            raise ValueError(f"chance is {chance}, expected between 0 and 1")
        self.chance = float(chance)

    def __call__(self, token: Any, offset: int) -> float:
        return self.chance

    def chances(self, read: Read, offset: int) -> Floats:
        return np.array(self.chance)


class IsotonicAcceptance:
    """A monotone step function of one signal, fitted by pooling adjacent violators.

    Parameters
    ----------
    signal:
        One of `policies.core.SIGNALS`.
    knots, values:
        Left ends of the steps, rising, and the acceptance on each.
    """

    def __init__(self, signal: str, knots: Sequence[float], values: Sequence[float]) -> None:
        if not knots or len(knots) != len(values):
            raise ValueError(f"{len(knots)} knots and {len(values)} values: expected as many, >= 1")
        if any(b <= a for a, b in pairwise(knots)):
            raise ValueError("knots are not strictly rising")
        if min(values) < 0 or max(values) > 1:
            raise ValueError("values lie outside [0, 1]")
        self.signal = signal
        self.knots = list(map(float, knots))
        self.values = list(map(float, values))

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.signal,)

    def __call__(self, token: Any, offset: int) -> float:
        step = bisect_right(self.knots, getattr(token, self.signal)) - 1
        return self.values[max(step, 0)]

    def chances(self, read: Read, offset: int) -> Floats:
        step = np.searchsorted(self.knots, read(self.signal), side="right") - 1
        return np.asarray(self.values)[np.maximum(step, 0)]

    def __deepcopy__(self, memo: dict[int, Any]) -> IsotonicAcceptance:
        return self  # never changes, so copies of a policy share it

    @classmethod
    def fit(
        cls, signal: str, observed: npt.ArrayLike, accepted: npt.ArrayLike, rising: bool = True
    ) -> IsotonicAcceptance:
        """Return the least-squares monotone fit of `accepted` (0 or 1) on the signal, both
        (samples,).

        `rising` says whether a larger signal means a likelier acceptance (entropy: False).
        """
        x, y = np.asarray(observed, dtype=float), np.asarray(accepted, dtype=float)
        if x.shape != y.shape or x.ndim != 1 or not len(x):
            raise ValueError(f"observed {x.shape} and accepted {y.shape}: expected one (n,) shape")
        knots, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
        means = np.bincount(inverse, weights=y) / counts
        if not rising:
            means = 1 - means
        # Steps begin midway between observations: at one, rounding would choose the side.
        knots[1:] = (knots[:-1] + knots[1:]) / 2
        blocks = rising_blocks(means, counts)
        values = np.clip([m if rising else 1 - m for _, _, m in blocks], 0, 1)
        return cls(signal, [float(knots[first]) for first, _, _ in blocks], values.tolist())


def rising_blocks(values: npt.ArrayLike, weights: npt.ArrayLike) -> list[tuple[int, float, float]]:
    """Return the rising least-squares fit to `values`, (n,) both, by pooling adjacent violators.

    Blocks of equal fit: (index of the first, weight, value).
    """
    blocks: list[tuple[int, float, float]] = []
    pairs = zip(
        np.asarray(values, float).tolist(), np.asarray(weights, float).tolist(), strict=True
    )
    for i, (value, weight) in enumerate(pairs):
        block = (i, weight, value)
        # Merge back while the order is violated.
        while blocks and blocks[-1][2] >= block[2]:
            first, w, m = blocks.pop()
            total = w + block[1]
            block = (first, total, (w * m + block[1] * block[2]) / total)
        blocks.append(block)
    return blocks


class LogisticAcceptance:
    """Logistic regression on several signals and the token's offset in the draft.

    Parameters
    ----------
    signals:
        Names from `policies.core.SIGNALS`, in the order of the weights.
    weights:
        One per signal, then one for the offset.
    bias:
        Log-odds where all of them are 0.
    """

    def __init__(self, signals: Sequence[str], weights: Sequence[float], bias: float) -> None:
        if len(weights) != len(signals) + 1:
            raise ValueError(
                f"{len(weights)} weights for {len(signals)} signals: expected one more (the offset)"
            )
        self.signals = tuple(signals)
        self.weights = list(map(float, weights))
        self.bias = float(bias)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.signals

    def __call__(self, token: Any, offset: int) -> float:
        score = self.bias + self.weights[-1] * offset
        for name, weight in zip(self.signals, self.weights, strict=False):
            score += weight * getattr(token, name)
        return float(_sigmoid(np.float64(score)))

    def chances(self, read: Read, offset: int) -> Floats:
        score: Any = self.bias + self.weights[-1] * offset
        for name, weight in zip(self.signals, self.weights, strict=False):
            score = score + weight * read(name)
        return np.asarray(_sigmoid(score))

    def __deepcopy__(self, memo: dict[int, Any]) -> LogisticAcceptance:
        return self  # never changes, so copies of a policy share it

    @classmethod
    def fit(
        cls,
        signals: Sequence[str],
        observed: npt.ArrayLike,
        offsets: npt.ArrayLike,
        accepted: npt.ArrayLike,
        ridge: float = 1e-3,
    ) -> LogisticAcceptance:
        """Fit by Newton's method on the penalised likelihood.

        `observed` is (samples, signals), `offsets` and `accepted` (0 or 1) are (samples,);
        `ridge` penalises the standardised weights, which also keeps separable data finite.
        """
        x = np.column_stack([np.asarray(observed, float), np.asarray(offsets, float)])
        y = np.asarray(accepted, dtype=float)
        if x.shape != (len(y), len(signals) + 1) or not len(y):
            raise ValueError(f"features {x.shape}: expected ({len(y)}, {len(signals) + 1})")
        centre, scale = x.mean(axis=0), x.std(axis=0)
        scale[scale == 0] = 1.0
        z = np.column_stack([(x - centre) / scale, np.ones(len(y))])
        penalty = np.full(z.shape[1], ridge * len(y))
        penalty[-1] = 1e-9
        w = np.zeros(z.shape[1])
        for _ in range(100):
            mean = _sigmoid(z @ w)
            gradient = z.T @ (mean - y) + penalty * w
            hessian = (z.T * (mean * (1 - mean))) @ z + np.diag(penalty)
            step = np.linalg.solve(hessian, gradient)
            w -= step
            if np.abs(step).max() < 1e-10:
                break
        weights = w[:-1] / scale
        return cls(signals, weights.tolist(), float(w[-1] - weights @ centre))


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
