"""Capacity plans: how many replicas meet an SLO at a load, under each policy, and their cost.

A point is a simulation of a number of replicas at a rate under a policy.  For each policy the
search finds rough limits first, then the fewest replicas, then other loads to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from policies.batch.base import Policy
from policies.lengths.basic import Autoregressive
from policies.rules.base import VerifyRule
from simulator.bootstrap import Interval
from simulator.executors import Cluster, Executor, Local
from simulator.formulas.general import require
from simulator.serving.arrivals import ArrivalFile
from simulator.serving.outcome.report import t_interval
from simulator.serving.outcome.results import ResultsFile, restored
from simulator.serving.routers import describe_router
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.study import ServingRunner, break_even_load, over_rates
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

SAMPLED = 2
"""Replicas simulated of a fleet whose replicas know nothing of each other: all are alike."""
KEPT = (
    "ttft_s", "tpot_s", "e2e_s", "overloaded", "utilisation", "mean_batch", "verify", "source",
    "rejected", "fidelity", "extrapolated", "unpriced", "simulated_tokens",
)  # fmt: skip
"""Columns of a run's row that a point's result has, too."""
LONG = 10
"""Times that the slowest requests should fit into the time over which requests arrive."""


class Point(NamedTuple):
    """One replication of a number of replicas at a rate under a policy."""

    policy: str
    replicas: int
    rate: float
    requests: int | None
    """Requests of the whole fleet; None: those of the arrivals file."""
    replication: int = 0


@dataclass(frozen=True, eq=False)
class PointRunner:
    """All inputs of a point; `base` holds the arrivals, the engine, the router and the targets."""

    trace: Trace
    latency: LatencyTable
    policies: Mapping[str, Policy]
    base: Scenario
    rule: VerifyRule | None = None

    def scenario(self, point: Point) -> Scenario:
        """Return what is served at `point`."""
        at = replace(self.base, replicas=point.replicas, requests=point.requests, replications=1)
        [served] = over_rates(at, [point.rate])
        file = served.arrivals
        if point.rate == EMPTY_RATE and isinstance(file, ArrivalFile):
            # One by one: requests of one timestamp stay together at any rate.
            apart = file.read._replace(arrival_s=np.arange(len(file.read.output)) / EMPTY_RATE)
            return replace(served, arrivals=ArrivalFile(file.path, requests=apart))
        return served

    def run(self, point: Point) -> dict[str, Any]:
        """Return the results of `point`, in plain numbers."""
        scenario = self.scenario(point)
        only = range(min(point.replicas, SAMPLED)) if scenario.splits else None
        run = simulate(
            self.trace, self.latency, self.policies[point.policy], scenario, name=point.policy,
            rule=self.rule, replication=point.replication, only=only,
        )  # fmt: skip
        row, recorder = run.row(), run.recorder
        kept = run.columns(measured=True)
        within = run.within(kept)
        late = kept["index"] >= (recorder.skip + recorder.expected) / 2
        taken = len(within) / (len(within) + run.missed) if len(within) else 0.0
        return {
            **point._asdict(),
            "within": float(within.mean()) * taken if len(within) else 0.0,
            "within_late": float(within[late].mean()) * taken if late.any() else 0.0,
            "span_s": recorder.end_s - recorder.start_s,
            "throughput_tok_s": row["throughput_tok_s"] * point.replicas / run.replicas,
            **{name: row[name] for name in KEPT},
        }  # fmt: skip

    def key(self) -> str | None:
        """Return a digest of everything that a point's result depends on."""
        return ServingRunner(self.trace, self.latency, self.policies, [self.base], self.rule).key()


@dataclass
class PointVerdict:
    """Replications of one point."""

    outcomes: Sequence[Mapping[str, Any]]
    share: float
    """Share of the requests that must be within the SLO."""

    @cached_property
    def within(self) -> Interval:
        """Share of requests within the SLO: mean over replications, and its 95% interval.

        The ends are NaN with one replication.
        """
        return t_interval([o["within"] for o in self.outcomes])

    @property
    def kept(self) -> bool:
        """Return True if enough requests are within the SLO, and the replicas keep up."""
        overloaded = sum(o["overloaded"] for o in self.outcomes)
        return self.within.value >= self.share and 2 * overloaded < len(self.outcomes)

    @property
    def too_short(self) -> str:
        """Return why the horizon is too short to judge; empty if it is not."""
        slowest, span = self.mean("e2e_s", "p95"), self.mean("span_s")
        if math.isnan(slowest):
            return f"requests arrive over {span:.3g} s, and none of those that count finishes"
        if not span >= LONG * slowest:
            return (
                f"requests arrive over {span:.3g} s, and the slowest twentieth take {slowest:.3g} s"
            )
        late = t_interval([o["within_late"] for o in self.outcomes])
        bound = late.high if math.isfinite(late.high) else late.value
        if self.kept and bound < self.share:
            return f"{late.value:.1%} of the later half meet the SLO: the queue still grows"
        return ""

    def mean(self, name: str, quantile: str | None = None) -> float:
        """Return the mean of a metric over the outcomes."""
        found = [o[name] if quantile is None else o[name][quantile] for o in self.outcomes]
        return float(np.mean([math.nan if v is None else v for v in found]))


Found = TypeVar("Found")
Search = Generator[Sequence[Point], PointVerdict, Found]
"""Yields the replications of a point, is sent what came of them, returns what it looked for."""
Progress = Callable[[int, str], None]
"""Called with the runs there are, and a word on the one just finished."""


class Points:
    """Runs points, each once.

    Parameters
    ----------
    runner:
        Inputs of all points.
    executor:
        Where points run; None: in this process.
    kept:
        Open results file; its rows are not computed again.
    progress:
        Called after every point.
    """

    def __init__(
        self, runner: PointRunner, executor: Executor | None = None,
        kept: ResultsFile | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.executor = executor or Local(1)
        self.progress = progress
        self._file = kept
        self._known: dict[Point, Mapping[str, Any]] = {}
        for row in kept.kept.values() if kept is not None else ():
            self._know(restored(row))

    def drive(self, searches: Mapping[str, Search[Found]]) -> dict[str, Found]:
        """Run searches to their ends; the points that they wait for run together.

        Raises DraftsimError if a point fails, or was lost with its worker.
        """
        found: dict[str, Found] = {}
        answers: Any = dict.fromkeys(searches)  # None begins a search
        share = self.runner.base.targets.share
        while answers:
            asked: dict[str, Sequence[Point]] = {}
            for name, verdict in answers.items():
                try:
                    asked[name] = searches[name].send(verdict)
                except StopIteration as end:
                    found[name] = end.value
            self._answer([point for points in asked.values() for point in points])
            answers = {
                name: PointVerdict([self._known[point] for point in points], share)
                for name, points in asked.items()
            }
        return found

    def _answer(self, points: Sequence[Point]) -> None:
        missing = [p for p in dict.fromkeys(points) if p not in self._known]
        for _, outcome in self.executor.run(self.runner, missing):
            self._know(outcome)
            if self._file is not None:
                self._file.add(outcome)
            if self.progress is not None:
                at = f"{outcome['policy']}, {outcome['replicas']} x at {outcome['rate']:.3g}/s"
                self.progress(len(self._known), at)

    def _know(self, outcome: Mapping[str, Any]) -> None:
        self._known[Point(*(outcome[name] for name in Point._fields))] = outcome


def fewest(guess: int, most: int) -> Generator[int, bool, int | None]:
    """Find the fewest replicas, up to `most`, that meet the SLO; None if `most` do not.

    The search goes from `guess` in growing steps, then bisects.  Last it checks that one replica
    more meets the SLO, too; if not, the answer was chance and the search continues above it.
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
    """Find the highest rate at which the SLO is met, to a relative `tolerance`.

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
"""A replica gets this many times what it serves at once, up to `MOST_REQUESTS`, or none would wait.
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

    alone: PointVerdict
    """A request at a time."""
    limit: float
    """The rate up to which it keeps the targets; 0 where it does at none."""
    requests: int
    """That a replica has to get for a judgement."""


@dataclass(frozen=True)
class Answer:
    """The result for one policy."""

    verdict: PointVerdict
    """At `replicas`; else of the most that were tried, or of a request at a time."""
    replicas: int | None
    low: int | None = None
    high: int | None = None
    limit: float = math.nan
    """The rate up to which that many replicas keep the targets; infinite if none is too much."""


def find_start(ask: Ask, at_once: int) -> Search[Start]:
    """Find roughly the highest rate at which one replica meets the SLO, if there is one.

    The replica serves `at_once` requests at a time.
    """
    few = max(FEW, min(BATCHES * at_once, MOST_REQUESTS))
    alone = yield ask(1, EMPTY_RATE, few, 2)  # the same requests as at every other rate
    if not alone.kept:
        return Start(alone, 0.0, few)
    rate = 1 / alone.mean("e2e_s", "mean")
    verdicts: dict[float, PointVerdict] = {}
    limit = yield from _asked(
        highest(rate, 2.0, ROUGH, rate / 1000, rate * BATCHED),
        lambda r: ask(1, r, few, 2),
        verdicts,
    )
    # None is kept where many arrive at once: more replicas take them apart.
    limit = min(limit, max(verdicts)) or rate / 1000
    slowest = verdicts.get(limit, alone).mean("e2e_s", "p95")
    needed = math.ceil(1.5 * LONG * slowest * limit)
    return Start(alone, limit, max(few, min(needed, MOST_REQUESTS)))


def find_answer(
    ask: Ask, rate: float, limit: float, most: int, horizon: Callable[[int], int | None]
) -> Search[Answer]:
    """Find the fewest replicas at `rate`, their interval, and the highest rate that they sustain.

    A replica sustains about `limit` requests/s.  At most `most` replicas are tried; ``horizon(n)``
    is the number of requests simulated for n replicas.  The highest rate is never below `rate`, at
    which these replicas meet the SLO.
    """
    verdicts: dict[int, PointVerdict] = {}
    guess = math.ceil(min(rate / limit, most))
    # Who needs more replicas sees more of the same stream.
    requests = horizon(guess)

    def points(replicas: int) -> Sequence[Point]:
        return ask(replicas, rate, requests, None)

    count = yield from _asked(fewest(guess, most), points, verdicts)
    if count is None:
        return Answer(verdicts[most], None)
    share = verdicts[count].share
    low: int | None = None
    high: int | None = None
    if math.isfinite(verdicts[count].within.low):
        low = high = count
        while low > 1:
            if low - 1 not in verdicts:
                verdicts[low - 1] = yield points(low - 1)
            if verdicts[low - 1].within.high < share:
                break
            low -= 1
        while high is not None and verdicts[high].within.low < share:
            high = high + 1 if high < min(2 * count + 4, most) else None
            if high is not None and high not in verdicts:
                verdicts[high] = yield points(high)
    too_much = yield from _asked(
        highest(rate, 1 + 1 / max(count, 2), FINE, rate / 2, FAR * max(rate, limit)),
        lambda r: ask(count, r, requests, ENOUGH), {rate: verdicts[count]},
    )  # fmt: skip
    return Answer(verdicts[count], count, low, high, too_much)


def find_shares(ask: Ask, rates: Sequence[float], requests: int) -> Search[list[float]]:
    """Find the share of requests within the SLO at each of `rates` per replica."""
    found = []
    for rate in rates:
        verdict = yield ask(1, rate, requests, ENOUGH)
        found.append(verdict.within.value)
    return found


def find_curve(
    ask: Ask, found: Answer, rate: float, counts: Sequence[int],
    horizon: Callable[[int], int | None],
) -> Search[list[tuple[int, float]]]:  # fmt: skip
    """Find pairs of replicas and the highest rate at which they meet the SLO, ascending.

    Empty if the SLO is met at every rate.  The pairs are made consistent with the answer at `rate`,
    which was judged by all replications and not only by `ENOUGH`: fewer replicas have rates below
    `rate`, more replicas have rates above the answer's limit.
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
            below = math.nextafter(rate, 0.0)
            limit = max(limit, found.limit) if count > fewest else min(limit, below)
            pairs.append((count, limit))
        pairs.append((fewest, found.limit))
    return sorted(pair for pair in pairs if math.isfinite(pair[1]))


def _asked(
    search: Generator[Value, bool, Found], points: Callable[[Value], Sequence[Point]],
    verdicts: dict[Value, PointVerdict],
) -> Search[Found]:  # fmt: skip
    """Simulate the points that a search asks for and that `verdicts` lacks, and add them there."""
    try:
        value = next(search)
        while True:
            if value not in verdicts:
                verdicts[value] = yield points(value)
            value = search.send(verdicts[value].kept)
    except StopIteration as end:
        found: Found = end.value
        return found


TOLD_APART = 0.01
"""Shares of requests in time that differ by less are taken to be equal."""


def plan_rows(
    runner: PointRunner, rate: float, starts: Mapping[str, Start], answers: Mapping[str, Answer],
    compared: tuple[Sequence[float], Mapping[str, Sequence[float]]],
    curves: Mapping[str, Sequence[tuple[int, float]]], gpus: int, price: float | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row per policy; latencies and throughput are those at ``replicas``.

    * ``max_batch``: most requests that a replica runs at a time.
    * ``replicas``: fewest that meet the SLO.  None if no number tried meets it, or if a request
      that runs alone is too slow.
    * ``replicas_lo``, ``replicas_hi``: its 95% interval over replications.
    * ``within_alone``: share of requests within the SLO if every request is alone.
    * ``rate_limit``: largest request rate at which ``replicas`` meet the SLO; infinite if they do
      at every rate tried.  ``rate_per_replica`` is that rate per replica.
    * ``saved``: replicas fewer than without speculation.
    * ``stops_saving``: request rate per replica above which speculation saves no replicas over no
      speculation; infinite if it saves some at the highest rate tried, NaN if at none.
      ``saves_at`` is this in words, since JSON has neither.
    * ``too_short``: why the simulated requests are too few to judge.
    * ``curve``: pairs of replicas and the largest rate at which they meet the SLO.
    * ``gpus``, ``tok_s_per_gpu``, ``cost_per_hour``, ``cost_per_million_tokens``: GPUs of the
      fleet, output tokens per second and GPU, and costs; costs are NaN without a price.
    """
    plain = next((n for n, p in runner.policies.items() if type(p) is Autoregressive), None)
    others = None if plain is None else answers[plain].replicas
    targets = runner.base.targets
    rows = []
    for name, found in answers.items():
        verdict, count = found.verdict, found.replicas
        outcomes = verdict.outcomes
        tokens_s = verdict.mean("throughput_tok_s") if count else math.nan
        rows.append({
            "policy": name, "verify": outcomes[0]["verify"], "source": outcomes[0]["source"],
            "router": describe_router(runner.base.router), "rate": rate,
            "max_batch": runner.base.limits.max_batch,
            "ttft_target_s": targets.ttft_s, "tpot_target_s": targets.tpot_s,
            "share": targets.share, "replicas": count,
            "replicas_lo": found.low, "replicas_hi": found.high,
            **verdict.within.columns("within_targets"),
            "within_alone": starts[name].alone.within.value, "rate_limit": found.limit,
            "rate_per_replica": found.limit / count if count else math.nan,
            "saved": None if others is None or count is None else others - count,
            "stops_saving": (stops := _stops(compared, plain, name)), "saves_at": _saves_at(stops),
            "throughput_tok_s": tokens_s,
            **{
                metric: {q: verdict.mean(metric, q) for q in outcomes[0][metric]}
                for metric in ("ttft_s", "tpot_s", "e2e_s")
            },
            "utilisation": verdict.mean("utilisation"), "mean_batch": verdict.mean("mean_batch"),
            "requests": outcomes[0]["requests"], "replications": len(outcomes),
            "too_short": verdict.too_short if starts[name].limit else "",
            "curve": [list(pair) for pair in curves.get(name, ())],
            "rejected": sum(o["rejected"] for o in outcomes),
            "extrapolated": sum(o["extrapolated"] for o in outcomes),
            "unpriced": list(outcomes[0]["unpriced"]), "fidelity": outcomes[0]["fidelity"],
            **costs(count, tokens_s, gpus, price),
        })  # fmt: skip
    return rows


def costs(replicas: int | None, tokens_s: float, gpus: int, price: float | None) -> dict[str, Any]:
    """Return a fleet's GPUs, output tokens per second and GPU, and costs (`plan_rows`)."""
    used = math.nan if replicas is None else replicas * gpus
    hourly = math.nan if price is None else used * price
    return {
        "gpus": None if replicas is None else used, "tok_s_per_gpu": tokens_s / used,
        "cost_per_hour": hourly,
        "cost_per_million_tokens": hourly / (tokens_s * 3600) * 1e6,
    }  # fmt: skip


def _stops(
    compared: tuple[Sequence[float], Mapping[str, Sequence[float]]], plain: str | None, name: str
) -> float | None:
    rates, shares = compared
    if plain is None or name == plain or name not in shares:
        return None
    if plain not in shares:
        return math.inf  # plain decoding keeps the targets at no rate
    gaps = [other - own for own, other in zip(shares[name], shares[plain], strict=True)]
    late = [gap if abs(gap) > TOLD_APART else 0.0 for gap in gaps]
    if late[0] > 0 > min(late):
        return None  # it saves replicas only from some rate on
    return break_even_load(rates, late, [0.0] * len(late))


def _saves_at(stops: float | None) -> str | None:
    """Return in words where speculation saves replicas, by `_stops`."""
    if stops is None:
        return None
    if math.isnan(stops):
        return "no rate"
    return "every rate" if math.isinf(stops) else f"up to {stops:.3g}/s per replica"


RATES = 6
"""Rates per replica at which policies are compared."""


def plan(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Policy], base: Scenario,
    rate: float | None, *, rule: VerifyRule | None = None,
    requests: int | None = None, most: int = 1024, gpus: int | None = None,
    price: float | None = None, curve: bool = False, executor: Executor | None = None,
    path: str | Path | None = None, finishes: bool = True, progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the fewest replicas that meet the SLO at `rate` requests/s, a row per policy.

    Parameters
    ----------
    base:
        Kind of arrivals, engine, router, targets, seed and number of replications.
    rate:
        Offered load; None: that of the arrivals.
    requests:
        Requests that arrive in a run.  None: all of a file, else enough to judge (15 times the
        95th percentile of latency, and per replica 200 or four times its batch, up to 3000).
    most:
        Most replicas to try.
    gpus, price:
        GPUs per replica (None: as many as share a model of `latency`), and dollars per hour and
        GPU.
    curve:
        True to find the highest rates of other numbers of replicas, too.
    executor, path, finishes, progress:
        Where simulations run, and a file (`ResultsFile`) of their results, after which the same
        plan continues.
    say:
        Called with a remark about each damaged line of that file.

    Returns
    -------
    rows
        See `simulator.capacity.plan_rows`.

    Raises
    ------
    DraftsimError
        For impossible values, if a run fails, or if the arrivals have no rate to change.
    """
    rate = base.arrivals.rate_of(requests) if rate is None else rate
    if rate is None:
        over_rates(base, [1.0])  # refuses arrivals that no rate can be given
        raise DraftsimError("the arrivals span no time: give --rate")
    if not 0 < rate < math.inf:
        raise DraftsimError(f"--rate is {rate}, expected a positive number of requests a second")
    if requests is not None:
        require("--requests", requests, 1)
    require("--max-replicas", most, 1)
    gpus = latency.gpus if gpus is None else gpus
    require("--gpus", gpus, 1)
    if gpus < latency.gpus:
        raise DraftsimError(
            f"--gpus is {gpus}, and {latency.gpus} GPUs share a model of these latencies: leave it "
            "out"
        )
    if price is not None and not 0 <= price < math.inf:
        raise DraftsimError(f"--price is {price}, expected dollars an hour, 0 or more")
    runner = PointRunner(trace, latency, policies, base, rule)
    whole_file = isinstance(base.arrivals, ArrivalFile) and requests is None
    key = runner.key() if path is not None else None
    file = None
    if path is not None:
        file = ResultsFile(path, command="capacity", key=key, say=say, finishes=finishes)
    # Searches ask in turn: a cluster is connected to once, not for every question.
    with file or nullcontext(), executor if isinstance(executor, Cluster) else nullcontext():
        study = Points(runner, executor, file, progress)
        asks = {name: partial(_points, name, base.replications) for name in policies}
        at_once = base.limits.max_batch
        starts = study.drive({name: find_start(ask, at_once) for name, ask in asks.items()})
        able = {name: found for name, found in starts.items() if found.limit}
        each = max((found.requests for found in able.values()), default=FEW)

        def horizon(replicas: int) -> int | None:
            return None if whole_file else requests or each * replicas

        answers = study.drive(
            {n: find_answer(asks[n], rate, able[n].limit, most, horizon) for n in able}
        )
        # Where a request alone is too slow, no number of replicas was tried.
        answers = {n: answers.get(n) or Answer(starts[n].alone, None) for n in policies}
        limits = [found.limit for found in able.values()]
        # Rates per replica around the highest that replicas sustain.
        rates = np.geomspace(0.3 * min(limits), 1.3 * max(limits), RATES).tolist() if able else []
        shares = study.drive({n: find_shares(asks[n], rates, each) for n in able})
        counts = _counts([found.replicas for found in answers.values()]) if curve else []
        curves = study.drive(
            {n: find_curve(asks[n], answers[n], rate, counts, horizon) for n in answers if curve}
        )
    return plan_rows(runner, rate, starts, answers, (rates, shares), curves, gpus, price)


def _points(
    policy: str, replications: int, replicas: int, rate: float, requests: int | None,
    most: int | None,
) -> list[Point]:  # fmt: skip
    count = replications if most is None else min(replications, most)
    return [Point(policy, replicas, rate, requests, i) for i in range(count)]


def _counts(found: Sequence[int | None]) -> list[int]:
    """Return numbers of replicas to draw lines through: powers of two, beyond the most found."""
    most = max((count for count in found if count is not None), default=1)
    return [1 << i for i in range(math.ceil(math.log2(most)) + 1)]
