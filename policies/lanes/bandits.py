"""The arms of many runs of the bandits (`policies.lengths.bandit`)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from policies.confidence import each
from policies.lanes.base import Bools, Floats, Ints, LaneState


@dataclass
class _Arms(LaneState):
    """The part that all bandits share: the arms' lengths, their number and the last arm pulled.

    Here and below, an array of numbers by arm is a list of one run, and (lanes, most arms) of many.
    """

    lengths: Ints
    count: Ints
    arm: Ints

    blanks: ClassVar[dict[str, float]]
    """Lists of a run, and what fills them up to the most arms, or drafts, of any run."""

    @classmethod
    def evened(cls, states: Sequence[Any]) -> Sequence[Any]:
        def filled(name: str, blank: float) -> list[list[float]]:
            lists = [getattr(state, name) for state in states]
            most = max(map(len, lists))
            return [[*values, *[blank] * (most - len(values))] for values in lists]

        columns = {name: filled(name, blank) for name, blank in cls.blanks.items()}
        return [
            replace(state, **{name: lists[i] for name, lists in columns.items()})
            for i, state in enumerate(states)
        ]

    @abstractmethod
    def pulled(self, real: Bools) -> Ints:
        """The arm of the round to come, (lanes,), of those that are `real`, (lanes, most arms)."""

    def caps(self) -> Ints:
        self.arm = self.pulled(np.arange(self.lengths.shape[1]) < self.count[:, None])
        found: Ints = self.lengths[self._own]
        return found

    @property
    def _own(self) -> tuple[Ints, Ints]:
        """Where the arm pulled stands in an array by arm."""
        return np.arange(len(self.arm)), self.arm


@dataclass
class Bounds(_Arms):
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

    blanks: ClassVar[dict[str, float]] = {"lengths": 0, "pulls": 0, "rewards": 0.0, "seconds": 1.0}

    def pulled(self, real: Bools) -> Ints:
        played, n = self.pulls.sum(axis=1), np.maximum(self.pulls, 1)
        t, confidence = played[:, None] + 1, self.confidence[:, None]
        inner = self.count[:, None] * t * t * np.sqrt(1 + n) / confidence
        wide = np.sqrt((1 + n) / (n * n) * (1 + 2 * each(math.log, inner)))
        rotates = self.rotation > 0
        bonus = np.where(rotates, 0.0, self.spread / 2)[:, None] * wide
        index = np.where(real, self.rewards / n + bonus, -np.inf)
        turn = (played < self.rotation) | (real & (self.pulls == 0)).any(axis=1)
        found: Ints = np.where(turn, played % self.count, index.argmax(axis=1))
        return found

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        self.pulls[self._own] += 1
        self.rewards[self._own] += (accepted + 1) / self.seconds[self._own[0], drafted]


@dataclass
class Weights(_Arms):
    """Bandits with exponential weights; ``draws`` are a run's random numbers from 0 to 1."""

    losses: Floats
    chances: Floats
    rounds: Ints
    longest: Ints
    draws: npt.NDArray[np.object_]

    blanks: ClassVar[dict[str, float]] = {"lengths": 0, "losses": math.inf, "chances": 0.0}

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
        del drafted
        loss = (self.longest - accepted) / self.longest
        self.losses[self._own] += loss / self.chances[self._own]
        self.rounds = self.rounds + 1


class Draws:
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
