"""The acceptance that counts alone imply: a survival curve, or an interval of them.

Servers count rounds, drafted and accepted tokens.  With the accepted tokens of each draft
position (or a histogram of accepted lengths) the survival curve P(accepted >= k) follows up
to the longest draft.  From the sum alone it does not: with m accepted of K drafted a round
every curve that falls from 1 and sums to m is possible, from "all or nothing" (m / K
everywhere) to "the first m always, the others never"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from policies.arrays import Floats
from traces.acceptance.trace import MOST_DRAFTED
from traces.errors import DraftsimError, FileError
from traces.store.text import whole, wholes

SHORT = 0.05
"""Largest part of the tokens that last drafts can lack: runs that lack more chose lengths."""


@dataclass(frozen=True)
class Totals:
    """Counts over many rounds of chain drafts.

    Parameters
    ----------
    rounds, drafted, accepted:
        Verifications, drafted tokens and accepted ones; none of them counts bonus tokens.
        ``drafted`` is None if the program does not say.  ``rounds`` is None if it tells
        means of an unknown number of rounds: the others are then per round.
    longest:
        Tokens of the longest draft; None if the program does not say: nothing then bounds
        the curve from below.
    per_position:
        Rounds that accepted at least 1, 2, ... tokens, where this is known (chances where
        ``rounds`` is None); with it the survival curve is one, without it an interval.
    requests:
        Requests that were counted, where known.
    tree:
        True if several branches were verified at once: no chain has such a survival curve.
    meta:
        Provenance, and measured seconds where the program reports some.
    differ:
        True if the drafts of some request are known to differ in length.

    Raises DraftsimError if the counts contradict each other.
    """

    rounds: int | None
    drafted: float | None
    accepted: float
    longest: int | None = None
    per_position: Sequence[float] | None = None
    requests: int | None = None
    tree: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    differ: bool = False

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise DraftsimError("the log counts no round of speculation: nothing to import")
        if self.drafted is not None and self.accepted > self.drafted:
            raise DraftsimError(
                f"{self.accepted} tokens were accepted of {self.drafted} drafted: the counts do "
                "not belong together"
            )
        longest = self.longest or len(self.per_position or ())
        drafted = self.accepted if self.drafted is None else self.drafted
        if longest > MOST_DRAFTED or not 0 <= drafted <= MOST_DRAFTED * self._rounds:
            raise DraftsimError(
                f"{drafted:g} tokens drafted in {self._rounds} rounds, the longest draft of "
                f"{longest or 'unknown'} tokens: expected at most {MOST_DRAFTED:,} in each"
            )
        if self.per_position is None:
            return
        counts = [self._rounds, *self.per_position]
        if any(b > a for a, b in pairwise(counts)):
            raise DraftsimError(
                f"the counts per draft position {list(self.per_position)} rise, or exceed the "
                f"{self._rounds} rounds: they do not belong together"
            )
        if sum(self.per_position) != self.accepted:
            raise DraftsimError(
                f"the counts per draft position sum to {sum(self.per_position)}, the accepted "
                f"tokens to {self.accepted}: they do not belong together"
            )

    @property
    def _rounds(self) -> int:
        """Rounds that the other counts are of."""
        return 1 if self.rounds is None else self.rounds

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens a round."""
        return self.accepted / self._rounds

    @property
    def reach(self) -> int:
        """Longest draft that the counts describe."""
        if self.per_position is not None:
            return len(self.per_position)
        drafted = self.accepted if self.drafted is None else self.drafted
        return self.longest or max(1, math.ceil(round(drafted / self._rounds, 6)))

    def survival(self) -> tuple[Floats, Floats]:
        """Return the lowest and highest P(accepted >= k) of a round, k = 1 ... `reach`.

        The two are equal where the counts per position are known (of drafts as long as
        `reach`; shorter ones make it a lower bound, which `fixed_length` tells).
        """
        if self.per_position is not None:
            known = np.asarray(self.per_position, dtype=np.float64) / self._rounds
            return known, known
        k = np.arange(1, self.reach + 1)
        mean = self.mean_accepted
        # P(>= k) is highest where the first k are all or nothing and lowest where the first
        # k - 1 are sure and the others share what is left.
        high = np.minimum(1.0, mean / k)
        if self.longest is None:
            return np.zeros(len(k)), high
        low = np.clip((mean - (k - 1)) / (self.reach - k + 1), 0.0, 1.0)
        return low, high

    @property
    def fixed_length(self) -> bool:
        """Return True if every draft had `reach` tokens, except the last ones of a request.

        Near its token limit a request drafts what remains, so that real runs count somewhat less
        than rounds x `reach`.
        """
        if self.drafted is None or self.differ:
            return False
        full = self._rounds * self.reach
        short = full - self.drafted
        # The last drafts have reach - 1, reach - 2, ... tokens, if nothing more is accepted.
        ends = self.reach * (self.reach + 1) / 2 * (self.requests or math.inf)
        return short <= 1e-6 * full or 0 <= short <= min(ends, SHORT * full)

    def block_efficiency(self) -> tuple[Floats, Floats]:
        """Return the lowest and highest tokens of a round that drafts 1 ... `reach` tokens."""
        if self.per_position is not None:
            emitted = 1 + np.cumsum(self.survival()[0])
            return emitted, emitted
        gamma, mean = np.arange(1, self.reach + 1), self.mean_accepted
        if self.longest is None:
            return np.ones(len(gamma)), 1 + np.minimum(gamma, mean)
        return 1 + mean * gamma / self.reach, 1 + np.minimum(gamma, mean)

    def rows(self) -> list[dict[str, Any]]:
        """Return survival and block efficiency by draft length, as bounds; none for trees."""
        if self.tree:
            return []
        parts = zip(*self.survival(), *self.block_efficiency(), strict=True)
        names = ("survival_lo", "survival_hi", "block_efficiency_lo", "block_efficiency_hi")
        return [
            {"gamma": k, **dict(zip(names, map(float, row), strict=True))}
            for k, row in enumerate(parts, 1)
        ]


class Summary(NamedTuple):
    """One request's counts, as read: `pooled` checks them."""

    where: str
    """File and row, for error messages."""
    histogram: Any
    """Rounds by accepted drafts, a list from 0; None if the server tells sums alone."""
    rounds: Any
    drafted: Any
    accepted: Any
    longest: int | None = None
    """Tokens of the longest draft; None: as many as the histogram has places for."""


def pooled(summaries: Sequence[Summary], meta: dict[str, Any]) -> Totals:
    """Return the requests together; a curve if each has its histogram, else an interval of curves.

    Raises FileError if a count is missing, or a histogram contradicts the counts that come with it.
    """
    for at, histogram, rounds, drafted, accepted, longest in summaries:
        for name, value in (("rounds", rounds), ("drafted", drafted), ("accepted", accepted)):
            whole(at, name, value)
        check_drafted(at, "drafted", drafted, rounds)
        if longest is not None:
            whole(at, "its longest draft", longest, most=MOST_DRAFTED)
        if accepted > drafted:
            raise FileError(f"{at}: {accepted} tokens accepted of {drafted} drafted")
        if histogram is None:
            continue
        wholes(at, "its histogram of accepted drafts", histogram)
        whole(at, "the length of its histogram", len(histogram), most=MOST_DRAFTED + 1)
        sums = sum(histogram), sum(k * n for k, n in enumerate(histogram))
        if sums != (rounds, accepted):
            raise FileError(
                f"{at}: the histogram counts {sums[1]} tokens in {sums[0]} rounds, but the counts "
                f"say {accepted} in {rounds}: they do not belong together"
            )
    rounds, drafted, accepted = (
        sum(column) for column in zip(*[s[2:5] for s in summaries], strict=True)
    )
    if not rounds:
        raise FileError(f"{summaries[0].where}: counts no round: a log without speculation")
    if any(s.histogram is None for s in summaries):
        told = [s.longest for s in summaries]
        longest = max(n for n in told if n is not None) if None not in told else None
        found = Totals(rounds, drafted, accepted, longest, requests=len(summaries), meta=meta)
    else:
        longest = max(max(s.longest or 0, len(s.histogram) - 1) for s in summaries)
        # A histogram may end with the most that was accepted: then the drafted tokens tell more.
        begun = [s for s in summaries if s.rounds]
        mean_drafts = {math.ceil(s.drafted / s.rounds) for s in begun}
        if len(mean_drafts) == 1 and all(s.histogram[-1] for s in begun):
            longest = max(longest, *mean_drafts)
        at_least = summed([s.histogram for s in summaries], longest)
        found = Totals(rounds, drafted, accepted, longest, at_least, len(summaries), meta=meta)
    # Last drafts lack tokens, and llama.cpp's rounds may be one more than are known.
    reach = found.reach
    lacking = (s.rounds * reach - s.drafted for s in summaries)
    differ = not all(-reach <= short <= reach * (reach + 1) / 2 for short in lacking)
    return replace(found, differ=differ)


def check_drafted(where: str, name: str, drafted: int, rounds: int) -> None:
    """Raise FileError if `rounds` cannot have drafted that many tokens; one round counts always."""
    if drafted > MOST_DRAFTED * max(1, rounds):
        raise FileError(
            f"{where}: {name} is {drafted:,} in {rounds:,} rounds, expected at most "
            f"{MOST_DRAFTED:,} drafted tokens in each"
        )


def summed(histograms: Sequence[Sequence[int]], longest: int) -> list[int]:
    """Return rounds that accepted at least 1, 2, ... `longest` drafts; histograms count from 0."""
    totals = [0] * (longest + 1)
    for histogram in histograms:
        for k, rounds in enumerate(histogram):
            totals[k] += rounds
    for k in range(longest - 1, -1, -1):
        totals[k] += totals[k + 1]
    return totals[1:]
