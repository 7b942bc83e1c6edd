"""Counts of requests with a histogram of accepted lengths, pooled: what several servers report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from traces.errors import FileError
from traces.importers.bounds import MOST_DRAFTED, check_drafted, summed, whole, wholes
from traces.importers.totals import Totals


class Summary(NamedTuple):
    """One request's counts, as read: `pooled` checks them."""

    where: str
    """File and row, for error messages."""
    histogram: Any
    """Rounds by accepted drafts, a list from 0; None where the server tells sums alone."""
    rounds: Any
    drafted: Any
    accepted: Any
    longest: int | None = None
    """Tokens of the longest draft; None: as many as the histogram has places for."""


def pooled(summaries: Sequence[Summary], meta: dict[str, Any]) -> Totals:
    """The requests together; a curve if each has its histogram, else an interval of curves.

    Raises
    ------
    FileError
        If a count is missing, or a histogram contradicts the counts that come with it.
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
        raise FileError(f"{summaries[0].where}: counts no round: a log of plain decoding")
    if any(s.histogram is None for s in summaries):
        told = [s.longest for s in summaries]
        longest = max(n for n in told if n is not None) if None not in told else None
        return Totals(rounds, drafted, accepted, longest, requests=len(summaries), meta=meta)
    longest = max(max(s.longest or 0, len(s.histogram) - 1) for s in summaries)
    at_least = summed([s.histogram for s in summaries], longest)
    return Totals(rounds, drafted, accepted, longest, at_least, len(summaries), meta=meta)
