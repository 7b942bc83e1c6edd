"""Serve requests in simulated time: one scenario under any policies, with replications."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np

from policies.basic import Autoregressive
from policies.batch.base import BatchPolicy, SingleStream
from policies.core import DraftPolicy
from policies.guard import UndeclaredSignal
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from simulator.serving.clock import Clock
from simulator.serving.cost.iteration import IterationCost
from simulator.serving.engine import Engine
from simulator.serving.outcome.metrics import Recorder
from simulator.serving.outcome.report import Run, ServeResult
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.overlap.base import Overlapped
from simulator.serving.overlap.dsi import Dsi
from simulator.serving.overlap.pearl import Pearl
from simulator.serving.scenario import Mode, Scenario
from simulator.serving.scheduler import Continuous, StaticBatches
from simulator.serving.source import Source
from simulator.serving.spans import SpanEngine, clock_free, replays_of
from simulator.serving.speculation import (
    Jointly,
    PerRequest,
    Speculation,
    StopAtMean,
    TruncateToMinimum,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.decoder import own_policy
from traces.replay.scores import prepared_rule

Policy = DraftPolicy | BatchPolicy
OVERLAPPED: Mapping[str, type[Overlapped]] = {"pearl": Pearl, "dsi": Dsi}


def lookahead_of(policy: Policy, trace: Trace) -> int:
    """The longest draft `policy` may make, as its parameters or else the recording bound it.

    Raises
    ------
    DraftsimError
        If neither does.
    """
    if isinstance(policy, Autoregressive):
        return 0
    if isinstance(policy, SingleStream):
        return lookahead_of(policy.policy, trace)
    names = ("longest", "gamma_max", "gamma")
    bound = next((v for n in names if (v := getattr(policy, n, None)) is not None), None)
    if arms := getattr(policy, "gammas", None):
        bound = max(arms)
    if bound is None:
        bound = trace.max_gamma
    if bound is None:
        raise DraftsimError(
            f"{type(policy).__name__} names no longest draft and neither does the trace: "
            "set Limits.lookahead"
        )
    return int(bound)


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
    advance: Callable[[], None] = lambda: None,
    by_iteration: bool = False,
) -> Run:
    """One replication of `scenario` under `policy`.

    `rule` decides what is accepted; by default the recorded verdicts do.  One copy serves
    all requests, as in `traces.replay.decoder.replay`; overlapped modes take none.  `audit` is
    called with the engine at the end of a run of continuous or static batches, `advance`
    whenever a request leaves.  `by_iteration` gives every iteration an event of its own even
    where the iterations of a span could be priced together: slower, and the same to rounding.

    Raises
    ------
    SignalError, TailError, UndeclaredSignal
        If the trace lacks what the policy reads, or the policy does not declare it.
    DraftsimError
        If mode and policy do not fit, or the latency table lacks a model that must run.
    """
    began = time.perf_counter()
    trace.check_reads(policy.reads, type(policy).__name__)
    own_rule = prepared_rule(rule, trace)
    if isinstance(policy, DraftPolicy):
        # Named before it is told what the recording supplies.
        name = name or describe(policy)
        policy = own_policy(trace, policy)
    lookahead = scenario.limits.lookahead
    if lookahead is None:
        lookahead = lookahead_of(policy, trace)
        if scenario.mode == "pearl" and policy.reads and trace.max_gamma is not None:
            # A block is drafted behind another, still unverified one: both must be recorded.
            lookahead = min(lookahead, max(trace.max_gamma // 2, 1))
    rng = np.random.default_rng(np.random.SeedSequence([scenario.seed, replication]))
    jobs = scenario.arrivals.jobs(trace, rng, scenario.requests)
    expected = scenario.requests
    if expected is None or hasattr(scenario.arrivals, "rows"):
        listed = list(jobs)
        expected, jobs = len(listed), iter(listed)
    env = Clock()
    source = Source(env, jobs, scenario.arrivals.concurrency, scenario.arrivals.think_s, advance)
    recorder = Recorder(skip=int(scenario.warmup * expected), expected=expected)
    server: Engine | Overlapped
    unpriced: list[str] = []
    if scenario.mode in OVERLAPPED:
        if own_rule is not None:
            raise DraftsimError(f"mode {scenario.mode!r} replays recorded verdicts: give no rule")
        if not isinstance(policy, DraftPolicy):
            raise DraftsimError(
                f"mode {scenario.mode!r} serves one stream: give a policy per request"
            )
        server = OVERLAPPED[scenario.mode](
            env, trace, source, policy, latency, lookahead, recorder, scenario.devices, timeline,
            scenario.max_tokens,
        )  # fmt: skip
    else:
        kind = Continuous if scenario.mode == "continuous" else StaticBatches
        cost = IterationCost(
            latency,
            bool(policy.reads),
            lookahead > 0 or scenario.drafter_loaded,
            scenario.draft_batch,
            scenario.passes,
        )
        assumed = _assumed(scenario, latency)
        unpriced = [*cost.unpriced, *([assumed] if assumed else [])]
        speculation = _speculation(policy, scenario.mode)
        parts = (
            env, trace, source, kind(scenario.limits, lookahead), speculation, cost, recorder,
            timeline, scenario.max_tokens, own_rule,
        )  # fmt: skip
        if (
            isinstance(policy, DraftPolicy) and type(speculation) is PerRequest
            and clock_free(policy, own_rule)
            and cost.by_totals and timeline is None and not by_iteration
        ):  # fmt: skip
            server = SpanEngine(*parts, replays=replays_of(trace, policy, own_rule, lookahead))
        else:
            server = Engine(*parts)
    process = env.process(server.run())
    status = "complete"
    try:
        source.start(server)
        if scenario.max_time_s is None:
            env.run(until=process)
        else:
            env.run(until=process | env.timeout(scenario.max_time_s))
            if process.is_alive:
                status = f"stopped at max_time_s={scenario.max_time_s:g}"
    except UndeclaredSignal as error:
        raise error.by(policy) from None
    if scenario.max_tokens is not None and recorder.tokens >= scenario.max_tokens:
        status = f"stopped at max_tokens={scenario.max_tokens}"
    recorder.enter(env.now, 0)
    if isinstance(server, Engine):
        recorder.length_changes = server.speculation.changes
    stuck = list(server.waiting if isinstance(server, Overlapped) else
                 chain(server.scheduler.waiting, server.scheduler.running))  # fmt: skip
    residual_s = sum(env.now - slot.arrival_s for slot in stuck)
    if audit is not None and isinstance(server, Engine):
        server.settle()
        audit(server)
    lossless = "rejection-sampling" if trace.temperature > 0 else "exact"
    return Run(
        name or describe(policy), scenario,
        lossless if rule is None else describe_rule(rule),
        _fidelity(scenario, trace, rule, latency), recorder,
        server.coverage if isinstance(server, Overlapped) else server.cost.coverage, unpriced,
        env.now, time.perf_counter() - began, status, residual_s, trace.source,
    )  # fmt: skip


def _speculation(policy: Policy, mode: Mode) -> Speculation:
    if isinstance(policy, BatchPolicy):
        if mode in ("static-minimum", "static-mean"):
            raise DraftsimError(
                f"mode {mode!r} synchronises policies per request; a batch policy decides for the "
                "whole batch itself: use mode 'static'"
            )
        return Jointly(policy)
    styles = {"static-minimum": TruncateToMinimum, "static-mean": StopAtMean}
    return styles.get(mode, PerRequest)(policy)


def _fidelity(
    scenario: Scenario, trace: Trace, rule: VerifyRule | None, latency: LatencyTable
) -> str:
    # A file's lengths cut or repeat recordings; a lossy rule leaves them.
    if hasattr(scenario.arrivals, "rows") or (rule is not None and not rule.lossless):
        return "approximate"
    if _assumed(scenario, latency):
        return "approximate"
    if "imputed" in trace.meta or trace.meta.get("fidelity") == "approximate":
        return "approximate"
    return "exact in distribution" if trace.temperature > 0 else "exact"


def _assumed(scenario: Scenario, latency: LatencyTable) -> str:
    """What the seconds of a run's batches rest on that nobody measured."""
    return latency.said_batch_free(
        1 if scenario.mode in OVERLAPPED else scenario.limits.max_batch or 1
    )


def serve(
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, Policy],
    scenario: Scenario,
    *,
    rule: VerifyRule | None = None,
    progress: Callable[[str, int], None] | None = None,
    timeline: Timeline | None = None,
    advance: Callable[[], None] = lambda: None,
) -> ServeResult:
    """Serve `scenario` under every policy, replication by replication.

    `progress` is called with the policy's name and the replication before each run;
    `timeline` records the first run; `advance` is called whenever a request leaves.
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
