"""Serve requests in simulated time: one scenario under any policies, with replications."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import simpy

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.guard import UndeclaredSignal
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from policies.together import Jointly, PerRequest, StopAtMean, Together, TruncateToMinimum
from simulator.pricing import HostCost
from simulator.serving.arrivals import Job
from simulator.serving.compiled.engine import CompiledServing, ServedLoad
from simulator.serving.cost import EngineCost
from simulator.serving.engine import EventEngine
from simulator.serving.outcome.metrics import RunRecorder, joined_recorders
from simulator.serving.outcome.report import Run, ServeResult, joined_runs
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.overlap import Dsi, Overlapped, Pearl
from simulator.serving.routers import Idle, Router
from simulator.serving.scenario import Mode, Scenario
from simulator.serving.scheduler import Continuous, StaticBatches
from simulator.serving.source import Replica, RequestSource, SimulatedClock
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.always import is_one_pass, passes_always
from traces.replay.run import fidelity_of, own_policy
from traces.replay.scores import prepared_rule

Policy = DraftPolicy | BatchPolicy
OVERLAPPED: Mapping[str, type[Overlapped]] = {"pearl": Pearl, "dsi": Dsi}


@dataclass(eq=False)
class Front:
    """Takes every request of a fleet and hands it to one of the replicas.

    Parameters
    ----------
    env:
        The clock that the replicas share.
    replicas, router, rng:
        Replicas, the router that chooses among them, and its random generator.
    marked:
        Indices of the requests whose arrival every replica records.
    """

    env: simpy.Environment
    replicas: Sequence[Replica]
    router: Router
    rng: np.random.Generator
    marked: Container[int] = ()

    def submit(self, job: Job) -> None:
        """Hand a request to the replica that the router chooses."""
        if job.number in self.marked:
            for replica in self.replicas:
                replica.recorder.mark(job.number, self.env.now, replica.emitted)
        self.replicas[self.router.choose(job.number, self.replicas, self.rng)].submit(job)

    def wake(self) -> None:
        """Wake every replica, so that it looks at its queue again."""
        for replica in self.replicas:
            replica.wake()


@dataclass(eq=False, kw_only=True)
class Station:
    """Builds the engines of a scenario under one policy, and runs them.

    Parameters
    ----------
    trace, latency, policy, scenario, rule:
        See `simulator.serving.run.simulate`.  Every engine has its own copies of policy and rule.
    name:
        Name of the policy.
    lookahead:
        The longest draft, for which slots are reserved.
    expected:
        Requests that will arrive at all replicas together.
    by_iteration:
        True: every iteration has an event of its own, even where the compiled loop would do.
    advance, audit:
        Called with the number of requests that have just left, and with every engine when a run
        ends.

    Raises
    ------
    DraftsimError
        If mode and policy do not fit.
    """

    trace: Trace
    latency: LatencyTable
    policy: Policy
    scenario: Scenario
    name: str
    lookahead: int
    expected: int
    rule: VerifyRule | None
    by_iteration: bool
    advance: Callable[[int], None]
    audit: Callable[[EventEngine], None] | None

    def __post_init__(self) -> None:
        check_mode(self.trace, self.latency, self.policy, self.scenario, self.rule)
        self.skip = int(self.scenario.warmup * self.expected)

    @property
    def marked(self) -> tuple[int, int]:
        """The requests whose arrivals are the ends of the measured window."""
        return self.skip, self.expected - 1

    def run(
        self,
        jobs: Iterator[Job],
        replicas: Sequence[int],
        rng: np.random.Generator,
        marks: Mapping[int, float] | None = None,
        timeline: Timeline | None = None,
    ) -> Run:
        """Serve `jobs` with these replicas of the fleet, on one clock.

        With more than one the scenario's router chooses, from `rng`.  `marks` are the times of
        the `marked` requests, for a replica that they may not arrive at.
        """
        began = time.perf_counter()
        scenario = self.scenario
        compiled = CompiledServing(
            self.trace, self.latency, self.policy, scenario, prepared_rule(self.rule, self.trace),
            self.lookahead, self.skip, self.expected, self.advance,
        )  # fmt: skip
        events = self.by_iteration or timeline is not None or self.audit is not None
        try:
            if compiled.serves and not events:
                served = compiled.run(jobs, replicas, rng, marks or {})
            else:
                served = self._by_events(jobs, replicas, rng, marks or {}, timeline)
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None
        recorders = served.recorders
        recorder = recorders[0] if len(recorders) == 1 else joined_recorders(recorders)
        status = f"stopped at max_time_s={scenario.max_time_s:g}" if served.cut else "complete"
        assumed = self._assumed()
        lossless = "rejection-sampling" if self.trace.temperature > 0 else "exact"
        return Run(
            self.name, scenario, lossless if self.rule is None else describe_rule(self.rule),
            self._fidelity(), recorder, served.coverage,
            [*served.unpriced, *([assumed] if assumed else [])], served.now_s,
            time.perf_counter() - began, status, served.residual_s, self.trace.source,
            len(recorders),
        )  # fmt: skip

    def _by_events(
        self, jobs: Iterator[Job], replicas: Sequence[int], rng: np.random.Generator,
        marks: Mapping[int, float], timeline: Timeline | None,
    ) -> ServedLoad:  # fmt: skip
        """Serve with an event for every iteration."""
        scenario, arrivals = self.scenario, self.scenario.arrivals
        env = SimulatedClock()
        source = RequestSource(
            env, jobs, arrivals.concurrency, arrivals.think_s, self.advance,
            max(marks.values(), default=0.0),
            HostCost(self.latency, reads=False).apart_s(arrivals.concurrency or 1),
        )  # fmt: skip
        engines = [
            self._engine(
                env, source, RunRecorder(self.skip, self.expected, replica=number),
                timeline if number == 0 else None,
            )
            for number in replicas
        ]  # fmt: skip
        alone = engines[0] if len(engines) == 1 else None
        server = alone or Front(env, engines, scenario.router, rng, self.marked)
        processes = [env.process(engine.run()) for engine in engines]
        ended = processes[0] if alone else env.all_of(processes)
        for index, at_s in marks.items():
            for engine in engines:
                env.at(at_s).callbacks.append(partial(_mark, engine, index, at_s))
        source.start(server)
        if scenario.max_time_s is None:
            env.run(until=ended)
        else:
            env.run(until=ended | env.timeout(scenario.max_time_s))
        for engine in engines:
            engine.recorder.enter(env.now, 0)
            if isinstance(engine, EventEngine):
                engine.recorder.length_changes = engine.together.changes
                if self.audit is not None:
                    self.audit(engine)
        return ServedLoad(
            [engine.recorder for engine in engines], [c for e in engines for c in e.coverage],
            engines[0].unpriced, env.now,
            sum(env.now - slot.arrival_s for engine in engines for slot in engine.unfinished),
            any(process.is_alive for process in processes),
        )  # fmt: skip

    def _engine(
        self, env: SimulatedClock, source: RequestSource, recorder: RunRecorder,
        timeline: Timeline | None,
    ) -> Replica:  # fmt: skip
        trace, latency, scenario, policy = self.trace, self.latency, self.scenario, self.policy
        if isinstance(policy, DraftPolicy) and scenario.one_stream:
            return OVERLAPPED[scenario.mode](
                env, trace, source, policy, latency, self.lookahead, recorder, scenario.devices,
                timeline,
            )  # fmt: skip
        kind = StaticBatches if scenario.mode.startswith("static") else Continuous
        cost = EngineCost(
            latency, bool(policy.reads), self.lookahead > 0 or scenario.drafter_loaded,
            scenario.passes, trace.takes_verified,
        )  # fmt: skip
        return EventEngine(
            env, trace, source, kind(scenario.limits, self.lookahead),
            _together(policy, scenario.mode), cost, recorder, timeline,
            prepared_rule(self.rule, trace),
        )  # fmt: skip

    def _fidelity(self) -> str:
        trace = self.trace
        # A file's lengths cut or repeat recordings; a lossy rule leaves them.
        if hasattr(self.scenario.arrivals, "rows"):
            return "approximate"
        if self._assumed() or (self.rule is not None and not self.rule.lossless):
            return "approximate"
        return fidelity_of(trace)

    def _assumed(self) -> str:
        """Return the assumptions, not measured, in the prices of a run's batches."""
        return self.latency.said_batch_free(self.scenario.largest_batch)


def _mark(engine: Replica, index: int, at_s: float, _: object = None) -> None:
    engine.recorder.mark(index, at_s, engine.emitted)


def _together(policy: Policy, mode: Mode) -> Together:
    if isinstance(policy, BatchPolicy):
        return Jointly(policy.fresh(), guarded=True)
    styles = {"static-minimum": TruncateToMinimum, "static-mean": StopAtMean}
    return styles.get(mode, PerRequest)(policy.for_run(), guarded=True)


def check_mode(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario,
    rule: VerifyRule | None,
) -> None:  # fmt: skip
    """Raise DraftsimError if the mode of `scenario` cannot serve these drafts or this policy."""
    mode, batched = scenario.mode, isinstance(policy, BatchPolicy)
    if not scenario.one_stream:
        if batched and mode in ("static-minimum", "static-mean"):
            raise DraftsimError(
                f"--mode {mode} synchronises policies per request; a batch policy decides for the "
                "whole batch itself: use --mode static"
            )
        return
    if "drafts" in trace.meta:
        raise DraftsimError(
            f"--mode {mode} drafts while the target verifies, and {trace.source} needs verified "
            "features to draft: use a recording of a draft model, or another --mode"
        )
    if passes_always(latency):
        raise DraftsimError(
            f"--mode {mode} has no rounds, so no drafter runs in every round: drop --always-draft"
        )
    if is_one_pass(latency):
        raise DraftsimError(
            f"--mode {mode} drafts pass by pass, and this drafter drafts in one: drop --one-pass"
        )
    if prepared_rule(rule, trace) is not None:
        raise DraftsimError(f"--mode {mode} replays recorded verdicts: drop --verify")
    if batched:
        raise DraftsimError(f"--mode {mode} serves one stream: give a --policy per request")


def lookahead_of(policy: Policy, trace: Trace) -> int:
    """Return the longest draft `policy` may make: its own bound, or else the recording's.

    Raises
    ------
    DraftsimError
        If neither does.
    """
    own = policy.longest_draft()
    bound = trace.max_gamma if own is None else own
    if bound is None:
        raise DraftsimError(
            f"{type(policy).__name__} sets no longest draft (gamma_max) and neither does the "
            "trace: set Limits.lookahead"
        )
    return bound


def simulate(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario, *,
    name: str | None = None, rule: VerifyRule | None = None, replication: int = 0,
    timeline: Timeline | None = None, audit: Callable[[EventEngine], None] | None = None,
    advance: Callable[[int], None] = lambda _: None, by_iteration: bool = False,
    only: Sequence[int] | None = None,
) -> Run:  # fmt: skip
    """Return one replication of `scenario` under `policy`.

    `rule` decides what is accepted; by default the recorded verdicts do.  One copy serves
    all requests of an engine, as in `traces.replay.run.replay`; overlapped modes take none.
    `timeline` is of the first replica.  `audit` is called with every engine at the end of a run
    of continuous or static batches, `advance` with the number of requests that have just left.
    `by_iteration`, `timeline` and `audit` give every iteration an event of its own even where the
    compiled loop would serve: slower, and the same to rounding.  `only` runs some of the replicas,
    where they know nothing of each other (`Scenario.splits`):
    `simulator.serving.outcome.report.joined_runs` puts the runs of all together.

    Raises
    ------
    SignalError, TailError, UndeclaredSignal
        If the trace lacks what the policy reads, or the policy does not declare it.
    DraftsimError
        If mode and policy do not fit, or the latency table lacks a model that must run.
    """
    trace.check_reads(policy.reads, type(policy).__name__)
    # Named before it is told what the recording supplies.
    name = name or describe(policy)
    if isinstance(policy, DraftPolicy):
        policy = own_policy(trace, policy)
    seeds = [scenario.seed, replication]
    rng, choosing = (np.random.default_rng(np.random.SeedSequence(s)) for s in (seeds, [*seeds, 1]))
    jobs = scenario.arrivals.jobs(trace, rng, scenario.requests)
    expected = scenario.requests
    if expected is None or hasattr(scenario.arrivals, "rows"):
        listed = list(jobs)
        expected, jobs = len(listed), iter(listed)
    jobs = (Job(*job[:4], i) for i, job in enumerate(jobs))
    station = Station(
        trace=trace, latency=latency, policy=policy, scenario=scenario, name=name,
        lookahead=_longest_draft(policy, trace, scenario), expected=expected, rule=rule,
        by_iteration=by_iteration, advance=advance, audit=audit,
    )  # fmt: skip
    replicas = range(scenario.replicas) if only is None else only
    if not scenario.splits:
        return station.run(jobs, replicas, choosing, timeline=timeline)
    shares, marks = _shares(scenario, jobs, replicas, station.marked, choosing)
    return joined_runs(
        [station.run(iter(shares[i]), [i], choosing, marks, timeline) for i in replicas]
    )


def _longest_draft(policy: Policy, trace: Trace, scenario: Scenario) -> int:
    if scenario.limits.lookahead is not None:
        return scenario.limits.lookahead
    lookahead = lookahead_of(policy, trace)
    if scenario.mode == "pearl" and policy.reads and trace.max_gamma is not None:
        # A block is drafted after another, still unverified one: both must be recorded.
        lookahead = min(lookahead, max(trace.max_gamma // 2, 1))
    return lookahead


def _shares(
    scenario: Scenario, jobs: Iterator[Job], replicas: Sequence[int], marked: Sequence[int],
    rng: np.random.Generator,
) -> tuple[dict[int, list[Job]], dict[int, float]]:  # fmt: skip
    """Return the requests of each of `replicas`, and when the `marked` ones arrive anywhere."""
    shares: dict[int, list[Job]] = {replica: [] for replica in replicas}
    marks: dict[int, float] = {}
    choose, unseen = scenario.router.choose, [Idle()] * scenario.replicas
    for job in jobs:
        if job.number in marked:
            marks[job.number] = job.arrival_s
        replica = choose(job.number, unseen, rng)
        if replica in shares:
            shares[replica].append(job)
    return shares, marks


def serve(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Policy], scenario: Scenario, *,
    rule: VerifyRule | None = None,
) -> ServeResult:  # fmt: skip
    """Serve `scenario` under every policy, replication by replication."""
    return ServeResult(
        scenario,
        {
            name: [
                simulate(trace, latency, policy, scenario, name=name, rule=rule, replication=i)
                for i in range(scenario.replications)
            ]
            for name, policy in policies.items()
        },
    )
