"""What the engines of a run have in common, and a run of one or more of them on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from policies.batch.base import BatchPolicy, planned_of
from policies.core import DraftPolicy
from policies.guard import UndeclaredSignal
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from simulator.serving.arrivals import Job
from simulator.serving.clock import Clock
from simulator.serving.compiled.when import compiles
from simulator.serving.cost.host import HostCost
from simulator.serving.cost.iteration import IterationCost
from simulator.serving.engine import Engine
from simulator.serving.fleet.front import Front
from simulator.serving.fleet.join import joined_recorders
from simulator.serving.outcome.metrics import Recorder
from simulator.serving.outcome.report import Run
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.overlap.base import Overlapped
from simulator.serving.overlap.dsi import Dsi
from simulator.serving.overlap.pearl import Pearl
from simulator.serving.replica import Replica
from simulator.serving.scenario import Mode, Scenario
from simulator.serving.scheduler import Continuous, StaticBatches
from simulator.serving.source import Source
from simulator.serving.spans import (
    LoopEngine,
    PlannedEngine,
    PlannedLoopEngine,
    SpanEngine,
    clock_free,
    keeps_no_clock,
    planned_rounds,
    replays_of,
)
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
from traces.replay.run import fidelity_of
from traces.replay.scores import prepared_rule

Policy = DraftPolicy | BatchPolicy
OVERLAPPED: Mapping[str, type[Overlapped]] = {"pearl": Pearl, "dsi": Dsi}


class Station:
    """Builds the engines of a scenario under one policy, and runs them.

    Parameters
    ----------
    trace, latency, policy, scenario, rule:
        Of `simulator.serving.run.simulate`.  Every engine has its own copies of policy and rule.
    name:
        Of the policy.
    lookahead:
        The longest draft, for which slots are reserved.
    expected:
        Requests that will arrive at all replicas together.
    by_iteration:
        Whether every iteration has an event of its own even where spans would do.
    advance, audit:
        Called with the number of requests that have just left, and with every engine when a run
        ends.
    of_many:
        Whether this is one of hundreds of runs.

    Raises
    ------
    DraftsimError
        If mode and policy do not fit.
    """

    def __init__(
        self,
        trace: Trace,
        latency: LatencyTable,
        policy: Policy,
        scenario: Scenario,
        *,
        name: str,
        lookahead: int,
        expected: int,
        rule: VerifyRule | None = None,
        by_iteration: bool = False,
        advance: Callable[[int], None] = lambda _: None,
        audit: Callable[[Engine], None] | None = None,
        of_many: bool = False,
    ) -> None:
        self.trace, self.latency, self.scenario, self.rule = trace, latency, scenario, rule
        self.name, self.policy = name, policy
        self.by_iteration, self.of_many = by_iteration, of_many
        self.advance, self.audit = advance, audit
        self.expected, self.skip = expected, int(scenario.warmup * expected)
        self.lookahead = lookahead
        if scenario.mode in OVERLAPPED:
            if prepared_rule(rule, trace) is not None:
                raise DraftsimError(
                    f"mode {scenario.mode!r} replays recorded verdicts: give no rule"
                )
            if not isinstance(policy, DraftPolicy):
                raise DraftsimError(
                    f"mode {scenario.mode!r} serves one stream: give a policy per request"
                )

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
        """These replicas of the fleet serve `jobs` on one clock.

        With more than one the scenario's router chooses, from `rng`.  `marks` are the times of
        the `marked` requests, for a replica that they may not arrive at.
        """
        began = time.perf_counter()
        scenario, arrivals = self.scenario, self.scenario.arrivals
        env = Clock()
        marks = marks or {}
        source = Source(
            env, jobs, arrivals.concurrency, arrivals.think_s, self.advance,
            max(marks.values(), default=0.0),
            HostCost(self.latency, reads=False).apart_s(arrivals.concurrency or 1),
        )  # fmt: skip
        engines = [
            self._engine(
                env, source, Recorder(self.skip, self.expected, replica=number),
                timeline if number == 0 else None, marks,
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
        status = "complete"
        try:
            source.start(server)
            if scenario.max_time_s is None:
                env.run(until=ended)
            else:
                env.run(until=ended | env.timeout(scenario.max_time_s))
                if any(process.is_alive for process in processes):
                    status = f"stopped at max_time_s={scenario.max_time_s:g}"
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None
        for engine in engines:
            if isinstance(engine, Engine):
                engine.catch_up()
                engine.recorder.length_changes = engine.speculation.changes
            engine.recorder.enter(env.now, 0)
            if self.audit is not None and isinstance(engine, Engine):
                engine.settle()
                self.audit(engine)
        recorders = [engine.recorder for engine in engines]
        recorder = recorders[0] if alone else joined_recorders(recorders)
        if scenario.max_tokens is not None and recorder.tokens >= scenario.max_tokens:
            status = f"stopped at max_tokens={scenario.max_tokens}"
        residual_s = sum(env.now - s.arrival_s for engine in engines for s in engine.unfinished)
        lossless = "rejection-sampling" if self.trace.temperature > 0 else "exact"
        return Run(
            self.name, scenario, lossless if self.rule is None else describe_rule(self.rule),
            self._fidelity(), recorder, [c for engine in engines for c in engine.coverage],
            self._unpriced(engines), env.now, time.perf_counter() - began, status, residual_s,
            self.trace.source, len(engines),
        )  # fmt: skip

    def _engine(
        self, env: Clock, source: Source, recorder: Recorder, timeline: Timeline | None,
        marks: Mapping[int, float],
    ) -> Replica:  # fmt: skip
        trace, latency, scenario, policy = self.trace, self.latency, self.scenario, self.policy
        if isinstance(policy, DraftPolicy) and scenario.mode in OVERLAPPED:
            return OVERLAPPED[scenario.mode](
                env, trace, source, policy, latency, self.lookahead, recorder, scenario.devices,
                timeline, scenario.max_tokens,
            )  # fmt: skip
        rule = prepared_rule(self.rule, trace)
        kind = Continuous if scenario.mode == "continuous" else StaticBatches
        cost = IterationCost(
            latency, bool(policy.reads), self.lookahead > 0 or scenario.drafter_loaded,
            scenario.draft_batch, scenario.passes,
        )  # fmt: skip
        speculation = _speculation(policy, scenario.mode)
        parts = (
            env, trace, source, kind(scenario.limits, self.lookahead), speculation, cost,
            recorder, timeline, scenario.max_tokens, rule,
        )  # fmt: skip
        if not cost.by_totals or timeline is not None or self.by_iteration:
            return Engine(*parts)
        clockless = keeps_no_clock(scenario, latency)
        if isinstance(policy, BatchPolicy):
            if rule is not None or planned_of(policy, 1) is None:
                return Engine(*parts)
            replays = planned_rounds(trace, self.lookahead)
            planned = PlannedLoopEngine if clockless else PlannedEngine
            return planned(*parts, policy=policy, replays=replays)
        if type(speculation) is PerRequest and clock_free(policy, rule):
            replayed = replays_of(trace, policy, rule, self.lookahead)
            many = self.expected, self.of_many
            if self.audit is None and compiles(scenario, latency, *many):
                # Loads the compiler.
                from simulator.serving.compiled.engine import CompiledEngine

                return CompiledEngine(*parts, replays=replayed, marks=marks)
            spans = LoopEngine if clockless else SpanEngine
            return spans(*parts, replays=replayed)
        return Engine(*parts)

    def _unpriced(self, engines: Sequence[Replica]) -> list[str]:
        assumed = self._assumed()
        costs = [engine.cost.unpriced for engine in engines if isinstance(engine, Engine)]
        return [*costs[0], *([assumed] if assumed else [])] if costs else []

    def _fidelity(self) -> str:
        trace = self.trace
        # A file's lengths cut or repeat recordings; a lossy rule leaves them.
        if hasattr(self.scenario.arrivals, "rows"):
            return "approximate"
        if self._assumed() or (self.rule is not None and not self.rule.lossless):
            return "approximate"
        return fidelity_of(trace)

    def _assumed(self) -> str:
        """What the seconds of a run's batches rest on that nobody measured."""
        one_stream = self.scenario.mode in OVERLAPPED
        return self.latency.said_batch_free(
            1 if one_stream else self.scenario.limits.max_batch or 1
        )


def _mark(engine: Replica, index: int, at_s: float, _: object = None) -> None:
    engine.recorder.mark(index, at_s, engine.emitted)


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
