"""Bandits over fixed draft lengths: UCB and EXP3 (BanditSpec)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from policies.batch.base import IterationCost, TextbookCost
from policies.core import DraftPolicy, Load, Round
from policies.lanes.bandits import Bounds, Draws, Weights
from policies.lanes.base import LanePlan
from policies.parameters import flag, one_of, whole, within

_ARMS = (1, 2, 3, 4)
ROTATION = 7
"""Rounds in which the released code's arms take turns."""


class _Bandit(DraftPolicy):
    """Shared by the bandits: arms are draft lengths, one arm is pulled per round."""

    def __init__(self, gammas: Sequence[int], learns_across_requests: bool) -> None:
        if not gammas or len(set(gammas)) != len(gammas):
            raise ValueError(f"gammas is {list(gammas)}, expected one or more distinct lengths")
        for gamma in gammas:
            whole("gammas", gamma, 1)
        flag("learns_across_requests", learns_across_requests)
        self.gammas = gammas
        self.learns_across_requests = learns_across_requests
        self._arm = 0
        self._length = gammas[0]

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self._length


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
        Whether the statistics outlive the request.
    """

    shared = ("cost", "_cost")

    def __init__(
        self,
        variant: Literal["ucb_paper", "ucb_cost", "greedy_code"] = "ucb_cost",
        gammas: Sequence[int] = _ARMS,
        confidence: float = 0.1,
        cost: IterationCost | None = None,
        learns_across_requests: bool = False,
    ) -> None:
        super().__init__(gammas, learns_across_requests)
        one_of("variant", variant, ("ucb_paper", "ucb_cost", "greedy_code"))
        within("confidence", confidence, 1e-12, 1)
        self.variant = variant
        self.confidence = confidence
        self.cost = cost
        self._cost = cost or TextbookCost()
        self._pulls = [0] * len(gammas)
        self._rewards = [0.0] * len(gammas)
        self._context = 0

    def begin_round(self, load: Load) -> None:
        self._context = load.context
        played = sum(self._pulls)
        rotation = ROTATION if self.variant == "greedy_code" else 0
        if played < rotation or 0 in self._pulls:
            self._arm = played % len(self.gammas)
        else:
            spread = self._spread()
            index = [self._index(i, played + 1, spread) for i in range(len(self.gammas))]
            self._arm = index.index(max(index))
        self._length = self.gammas[self._arm]

    def observe(self, outcome: Round, draft: Sequence[Any]) -> None:
        del draft
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

    def laned(self, batch: int) -> LanePlan | None:
        del batch
        if not isinstance(self._cost, TextbookCost):
            return None  # it may ask for the context, which no state knows
        lengths, arms = list(self.gammas), len(self.gammas)
        drafts = range(max(lengths) + 1)
        blind = self.variant == "ucb_paper"
        scalars: Any = (
            lengths, arms, self._arm, self._pulls, self._rewards,
            [1.0 if blind else self._cost(1, n, n + 1, 0) for n in drafts], self._spread(),
            self.confidence, ROTATION if self.variant == "greedy_code" else 0,
        )  # fmt: skip
        return LanePlan(state=Bounds(*scalars))


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
        Of the draws; two copies with the same seed act the same.
    learns_across_requests:
        Whether the losses outlive the request.
    """

    def __init__(
        self,
        gammas: Sequence[int] = _ARMS,
        seed: int = 0,
        learns_across_requests: bool = False,
    ) -> None:
        super().__init__(gammas, learns_across_requests)
        whole("seed", seed, 0)
        self.seed = seed
        self._random = np.random.default_rng(seed)
        self._losses = [0.0] * len(gammas)
        self._chances = [1 / len(gammas)] * len(gammas)
        self._rounds = 0

    def begin_round(self, load: Load) -> None:
        del load
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
        del draft
        longest = max(self.gammas)
        loss = (longest - outcome.accepted) / longest
        self._losses[self._arm] += loss / self._chances[self._arm]
        self._rounds += 1

    def laned(self, batch: int) -> LanePlan:
        del batch
        scalars: Any = (
            list(self.gammas), len(self.gammas), self._arm, self._losses, self._chances,
            self._rounds, max(self.gammas), Draws(self._random),
        )  # fmt: skip
        return LanePlan(state=Weights(*scalars))
