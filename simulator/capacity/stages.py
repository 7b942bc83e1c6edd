"""The search for one policy: rough limits first, then the answer, then comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from simulator.capacity.points import LONG, Bench, Point, Verdict
from simulator.executors import Executor, Local, Lost
from simulator.serving.outcome.results import ResultsFile, restored
from traces.errors import DraftsimError

Found = TypeVar("Found")
Search = Generator[Sequence[Point], Verdict, Found]
"""Yields the replications of a point, is sent what came of them, returns what it looked for."""
Progress = Callable[[int, str], None]
"""Called with the runs there are, and a word on the one just finished."""


class Study:
    """Runs points, each once.

    Parameters
    ----------
    bench:
        What they need.
    executor:
        Who runs them; None: this process.
    kept:
        A file that was entered, of whose rows none is computed again.
    progress:
        Called whenever a point is there.
    """

    def __init__(
        self,
        bench: Bench,
        executor: Executor | None = None,
        kept: ResultsFile | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.bench = bench
        self.executor = executor or Local(1)
        self.progress = progress
        self._file = kept
        self._known: dict[Point, Mapping[str, Any]] = {}
        for row in kept.kept.values() if kept is not None else ():
            self._know(restored(row))

    def drive(self, searches: Mapping[str, Search[Found]]) -> dict[str, Found]:
        """Run searches to their ends, all their open questions at a time.

        Raises
        ------
        DraftsimError
            If a point fails, or was lost with its worker.
        """
        found: dict[str, Found] = {}
        asked: dict[str, Sequence[Point]] = {}
        for name, search in searches.items():
            self._step(name, search, None, asked, found)
        while asked:
            self._answer([point for points in asked.values() for point in points])
            for name, points in list(asked.items()):
                del asked[name]
                outcomes = [self._known[point] for point in points]
                verdict = Verdict(outcomes, self.bench.targets)
                self._step(name, searches[name], verdict, asked, found)
        return found

    def _step(
        self,
        name: str,
        search: Search[Found],
        verdict: Verdict | None,
        asked: dict[str, Sequence[Point]],
        found: dict[str, Found],
    ) -> None:
        try:
            asked[name] = next(search) if verdict is None else search.send(verdict)
        except StopIteration as end:
            found[name] = end.value

    def _answer(self, points: Sequence[Point]) -> None:
        missing = [p for p in dict.fromkeys(points) if p not in self._known]
        lost = 0
        for _, outcome in self.executor.run(self.bench, missing):
            if isinstance(outcome, Lost):
                lost += 1
                continue
            self._know(outcome)
            if self._file is not None:
                self._file.add(outcome)
            if self.progress is not None:
                at = f"{outcome['policy']}, {outcome['replicas']} x at {outcome['rate']:.3g}/s"
                self.progress(len(self._known), at)
        if lost:
            raise DraftsimError(
                f"{lost} of {len(missing)} runs were lost with their workers: run the same "
                "command again; with --out what is finished is kept"
            )

    def _know(self, outcome: Mapping[str, Any]) -> None:
        self._known[Point(*(outcome[name] for name in Point._fields))] = outcome


def fewest(guess: int, most: int) -> Generator[int, bool, int | None]:
    """Yield the fewest replicas, up to `most`, that keep the targets; None if `most` do not.

    It looks around `guess` in growing steps, halves what is between, and then makes sure that
    one more keeps them too: where that is not so, the answer was chance, and it goes on above.
    """
    low, high, at, step = 0, most + 1, min(max(guess, 1), most), 1
    while True:
        if (yield at):
            high = at
        else:
            low = at
        if high - low == 1:
            if high > most:
                return None
            if high == most or (yield high + 1):
                return high
            low, high, step = high + 1, most + 1, 1
            if low == most:
                return None
        if high > most:
            at, step = min(low + step, most), 2 * step
        elif low == 0:
            at, step = max(high - step, 1), 2 * step
        else:
            at = (low + high) // 2


def highest(
    start: float, step: float, tolerance: float, least: float, most: float
) -> Generator[float, bool, float]:
    """Return the highest rate that keeps the targets, to a relative `tolerance`.

    0 if it is below `least`, infinite if it is above `most`.

    From `start` it goes up or down by factors of `step`, then halves on a logarithmic scale.
    """
    low, high, at = 0.0, math.inf, start
    while True:
        if (yield at):
            low = at
        else:
            high = at
        if not low:
            at = high / step
            if at < least:
                return 0.0
        elif math.isinf(high):
            if low >= most:
                return math.inf
            at = low * step
        elif high <= low * (1 + tolerance):
            return low
        else:
            at = math.sqrt(low * high)


EMPTY_RATE = 1e-4
"""Requests per second at which each is alone."""
FEW = 200
"""The least number of requests that a replica gets."""
MOST_REQUESTS = 3000
"""The most that a replica gets, however slow its requests."""
BATCHES = 4
"""A replica gets at least this many times what it serves at once, as far as `MOST_REQUESTS` allows:
fewer requests would wait at no rate.
"""
BATCHED, FAR = 1e4, 100
"""Rates are tried up to this many times the rate of one request at a time, and of batches.

If the targets are kept even then, no rate is too much for this number of requests.
"""
ROUGH, FINE = 0.1, 0.03
"""To what part rates are found: to look around from, and to report."""
ENOUGH = 3
"""Replications for rates, of which one is found from many points."""

Value = TypeVar("Value", int, float)
Ask = Callable[[int, float, int | None, int | None], Sequence[Point]]
"""Makes the points of a policy: (replicas, rate, requests, replications at most; None: all)."""


@dataclass(frozen=True)
class Start:
    """A rough estimate of what one replica can do."""

    alone: Verdict
    """A request at a time."""
    limit: float
    """The rate up to which it keeps the targets; 0 where it does at none."""
    requests: int
    """That a replica has to get for a judgement."""


@dataclass(frozen=True)
class Answer:
    """The result for one policy."""

    verdict: Verdict
    """At `replicas`, or of the most that were tried."""
    replicas: int | None
    low: int | None = None
    high: int | None = None
    limit: float = math.nan
    """The rate up to which that many replicas keep the targets; infinite if none is too much."""


def start(ask: Ask, at_once: int) -> Search[Start]:
    """Find if one replica meets the SLO at any rate, and roughly up to which.

    It serves `at_once` requests at once.
    """
    few = max(FEW, min(BATCHES * at_once, MOST_REQUESTS))
    alone = yield ask(1, EMPTY_RATE, few, 2)  # the same requests as at every other rate
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
    """Return the share of requests within the targets at each of `rates` per replica."""
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
    """Return the largest number below `rate`."""
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
