"""What is looked for of one policy: rough limits first, then the answer, then comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from simulator.capacity.points import LONG, Point, Verdict
from simulator.capacity.search import fewest, highest
from simulator.capacity.study import Search

EMPTY_RATE = 1e-4
"""Requests per second at which each is alone."""
TRIED, FEW = 100, 200
"""Requests that are tried alone, and the least that a replica gets."""
MOST_REQUESTS = 3000
"""The most that a replica gets, however slow its requests."""
BATCHES = 4
"""A replica gets at least so many times what it serves at once, so far as `MOST_REQUESTS` go: fewer
would wait at no rate."""
BATCHED, FAR = 1e4, 100
"""Rates are tried up to so many times what a replica takes one by one, and in batches.

Where the targets are kept even then, no rate is too much for so few requests."""
ROUGH, FINE = 0.1, 0.03
"""To what part rates are found: to look around from, and to report."""
ENOUGH = 3
"""Replications for rates, of which one is found from many points."""

Value = TypeVar("Value", int, float)
Found = TypeVar("Found")
Ask = Callable[[int, float, int | None, int | None], Sequence[Point]]
"""Makes the points of a policy: (replicas, rate, requests, replications at most; None: all)."""


@dataclass(frozen=True)
class Start:
    """What one replica can do, about."""

    alone: Verdict
    """A request at a time."""
    limit: float
    """The rate up to which it keeps the targets; 0 where it does at none."""
    requests: int
    """That a replica has to get for a judgement."""


@dataclass(frozen=True)
class Answer:
    """What was found for one policy."""

    verdict: Verdict
    """At `replicas`, or of the most that were tried."""
    replicas: int | None
    low: int | None = None
    high: int | None = None
    limit: float = math.nan
    """The rate up to which so many replicas keep the targets; infinite where none is too much."""


def start(ask: Ask, at_once: int) -> Search[Start]:
    """Whether one replica keeps the targets at any rate, and roughly up to which.

    It serves `at_once` requests at once.
    """
    few = max(FEW, min(BATCHES * at_once, MOST_REQUESTS))
    alone = yield ask(1, EMPTY_RATE, TRIED, 1)
    if not alone.kept:
        return Start(alone, 0.0, few)
    rate = 1 / alone.mean("e2e_s", "mean")
    verdicts: dict[float, Verdict] = {}
    limit = yield from _asked(
        highest(rate, 2.0, ROUGH, rate / 1000, rate * BATCHED),
        lambda r: ask(1, r, few, 2),
        verdicts,
    )
    limit = min(limit, max(verdicts))
    slowest = (verdicts[limit] if limit else alone).mean("e2e_s", "p95")
    needed = math.ceil(1.5 * LONG * slowest * limit)
    return Start(alone, limit, max(few, min(needed, MOST_REQUESTS)))


def answer(
    ask: Ask, rate: float, limit: float, most: int, horizon: Callable[[int], int | None]
) -> Search[Answer]:
    """Find the fewest replicas at `rate`, their interval, and the rate that is too much for them.

    A replica sustains about `limit` requests/s.  At most `most` replicas are tried; ``horizon(n)``
    is the number of requests simulated for n replicas.  The rate that is too much is never below
    `rate` itself, which these replicas were found to keep.
    """
    verdicts: dict[int, Verdict] = {}
    guess = min(math.ceil(rate / limit), most)
    # Who needs more replicas sees more of the same stream.
    requests = horizon(guess)

    def points(replicas: int) -> Sequence[Point]:
        return ask(replicas, rate, requests, None)

    count = yield from _asked(fewest(guess, most), points, verdicts)
    if count is None:
        return Answer(verdicts[most], None)
    share = verdicts[count].targets.share
    low: int | None = None
    high: int | None = None
    if math.isfinite(verdicts[count].low):
        low = high = count
        while low > 1:
            if low - 1 not in verdicts:
                verdicts[low - 1] = yield points(low - 1)
            if verdicts[low - 1].high < share:
                break
            low -= 1
        while high is not None and verdicts[high].low < share:
            high = high + 1 if high < min(2 * count + 4, most) else None
            if high is not None and high not in verdicts:
                verdicts[high] = yield points(high)
    too_much = yield from _asked(
        highest(rate, 1 + 1 / max(count, 2), FINE, rate / 2, FAR * max(rate, limit)),
        lambda r: ask(count, r, requests, ENOUGH), {rate: verdicts[count]},
    )  # fmt: skip
    return Answer(verdicts[count], count, low, high, too_much)


def shares(ask: Ask, rates: Sequence[float], requests: int) -> Search[list[float]]:
    """The share of requests within the targets at each of `rates` per replica."""
    found = []
    for rate in rates:
        verdict = yield ask(1, rate, requests, ENOUGH)
        found.append(verdict.within)
    return found


def curve(
    ask: Ask, found: Answer, rate: float, counts: Sequence[int],
    horizon: Callable[[int], int | None],
) -> Search[list[tuple[int, float]]]:  # fmt: skip
    """Find pairs of replicas and the rate up to which they keep the targets, ascending.

    There are none where no rate is too much.  Every pair agrees with the answer at `rate`: fewer
    replicas keep the targets below it only, more of them beyond the answer's limit.  That answer
    was judged by all replications, the pairs by `ENOUGH`.
    """
    pairs: list[tuple[int, float]] = []
    if found.replicas is not None and math.isfinite(found.limit):
        fewest = found.replicas
        for count in sorted({*counts, fewest - 1} - {0, fewest}):
            about = found.limit / fewest * count

            def points(rate: float, count: int = count) -> Sequence[Point]:
                return ask(count, rate, horizon(count), ENOUGH)

            search = highest(about, 1.1, FINE, about / 10, FAR * about)
            limit = yield from _asked(search, points, {})
            limit = max(limit, found.limit) if count > fewest else min(limit, below(rate))
            pairs.append((count, limit))
        pairs.append((fewest, found.limit))
    return sorted(pair for pair in pairs if math.isfinite(pair[1]))


def below(rate: float) -> float:
    """The largest number below `rate`."""
    return math.nextafter(rate, 0.0)


def _asked(
    search: Generator[Value, bool, Found],
    points: Callable[[Value], Sequence[Point]],
    verdicts: dict[Value, Verdict],
) -> Search[Found]:
    """Answer the questions of a search by simulation, except those that `verdicts` answers.

    `verdicts` gets the answers.
    """
    try:
        value = next(search)
        while True:
            if value not in verdicts:
                verdicts[value] = yield points(value)
            value = search.send(verdicts[value].kept)
    except StopIteration as end:
        found: Found = end.value
        return found
