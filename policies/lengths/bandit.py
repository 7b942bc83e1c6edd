"""Bandits over fixed draft lengths: UCB and EXP3 (BanditSpec)."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from policies.arrays import Bools, Floats, Ints
from policies.batch.base import IterationCost, TextbookCost
from policies.confidence import each
from policies.core import DraftPolicy, Load, Round
from policies.spec import flag, one_of, parameter, whole, within
from policies.vectorised import VectorisedPlan, VectorisedState

_ARMS = (1, 2, 3, 4)
BanditVariant = Literal["ucb_paper", "ucb_cost", "greedy_code"]
LONGEST = 4096
"""Largest draft length: every length up to the longest arm has a price of its own."""
ROTATION = 7
"""Rounds in which the released code's arms take turns."""


class _Bandit(DraftPolicy):
    """Shared by the bandits: arms are draft lengths, one arm is pulled per round."""

    gammas: Sequence[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gammas or len(set(self.gammas)) != len(self.gammas):
            raise ValueError(
                f"gammas is {list(self.gammas)}, expected one or more distinct lengths"
            )
        for gamma in self.gammas:
            whole("gammas", gamma, 1)
            if gamma > LONGEST:
                raise ValueError(f"gammas holds {gamma}, expected at most {LONGEST}")
        self._arm = 0
        self._length = self.gammas[0]

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self._length


@dataclass(eq=False)
class UCBSpec(_Bandit):
    """Draft length by upper confidence bounds (BanditSpec, Algorithm 4 and released code).

    Reads no signal, so there is no trigger token.  Each arm is tried once, then the arm
    with the largest index is pulled.

    Parameters
    ----------
    variant:
        ``ucb_paper``: reward = tokens of the round, index = mean + (L/2) sqrt((1 + n)/n^2
        (1 + 2 log(K t^2 sqrt(1 + n)/delta))), L the longest arm.  Counting rounds alone it
        ignores what drafting costs and drifts to the longest arm.
        ``ucb_cost``: reward = tokens per second, both scaled to the same range (ours).
        ``greedy_code``: tokens per second, and the released code's bonus
        sqrt(6 ln t / sum of n), which is the same for every arm: a greedy argmax of means
        after rounds 1 to 7 in rotation.
    gammas:
        The arms; 1 to 4 in the released code.
    confidence:
        delta, in (0, 1]; 0.1 is ours.
    cost:
        Seconds of a round (`policies.batch.base.IterationCost`), for the cost-aware variants.
    learns_across_requests:
        True if the statistics outlive the request.
    """

    shared = ("cost", "_cost")
    variant: BanditVariant = parameter("ucb_cost", one_of, get_args(BanditVariant))
    gammas: Sequence[int] = _ARMS
    confidence: float = parameter(0.1, within, 1e-12, 1)
    cost: IterationCost | None = None
    learns_across_requests: bool = parameter(False, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cost = self.cost or TextbookCost()
        self._rotation = ROTATION if self.variant == "greedy_code" else 0
        self._pulls = [0] * len(self.gammas)
        self._rewards = [0.0] * len(self.gammas)
        self._context = 0

    def begin_round(self, load: Load) -> None:
        self._context = load.context
        played = sum(self._pulls)
        if played < self._rotation or 0 in self._pulls:
            self._arm = played % len(self.gammas)
        else:
            spread = self._spread()
            index = [self._index(i, played + 1, spread) for i in range(len(self.gammas))]
            self._arm = index.index(max(index))
        self._length = self.gammas[self._arm]

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        reward = float(outcome.accepted + 1)
        if self.variant != "ucb_paper":
            n = outcome.drafted
            reward /= self._cost(1, n, n + 1, self._context)
        self._pulls[self._arm] += 1
        self._rewards[self._arm] += reward

    def _spread(self) -> float:
        """Return the largest reward of a round: the L of the index."""
        if self.variant != "ucb_cost":
            return float(max(self.gammas))
        return max((g + 1) / self._cost(1, g, g + 1, self._context) for g in self.gammas)

    def _index(self, arm: int, t: int, spread: float) -> float:
        n = self._pulls[arm]
        mean = self._rewards[arm] / n
        if self.variant == "greedy_code":
            return mean
        inner = 1 + 2 * math.log(len(self.gammas) * t * t * math.sqrt(1 + n) / self.confidence)
        return mean + spread / 2 * math.sqrt((1 + n) / (n * n) * inner)

    def vectorised(self, batch: int) -> VectorisedPlan | None:
        blind = self.variant == "ucb_paper"
        if not (blind or isinstance(self._cost, TextbookCost)):
            return None  # it may ask for the context, which no state knows
        drafts = range(max(self.gammas) + 1)
        return VectorisedPlan(state=Bounds.of(
            self, count=len(self.gammas), spread=self._spread(),
            seconds=[1.0 if blind else self._cost(1, n, n + 1, 0) for n in drafts],
        ))  # fmt: skip


@dataclass(eq=False)
class EXP3Spec(_Bandit):
    """Draft length by exponential weights (BanditSpec, Algorithm 5).

    Reads no signal, so there is no trigger token.  After pulling arm I with Y tokens
    emitted, its loss estimate grows by (L + 1 - Y) / (L prob(I)); the next arm is drawn
    with probability proportional to exp(-eta_t loss), eta_t = sqrt(log K / (t K)).

    Parameters
    ----------
    gammas:
        The arms.
    seed:
        Seed of the draws; two copies with the same seed act the same.
    learns_across_requests:
        True if the losses outlive the request.
    """

    gammas: Sequence[int] = _ARMS
    seed: int = parameter(0, whole, 0)
    learns_across_requests: bool = parameter(False, flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = np.random.default_rng(self.seed)
        self._losses = [0.0] * len(self.gammas)
        self._chances = [1 / len(self.gammas)] * len(self.gammas)
        self._rounds = 0

    def begin_round(self, load: Load) -> None:
        arms = len(self.gammas)
        rate = math.sqrt(math.log(arms) / ((self._rounds + 1) * arms))
        # The smallest loss is taken out first: weights then never all underflow.
        least = min(self._losses)
        # A few floats in every round, for which arrays take several times as long.
        weights = [math.exp(-rate * (loss - least)) for loss in self._losses]
        *_, total = accumulate(weights)
        self._chances = [weight / total for weight in weights]
        draw = self._random.random()
        self._arm = min(bisect_left([*accumulate(self._chances)], draw), arms - 1)
        self._length = self.gammas[self._arm]

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        longest = max(self.gammas)
        loss = (longest - outcome.accepted) / longest
        self._losses[self._arm] += loss / self._chances[self._arm]
        self._rounds += 1

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(state=Weights.of(
            self, count=len(self.gammas), longest=max(self.gammas), draws=ComingDraws(self._random)
        ))  # fmt: skip


@dataclass
class _VectorisedArms(VectorisedState):
    """The arms of many runs: their lengths, their number and the last one pulled."""

    gammas: Ints
    count: Ints
    arm: Ints

    @abstractmethod
    def pulled(self, real: Bools) -> Ints:
        """Return the arm of the next round, (runs,), among the `real` ones, (runs, most arms)."""

    def caps(self) -> Ints:
        self.arm = self.pulled(np.arange(self.gammas.shape[1]) < self.count[:, None])
        found: Ints = self.gammas[self._own]
        return found

    @property
    def _own(self) -> tuple[Ints, Ints]:
        """Return the index of the arm that was pulled."""
        return np.arange(len(self.arm)), self.arm


@dataclass
class Bounds(_VectorisedArms):
    """Bandits that play the arm with the highest upper confidence bound.

    ``seconds`` divides the tokens of a round by its draft's length.  In the first ``rotation``
    rounds the arms take turns, and afterwards the mean alone decides; 0: no such rounds.
    """

    pulls: Ints
    rewards: Floats
    seconds: Floats
    spread: Floats
    confidence: Floats
    rotation: Ints

    blanks: ClassVar[Mapping[str, float]] = {
        "gammas": 0, "pulls": 0, "rewards": 0.0, "seconds": 1.0,
    }  # fmt: skip

    def pulled(self, real: Bools) -> Ints:
        played, n = self.pulls.sum(axis=1), np.maximum(self.pulls, 1)
        t, confidence = played[:, None] + 1, self.confidence[:, None]
        inner = self.count[:, None] * t * t * np.sqrt(1 + n) / confidence
        wide = np.sqrt((1 + n) / (n * n) * (1 + 2 * each(math.log, inner)))
        rotates = self.rotation > 0
        bonus = np.where(rotates, 0.0, self.spread / 2)[:, None] * wide
        index = np.where(real, self.rewards / n + bonus, -np.inf)
        rotates_on = (played < self.rotation) | (real & (self.pulls == 0)).any(axis=1)
        found: Ints = np.where(rotates_on, played % self.count, index.argmax(axis=1))
        return found

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        self.pulls[self._own] += 1
        self.rewards[self._own] += (accepted + 1) / self.seconds[self._own[0], drafted]


@dataclass
class Weights(_VectorisedArms):
    """Bandits with exponential weights; ``draws`` are a run's random numbers from 0 to 1."""

    losses: Floats
    chances: Floats
    rounds: Ints
    longest: Ints
    draws: npt.NDArray[np.object_]

    blanks: ClassVar[Mapping[str, float]] = {"gammas": 0, "losses": math.inf, "chances": 0.0}

    def pulled(self, real: Bools) -> Ints:
        rate = np.sqrt(each(math.log, self.count) / ((self.rounds + 1) * self.count))
        over = np.where(real, self.losses, 0.0) - self.losses.min(axis=1)[:, None]
        weights = np.where(real, each(math.exp, -rate[:, None] * over), 0.0)
        self.chances = weights / weights.cumsum(axis=1)[:, -1:]
        drawn = [run.at(i) for run, i in zip(self.draws, self.rounds.tolist(), strict=True)]
        below = self.chances.cumsum(axis=1) < np.array(drawn)[:, None]
        found: Ints = np.minimum(below.sum(axis=1), self.count - 1)
        return found

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        loss = (self.longest - accepted) / self.longest
        self.losses[self._own] += loss / self.chances[self._own]
        self.rounds = self.rounds + 1


class ComingDraws:
    """The coming draws of a generator, which itself does not move on."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = deepcopy(random)
        self._known: list[float] = []

    def at(self, place: int) -> float:
        """Return the draw number `place`, counted from 0."""
        while place >= len(self._known):
            self._known += self._random.random(AT_ONCE).tolist()
        return self._known[place]


AT_ONCE = 256
"""Draws of a generator taken together."""
