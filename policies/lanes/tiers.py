"""The slots of many runs of SGLang's adaptive draft length (`policies.batch.sglang`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.lanes.base import Bools, Floats, Ints, LaneState


@dataclass
class Tiers(LaneState):
    """A slot's candidates, which of them is its number of steps, and its average.

    ``candidates`` is a list of one slot and (lanes, longest list) of many.
    """

    candidates: Ints
    at: Ints
    steps: Ints
    last: Ints
    average: Floats
    batches: Ints
    weight: Floats
    interval: Ints
    warmup: Ints
    down: Floats
    up: Floats
    ceiling: Floats
    in_step: Ints

    @classmethod
    def evened(cls, states: Sequence[Any]) -> Sequence[Any]:
        longest = max(len(s.candidates) for s in states)
        return [
            replace(s, candidates=[*s.candidates, *([0] * (longest - len(s.candidates)))])
            for s in states
        ]

    def caps(self) -> Ints:
        return np.maximum(self.steps, self.in_step)

    def sent(self) -> Ints:
        return self.steps

    def observe(self, drafted: Ints, accepted: Ints) -> None:
        del drafted
        moved = self.average + self.weight * (accepted - self.average)
        self.average = np.where(self.steps > 0, moved, self.average)
        self.batches = self.batches + 1
        since = self.batches - self.warmup
        due = (since > 0) & (since % self.interval == 0)
        if due.any():
            self._choose(due)

    def _choose(self, due: Bools) -> None:
        """Move the slots of `due` to where their averages call for."""
        start, rounds = self.at, range(self.candidates.shape[1] - 1)
        resting = self.steps == 0
        at = start
        for _ in rounds:
            below = self._steps(np.maximum(at - 1, 0))
            floor = np.where(below > 0, below - 0.5, 0.5) + self.down
            at = at - ((at > 0) & ~(self.average > floor))
        held = at == start
        for _ in rounds:
            enough = self.average > self._steps(at) - 0.5 + self.up
            at = at + (held & (at < self.last) & enough)
        coeff = np.maximum(1, np.ceil(self.average * self.ceiling))
        capped = (self.ceiling > 0) & (at <= start)
        for _ in rounds:
            at = at - (capped & (at > 0) & (self._steps(at) > coeff))
        probe = np.minimum(start + 1, self.last)
        first = self._steps(probe)
        woken = due & resting & (first > 0) & (self.average < 0)
        self.average = np.where(woken, first - 1.0, self.average)
        self.at = np.where(due, np.where(resting, probe, at), start)
        self.steps = self._steps(self.at)

    def _steps(self, at: Ints) -> Ints:
        found: Ints = np.take_along_axis(self.candidates, at[:, None], axis=1)[:, 0]
        return found
