"""Serve requests in simulated time: one scenario under any policies, with replications."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from policies.core import DraftPolicy
from policies.registry import describe
from policies.rules.base import VerifyRule
from simulator.serving.arrivals import Job
from simulator.serving.engine import Engine
from simulator.serving.outcome.report import Run, ServeResult, joined_runs
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.routers import Idle
from simulator.serving.scenario import Scenario
from simulator.serving.station import Policy, Station
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import own_policy


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
    trace: Trace,
    latency: LatencyTable,
    policy: Policy,
    scenario: Scenario,
    *,
    name: str | None = None,
    rule: VerifyRule | None = None,
    replication: int = 0,
    timeline: Timeline | None = None,
    audit: Callable[[Engine], None] | None = None,
    advance: Callable[[int], None] = lambda _: None,
    by_iteration: bool = False,
    only: Sequence[int] | None = None,
) -> Run:
    """One replication of `scenario` under `policy`.

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
        trace, latency, policy, scenario, name=name, expected=expected, rule=rule,
        lookahead=_longest_draft(policy, trace, scenario), by_iteration=by_iteration,
        advance=advance, audit=audit,
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
    scenario: Scenario,
    jobs: Iterator[Job],
    replicas: Sequence[int],
    marked: Sequence[int],
    rng: np.random.Generator,
) -> tuple[dict[int, list[Job]], dict[int, float]]:
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
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, Policy],
    scenario: Scenario,
    *,
    rule: VerifyRule | None = None,
    progress: Callable[[str, int], None] | None = None,
    timeline: Timeline | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> ServeResult:
    """Serve `scenario` under every policy, replication by replication.

    `progress` is called with the policy's name and the replication before each run;
    `timeline` records the first run; `advance` is called with the
    number of requests that have just left.
    """
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    for replication in range(scenario.replications):
        for name, policy in policies.items():
            if progress is not None:
                progress(name, replication)
            run = simulate(
                trace, latency, policy, scenario, name=name, rule=rule, replication=replication,
                timeline=timeline, advance=advance,
            )  # fmt: skip
            timeline = None
            runs[name].append(run)
    return ServeResult(scenario, runs)
