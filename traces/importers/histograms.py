"""Counts of requests with a histogram of accepted lengths, pooled: what several servers report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from traces.errors import FileError
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
        If a count is none, or a histogram contradicts the counts beside it.
    """
    for at, histogram, rounds, drafted, accepted, _ in summaries:
        for name, value in (("rounds", rounds), ("drafted", drafted), ("accepted", accepted)):
            if type(value) is not int or value < 0:
                raise FileError(f"{at}: {name} is {value!r}, expected a whole number >= 0")
        if accepted > drafted:
            raise FileError(f"{at}: {accepted} tokens accepted of {drafted} drafted")
        if histogram is None:
            continue
        if not isinstance(histogram, list) or not all(type(n) is int and n >= 0 for n in histogram):
            raise FileError(f"{at}: its histogram of accepted drafts is no list of whole numbers")
        sums = sum(histogram), sum(k * n for k, n in enumerate(histogram))
        if sums != (rounds, accepted):
            raise FileError(
                f"{at}: the histogram counts {sums[1]} tokens in {sums[0]} rounds, beside it stand "
                f"{accepted} in {rounds}: they do not belong together"
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
    rows = [np.pad(s.histogram, (0, longest + 1 - len(s.histogram))) for s in summaries]
    at_least = np.sum(rows, axis=0)[::-1].cumsum()[::-1][1:].tolist()
    return Totals(rounds, drafted, accepted, longest, at_least, len(summaries), meta=meta)
