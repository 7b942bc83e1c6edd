"""The stopping rule that maximises tokens per second, from calibrated estimates and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np

from policies.arrays import Bools, Floats, Ints
from policies.batch.base import IterationCost, TextbookCost
from policies.core import DraftPolicy, Load, Round
from policies.estimators import AcceptanceEstimator, DraftProbability
from policies.spec import flag, parameter, whole, within
from policies.vectorised import Lengths, OwnStop, Starts, VectorisedPlan, grown, reader, tells_many


@dataclass(eq=False)
class RateOptimal(DraftPolicy):
    """Drafts on while the next token earns more than the rate achieved would in its time.

    A round that drafts n tokens and has A accepted emits 1 + A tokens and takes C(n)
    seconds.  Rounds are the renewals of a reward process, so tokens per second are
    ``E[1 + A] / E[C(n)]``, and the largest rate over all stopping rules is the number
    lambda at which the best rule for the reward ``1 + A - lambda C(n)`` earns exactly
    nothing (Ferguson, "Optimal Stopping and Applications", ch. 6; the semi-Markov case of
    Dinkelbach 1967).  With S_k the chance, given what the draft's signals told so far, that
    all k tokens drafted are accepted, and e the expected acceptance of the next, one more
    token is worth ``S_k e`` and costs ``lambda (C(k + 1) - C(k))``.  Hence the rule ::

        draft on while  S_k e > lambda (C(k + 1) - C(k))

    It is optimal where, once it says stop, it would go on saying so (the monotone case:
    S_k never rises, so a steady e and costs that never grow more slowly suffice).  Costs
    that jump, as a target pass does between one token and two, are met by looking
    further: drafting goes on where some number j of further tokens would pay together.
    It ignores the value of a signal that is yet to be seen: if e depends on the last signal, a
    surprising token can make drafting worthwhile again.

    The signals of a token are known only once it is drafted: e comes from `following`,
    read at the last token, or is `acceptance`.  Tokens that turn out not to be worth
    their verification are not sent to it.  Nothing here reads a clock: `rate` is found
    offline, as the fixed point, by `simulator.whatif.rate.fit_rate_optimal`.

    Parameters
    ----------
    rate:
        lambda, tokens per second and sequence (per target pass with the default cost);
        or rows ``[[batch, rate], ...]``, of which the last whose batch is not larger than
        the engine's holds.
    gamma_max:
        Longest draft.
    acceptance:
        Estimate for a token not drafted yet: the first, and the others without `following`.
    trim:
        True if drafted tokens may be left unverified.
    recalibrate:
        Step of online re-calibration: a correction on the logit scale, moved after every
        round by this times (outcome - estimate) for every token whose outcome was seen.
    estimator:
        Acceptance of a drafted token (`policies.estimators`); default the draft's own
        probability.
    following:
        Acceptance of the token after it, read at the last drafted token.
    cost:
        Seconds of an iteration, C above (`policies.batch.base.IterationCost`).
    """

    reads = ("prob",)
    shared = ("estimator", "following", "cost", "_prices")
    rate: float | list[list[float]] = 1.5
    gamma_max: int = parameter(20, whole, 1)
    acceptance: float = parameter(0.7, within, 0, 1)
    trim: bool = parameter(True, flag)
    recalibrate: float = parameter(0.0, within, 0, 1)
    estimator: AcceptanceEstimator | None = None
    following: AcceptanceEstimator | None = None
    cost: IterationCost | None = None

    def __post_init__(self) -> None:
        rate, following = self.rate, self.following
        rows = rate if isinstance(rate, list) else [[1, rate]]
        for value in chain.from_iterable(rows):
            within("rate", value, 0)
        batches = [row[0] for row in rows if len(row) == 2]
        if not rows or len(batches) < len(rows) or batches != sorted(batches):
            raise ValueError(f"rate is {rate}, expected rows [batch, rate] of rising batch")
        super().__post_init__()
        self._estimate = self.estimator or DraftProbability()
        read = (*self._estimate.reads, *(following.reads if following else ()))
        vars(self)["reads"] = tuple(dict.fromkeys(read))
        self._seconds = _Seconds(self.cost or TextbookCost(), self.gamma_max)
        self._prices: dict[tuple[int, int], _ByLength] = {}
        self._correction = 0.0
        self._survival = [1.0]
        # Of the round at hand: prices of contexts that nobody decodes at are not asked for.
        self._drafting: list[float] = []
        self._verifying: list[float] = []

    def for_run(self) -> Self:
        mine = super().for_run()
        mine._prices = dict(self._prices)  # the requests of a run share what it looks up
        return mine

    def at_rate(self, rate: float | list[list[float]]) -> Self:
        """Return the same policy at another rate; the two share the costs that they look up."""
        made = self.copy()
        made.rate, made._prices, made._drafting, made._verifying = rate, {}, [], []
        return made

    def begin_round(self, load: Load) -> None:
        self._drafting, self._verifying = self._priced(load)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        n = len(draft)
        survival = self._survival
        if n == 0:
            survival[:] = [1.0]
            ahead = self._corrected(self.acceptance)
        else:
            last = draft[-1]
            survival.append(survival[-1] * self._corrected(self._estimate(last, n - 1)))
            following = self.acceptance
            if self.following is not None:
                following = self.following(last, n - 1)
            ahead = self._corrected(following)
        if n >= self.gamma_max:
            return False
        price, now = self._drafting, self._drafting[n]
        chance = survival[-1]
        worth = 0.0
        for ahead_price in price[n + 1 :]:
            chance *= ahead
            worth += chance
            if worth > ahead_price - now:
                return True
            if chance <= NOTHING:
                break
        return False

    def submit(self, draft: Sequence[Any]) -> int:
        n = len(draft)
        if not self.trim or n == 0:
            return n
        if len(self._survival) == n:  # drafting ended before this rule was asked again
            last = self._corrected(self._estimate(draft[-1], n - 1))
            self._survival.append(self._survival[-1] * last)
        best, worth, most = 0, 0.0, 0.0
        for k in range(1, n + 1):
            worth += self._survival[k]
            gain = worth - (self._verifying[k] - self._verifying[0])
            if gain >= most:
                best, most = k, gain
        return best

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        if not self.recalibrate:
            return
        for i, token in enumerate(draft[: outcome.accepted + 1]):
            error = (i < outcome.accepted) - self._corrected(self._estimate(token, i))
            self._correction += self.recalibrate * error

    def _corrected(self, chance: float) -> float:
        if not self._correction or not 0 < chance < 1:
            return chance
        odds = math.log(chance / (1 - chance)) + self._correction
        return 0.5 * (1 + math.tanh(0.5 * odds))

    def _priced(self, load: Load) -> tuple[list[float], list[float]]:
        """Return the costs, in tokens, of drafting and of verifying n = 0 ... gamma_max tokens."""
        key = (load.batch, load.context // CONTEXT_BUCKET)
        if key not in self._prices:
            rate, (drafting, verifying) = self._rate_at(key[0]), self._seconds(*key)
            self._prices[key] = [rate * s for s in drafting], [rate * s for s in verifying]
        return self._prices[key]

    def _rate_at(self, batch: int) -> float:
        if not isinstance(self.rate, list):
            return float(self.rate)
        known = [rate for least, rate in self.rate if least <= batch]
        return float(known[-1] if known else self.rate[0][1])

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        steady = not (self.recalibrate or self._correction)
        if not (steady and tells_many(self._estimate) and tells_many(self.following)):
            return None
        return VectorisedPlan(stop=OwnStop(partial(self._lengths, batch)))

    def _lengths(self, batch: int, starts: Starts) -> Lengths:
        buckets, own = np.unique(starts.context // CONTEXT_BUCKET, return_inverse=True)
        # As `_priced`, (contexts, gamma_max + 1) each.
        found = [self._seconds(batch, bucket) for bucket in buckets.tolist()]
        rate = self._rate_at(batch)
        drafting, verifying = (rate * np.array(side) for side in zip(*found, strict=True))
        estimator: Any = self._estimate
        following: Any = self.following
        survival = [np.ones(len(starts.rows))]

        def keep(n: int, which: Ints) -> Bools:
            ahead: Floats | float = self.acceptance
            if n:
                read = reader(starts, starts.rows[which] + n - 1)
                survival.append(survival[-1].copy())
                survival[n][which] *= estimator.chances(read, n - 1)
                if following is not None:
                    ahead = following.chances(read, n - 1)
            ahead = np.broadcast_to(ahead, len(which))
            return self._worth(drafting, own[which], n, survival[n][which], ahead)

        forwards = grown(starts, keep)
        if not self.trim:
            return Lengths(forwards)
        return Lengths(forwards, _best_prefix(forwards, survival, verifying, own))

    def _worth(self, price: Floats, own: Ints, n: int, chance: Floats, ahead: Floats) -> Bools:
        """Return where drafting some number of further tokens gains more than it costs."""
        longest = self.gamma_max
        if n >= longest:
            return np.zeros(len(own), dtype=bool)
        # The next token is worth most: no number pays where it earns less than the cheapest.
        cheapest = np.diff(price[:, n:], axis=1).min(axis=1) * (1 - ROUNDING)
        pays = np.asarray(chance * ahead >= cheapest[own])
        undecided = np.flatnonzero(pays)
        own, chance, ahead = own[undecided], chance[undecided], ahead[undecided]
        pays[undecided], worth = False, np.zeros(len(undecided))
        for longer in range(n + 1, longest + 1):
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


class _Seconds:
    """An iteration of n drafts, and of verifying n alone, in seconds; n = 0 ... `longest`.

    Each is looked up once: a policy's copies share it, and what was looked up is no part of
    its state.
    """

    def __init__(self, cost: IterationCost, longest: int) -> None:
        self._cost, self._longest = cost, longest
        self._known: dict[tuple[int, int], _ByLength] = {}

    def __call__(self, batch: int, bucket: int) -> _ByLength:
        if (known := self._known.get((batch, bucket))) is None:
            context, lengths = (bucket + 0.5) * CONTEXT_BUCKET, range(self._longest + 1)
            known = self._known[batch, bucket] = (
                [self._cost(batch, n, batch * (n + 1), context) for n in lengths],
                [self._cost(batch, 0, batch * (n + 1), context) for n in lengths],
            )
        return known

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seconds:
        return self

    def __reduce__(self) -> tuple[type[_Seconds], tuple[IterationCost, int]]:
        return _Seconds, (self._cost, self._longest)


_ByLength = tuple[list[float], list[float]]
CONTEXT_BUCKET = 32
"""Contexts this near share their prices, which are computed once."""
NOTHING = 1e-9
"""A chance below which no further token can change a decision."""
ROUNDING = 1e-9
"""Relative; more than sums of as many terms as a draft has tokens can be off by."""


def _best_prefix(forwards: Ints, survival: list[Floats], verifying: Floats, own: Ints) -> Ints:
    """Return how many of the drafted tokens are worth their verification, shape (starts,)."""
    best, worth, most = np.zeros_like(forwards), np.zeros(len(forwards)), np.zeros(len(forwards))
    for k in range(1, int(forwards.max(initial=0)) + 1):
        worth = worth + survival[k]
        gain = worth - (verifying[:, k] - verifying[:, 0])[own]
        better = (gain >= most) & (forwards >= k)
        best[better], most[better] = k, gain[better]
    return best
