"""Iterations planned before any of them is priced, and what happens between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.serving.cost.prompts import Prompts, PromptsEach
from simulator.serving.sequence import Slot
from simulator.serving.spans.rounds import Ints


class Gone(NamedTuple):
    """A request that leaves when an iteration ends, and the one that comes instead."""

    iteration: int
    slot: Slot
    instead: Slot | None
    begun: int
    """Requests of the plan that got their first token before."""


class PromptsOf(NamedTuple):
    """The prompts of an iteration."""

    iteration: int
    prompts: Prompts
    number: int
    blocks: int
    """Of the cache, that they hold."""


class Part(NamedTuple):
    """Iterations of one request by itself."""

    first: int
    length: int
    slot: Slot
    passed: int
    """Rounds of the request before the first, of those in the ledger."""


class Plan:
    """Iterations to come, counted from the first of them.

    Attributes
    ----------
    length:
        How many.
    began:
        (iteration, request) that get their first token when it ends.
    gone, prompts, alone:
        In order, too.
    """

    def __init__(self, together: int, counted: int) -> None:
        self.length = 0
        self.began: list[tuple[int, Slot]] = []
        self.gone: list[Gone] = []
        self.prompts: list[PromptsOf] = []
        self.alone: list[Part] = []
        self._together, self._counted = [(0, together)], [(0, counted)]

    def decoding(self, change: int, counted: bool) -> None:
        """From here on so many more requests decode; `counted`: that statistics count."""
        self._together.append((self.length, change))
        if counted:
            self._counted.append((self.length, change))

    @property
    def together(self) -> Ints:
        """(length,) requests that decode in each iteration."""
        return self._summed(self._together)

    @property
    def counted(self) -> Ints:
        """(length,) those of them that statistics count."""
        return self._summed(self._counted)

    def _summed(self, changes: list[tuple[int, int]]) -> Ints:
        at, change = np.array(changes).T
        summed: Ints = np.cumsum(np.bincount(at, change, self.length)).astype(np.int64)
        return summed[: self.length]


def each(prompts: list[PromptsOf]) -> PromptsEach:
    """What the prompts of many iterations take."""
    return PromptsEach(*map(np.array, zip(*[p.prompts for p in prompts], strict=True)))
