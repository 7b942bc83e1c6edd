"""Drafts that end by estimates of acceptance, and by what tokens per second they are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from policies.lanes.base import Bools, Floats, Ints, Lengths, Starts, grown

NOTHING = 1e-9
"""A chance below which no further token can change a decision."""
ROUNDING = 1e-9
"""Relative; more than sums of as many terms as a draft has tokens can be off by."""


class Read(Protocol):
    """The draft signal of that name of some tokens, an array of any shape."""

    def __call__(self, name: str) -> Floats: ...


def tells_many(estimator: Any) -> bool:
    """Return True if an estimator has a method ``chances(read, offset)``.

    It gives for many tokens at once what the estimator gives for one
    (`policies.estimators.AcceptanceEstimator`).
    """
    return estimator is None or hasattr(estimator, "chances")


def _reader(starts: Starts, rows: Ints) -> Read:
    # A draft that leaves what was recorded is told by its length, not by what it would read.
    return lambda name: starts.signal(name).take(rows, mode="clip")


@dataclass(frozen=True, eq=False)
class Doubted:
    """`policies.lengths.specdec_pp`: ends with a token called unlikely, or once some token is.

    ``lag`` None holds the newest token's estimate against the threshold, else the product of
    the estimates up to it, or up to the one before it.
    """

    estimator: Any
    threshold: float
    gamma_min: int
    gamma_max: int
    lag: bool | None

    def lengths(self, starts: Starts) -> Lengths:
        survival = np.ones(len(starts.rows))

        def keep(n: int, which: Ints) -> Bools:
            if n == 0:
                return np.ones(len(which), dtype=bool)
            rows = starts.rows[which] + n - 1
            chance = self.estimator.chances(_reader(starts, rows), n - 1)
            before = survival[which]
            survival[which] = before * chance
            if n < self.gamma_min or n >= self.gamma_max:
                return np.full(len(which), n < self.gamma_min)
            if self.lag is None:
                return np.asarray(~(chance < self.threshold))
            product = before if self.lag else survival[which]
            return np.asarray(~(1.0 - product > self.threshold))

        return Lengths(grown(starts, keep))


class Prices(NamedTuple):
    """Costs of drafting n tokens and of verifying n, in tokens foregone, (contexts, lengths)."""

    drafting: Floats
    verifying: Floats


@dataclass(frozen=True, eq=False)
class WorthDrafting:
    """The rule of `policies.lengths.rate_optimal.RateOptimal` at a rate that does not change.

    ``prices`` gives those of contexts ``(bucket + 0.5) * width``, by a list of buckets.
    """

    estimator: Any
    following: Any
    acceptance: float
    gamma_max: int
    trim: bool
    width: int
    prices: Callable[[list[int]], Prices]

    def lengths(self, starts: Starts) -> Lengths:
        buckets, own = np.unique(starts.context // self.width, return_inverse=True)
        prices = self.prices(buckets.tolist())
        survival = [np.ones(len(starts.rows))]

        def keep(n: int, which: Ints) -> Bools:
            ahead: Floats | float = self.acceptance
            if n:
                read = _reader(starts, starts.rows[which] + n - 1)
                survival.append(survival[-1].copy())
                survival[n][which] *= self.estimator.chances(read, n - 1)
                if self.following is not None:
                    ahead = self.following.chances(read, n - 1)
            ahead = np.broadcast_to(ahead, len(which))
            return self._worth(prices.drafting, own[which], n, survival[n][which], ahead)

        forwards = grown(starts, keep)
        if not self.trim:
            return Lengths(forwards)
        return Lengths(forwards, _best_prefix(forwards, survival, prices.verifying, own))

    def _worth(self, price: Floats, own: Ints, n: int, chance: Floats, ahead: Floats) -> Bools:
        """Return where drafting some number of further tokens gains more than it costs."""
        if n >= self.gamma_max:
            return np.zeros(len(own), dtype=bool)
        # The next token is worth most: no number pays where it earns less than the cheapest.
        cheapest = np.diff(price[:, n:], axis=1).min(axis=1) * (1 - ROUNDING)
        pays = np.asarray(chance * ahead >= cheapest[own])
        undecided = np.flatnonzero(pays)
        own, chance, ahead = own[undecided], chance[undecided], ahead[undecided]
        pays[undecided], worth = False, np.zeros(len(undecided))
        for longer in range(n + 1, self.gamma_max + 1):
            chance = chance * ahead
            worth = worth + chance
            cost = (price[:, longer] - price[:, n])[own]
            enough = worth > cost
            pays[undecided[enough]] = True
            rest = ~enough & (chance > NOTHING)
            undecided, own, ahead = undecided[rest], own[rest], ahead[rest]
            chance, worth = chance[rest], worth[rest]
            if not len(undecided):
                break
        return pays


def _best_prefix(forwards: Ints, survival: list[Floats], verifying: Floats, own: Ints) -> Ints:
    """How many of the drafted tokens are worth their verification, shape (starts,)."""
    best, worth, most = np.zeros_like(forwards), np.zeros(len(forwards)), np.zeros(len(forwards))
    for k in range(1, int(forwards.max(initial=0)) + 1):
        worth = worth + survival[k]
        gain = worth - (verifying[:, k] - verifying[:, 0])[own]
        better = (gain >= most) & (forwards >= k)
        best[better], most[better] = k, gain[better]
    return best
