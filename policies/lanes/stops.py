"""Tests of one drafted token after another: the first that fails is the draft's last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.lanes.base import UNBOUNDED, Bools, Floats, Lengths, Starts


def until_first(starts: Starts, failing: Bools, *, drops: bool = False) -> Lengths:
    """Lengths if a draft ends with its first token of `failing`, shape (rows,).

    ``drops``: a failing token that ends a draft is not verified.
    """
    count = len(failing)
    rows = np.where(failing, np.arange(count), 2 * count)
    nearest = np.minimum.accumulate(rows[::-1])[::-1]
    ahead = nearest[starts.rows] - starts.rows
    forwards = np.minimum(ahead + 1, starts.most)
    return Lengths(forwards, np.minimum(forwards, ahead) if drops else None)


@dataclass(frozen=True)
class Below:
    """Ends with a token whose `signal` is below `threshold`."""

    signal: str
    threshold: float
    drops: bool = False

    def lengths(self, starts: Starts) -> Lengths:
        return until_first(starts, starts.signal(self.signal) < self.threshold, drops=self.drops)


@dataclass(frozen=True)
class EntropyAbove:
    """Ends with a token whose sqrt(scale H) is above `threshold`."""

    scale: float
    threshold: float

    def lengths(self, starts: Starts) -> Lengths:
        return until_first(starts, np.sqrt(self.scale * starts.signal("entropy")) > self.threshold)


@dataclass(frozen=True)
class Signal:
    """A signal as it is, to be watched."""

    name: Literal["prob", "top_prob", "raw_prob"]

    def values(self, starts: Starts) -> Floats:
        return starts.signal(self.name)


@dataclass(frozen=True)
class EntropyBound:
    """1 - sqrt(scale H), to be watched."""

    scale: float

    def values(self, starts: Starts) -> Floats:
        found: Floats = 1.0 - np.sqrt(self.scale * starts.signal("entropy"))
        return found


@dataclass(frozen=True)
class KnownRun:
    """As many tokens as will be accepted, and `more`, up to `longest`."""

    more: int
    longest: int

    def lengths(self, starts: Starts) -> Lengths:
        run = starts.run_lengths
        length = np.minimum(np.minimum(run + self.more, self.longest), starts.most)
        # Nobody knows: a draft longer than any recorded one sends this setting to the loop.
        return Lengths(np.where(run < 0, UNBOUNDED, length))
