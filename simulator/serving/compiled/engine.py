"""The compiled loop as a run: requests in, records out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from threading import Timer
from typing import Any, NamedTuple

import numpy as np

from policies.batch.base import BatchPolicy, Planned, Policy, planned_of
from policies.core import DraftPolicy, speculate
from policies.lengths.basic import Fixed
from policies.rules.base import VerifyRule
from policies.vectorised import plan_of
from simulator.pricing import extras_of, rule_phase, scalar_seconds
from simulator.serving.arrivals import Job
from simulator.serving.compiled import arrays
from simulator.serving.cost import (
    COMPOSED,
    LATER,
    ORIGINS,
    PLACES,
    TARGET,
    Coverage,
    EngineCost,
    covered,
)
from simulator.serving.outcome.metrics import COUNTS, CutOff, RunRecorder, Series
from simulator.serving.routers import ReplicaLoad
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Continuous, Scheduler, StaticBatches
from simulator.serving.sequence import (
    NO_ROUNDS,
    EngineState,
    Replays,
    ServedSequence,
    clock_free,
    replays_of,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import SERVER, LatencyTable
from traces.replay.ruled import prepared_rule

LISTED = 4096
"""Requests of a bounded run that are listed first; each time as many more as there are already."""
PATIENCE_S = 1.5
"""Seconds after which a run says that it compiles: loading what is compiled takes less."""


class ServedLoad(NamedTuple):
    """The work that the replicas of a run did."""

    recorders: list[RunRecorder]
    coverage: list[Coverage]
    unpriced: list[str]
    now_s: float
    cut_off: CutOff
    cut: bool
    """True if the bound of time ended the run."""


def lengths_of(policy: Policy, rule: VerifyRule | None, most: int) -> list[Planned] | None:
    """Return the draft lengths of `policy` by the number of requests, from 0 to `most`.

    None if anything else than that number decides.
    """
    if rule is not None:
        return None
    if isinstance(policy, BatchPolicy):
        planned = [planned_of(policy, n) for n in (1, *range(1, most + 1))]
        told = [p for p in planned if p is not None]
        return told if len(told) == len(planned) else None
    plan = plan_of(policy) if clock_free(policy, None) else None
    if plan is None or plan.stop or plan.state or plan.watch:
        return None
    return [Planned(plan.cap, plan.cap)] * (most + 1)


@dataclass(frozen=True, eq=False)
class Serving:
    """A scenario under one policy: its engines, and the compiled loop if its rounds need no clock.

    Parameters
    ----------
    trace, latency, policy, scenario, rule:
        The arguments of `simulator.serving.run.simulate`.  Every engine has its own copies of
        policy and rule.
    lookahead:
        The longest draft, for which slots are reserved.
    expected:
        Requests that will arrive at all replicas together.
    advance:
        Called with the number of requests that have just left.
    rng:
        Generator of the scenario's router.
    """

    trace: Trace
    latency: LatencyTable
    policy: Policy
    scenario: Scenario
    rule: VerifyRule | None
    lookahead: int
    expected: int
    advance: Callable[[int], None]
    rng: np.random.Generator

    @property
    def skip(self) -> int:
        """Requests that statistics leave out: the warm-up, and those that fill a closed loop."""
        warmup, clients = self.scenario.warmup, self.scenario.arrivals.concurrency or 0
        # The first of all clients come at once, and the second still in bunches.
        filling = min(2 * clients, self.expected // 2)
        return max(int(warmup * self.expected), filling) if warmup else 0

    @property
    def marked(self) -> tuple[int, int]:
        """The requests whose arrivals are the ends of the measured window."""
        return self.skip, self.expected - 1

    @property
    def most(self) -> int:
        """Requests that may run at a time."""
        own = self.scenario.limits.max_batch
        return max(min(own, self.expected, self.scenario.arrivals.concurrency or own), 1)

    @property
    def apart_s(self) -> float:
        """Seconds between the first requests of a closed loop at a server's engine."""
        clients = self.scenario.arrivals.concurrency
        return scalar_seconds(self.latency, SERVER, "apart", clients or 1)

    def cost(self) -> EngineCost:
        """Return the prices of an engine."""
        scenario = self.scenario
        speculates = self.lookahead > 0 or scenario.drafter_loaded
        # An engine without drafts has none to judge.
        judges = self.lossy is not None and self.lookahead > 0
        judging = rule_phase(self.lossy) if judges else None
        extras = extras_of(self.policy.reads, judging, self.trace.sampling)
        return EngineCost(self.latency, extras, speculates, scenario.passes, self.lookahead)

    def scheduler(self) -> Scheduler:
        """Return the scheduler of an engine."""
        kind = StaticBatches if self.scenario.mode.startswith("static") else Continuous
        return kind(self.scenario.limits, self.lookahead)

    @property
    def lossy(self) -> VerifyRule | None:
        """The rule, if it is lossy; else the recorded verdicts decide."""
        return None if self.rule is None or self.rule.lossless else self.rule

    @cached_property
    def lengths(self) -> list[Planned] | None:
        """Draft lengths by the number of requests, where that decides (`lengths_of`)."""
        return lengths_of(self.policy, self.lossy, self.most)

    @property
    def serves(self) -> bool:
        """True if the loop can serve the scenario: nothing but requests and totals decides.

        Policies that look at the load or learn, modes that synchronise or overlap, and costs of
        single sequences need events (`simulator.serving.run`).
        """
        scenario = self.scenario
        return (
            scenario.mode in ("continuous", "static")
            and scenario.passes == "ragged"
            and (
                self.lengths is not None
                or (isinstance(self.policy, DraftPolicy) and clock_free(self.policy, self.lossy))
            )
        )  # fmt: skip


class CompiledRun:
    """A run of the compiled loop; the arguments are those of `simulator.serving.run.served_by`."""

    def __init__(
        self, serving: Serving, jobs: Iterator[Job], replicas: Sequence[int],
        marks: Mapping[int, float],
    ) -> None:  # fmt: skip
        self._of, self._more, self._replicas = serving, jobs, replicas
        self._scheduler, self._cost = serving.scheduler(), serving.cost()
        self._jobs: list[Job] = []
        self._advanced = 0
        self._lengths = serving.lengths
        self._replays: Replays | None = None
        rule = prepared_rule(serving.rule, serving.trace)
        if self._lengths is None:
            assert isinstance(serving.policy, DraftPolicy)
            self._replays = replays_of(serving.trace, serving.policy, rule, serving.lookahead)
        self._marks = _marks(marks, serving.marked)
        self._engine = self._arrays(max(marks.values(), default=0.0))
        self._list()

    def run(self) -> ServedLoad:
        """Run the loop, and answer it where it asks.

        Raises DraftsimError if a draft leaves the recording, sizes are read that were never varied,
        or no request can run.
        """
        from simulator.serving.compiled import loop  # loads the compiler

        engine, clock, latency = self._engine, self._engine.clock[0], self._of.latency
        while True:
            why, about = _patiently(loop.run, engine)
            self._of.advance(int(clock.gone) - self._advanced)
            self._advanced = int(clock.gone)
            if why == loop.MORE:
                self._list()
                engine = self._engine
            elif why == loop.ROUTE:
                engine.requests.replica[about] = self._chosen(int(engine.requests.number[about]))
            elif why != loop.PAUSE:
                break
        seen = engine.seen
        for place, model in ((LATER, "draft"), (TARGET, "target")):
            own = seen[:, place]
            if own.passes.any():
                for end, of in (("least", np.min), ("most", np.max)):
                    latency.check_sizes(
                        model, "forward", of(own[f"{end}_batch"]), of(own[f"{end}_width"])
                    )
        if why == loop.LOST:
            self._raise_lost(about)
        if why == loop.STUCK:
            raise DraftsimError("the scheduler found nothing to run with requests waiting")
        return self._served(float(clock.now), why == loop.CUT)

    # --- in ----------------------------------------------------------------------------

    def _arrays(self, open_until_s: float) -> arrays.Arrays:
        serving, zeros = self._of, arrays.zeros
        scenario, most, count = serving.scenario, serving.most, len(self._replicas)
        limits, arrivals = scenario.limits, scenario.arrivals
        clients = arrivals.concurrency
        clock = zeros(arrays.CLOCK, 1)
        clock.comes_s = arrays.NOBODY if clients is None else np.inf
        clock.active, clock.alive, clock.order = arrays.NOBODY, count, count
        thinking = zeros(arrays.THINK, clients or 1)
        if clients is not None:
            later = clients - 1 if serving.apart_s > 0 else 0
            clock.wanted = clients - later
            thinking.at_s[:later] = serving.apart_s * np.arange(1, later + 1)
            thinking.order[:later] = np.arange(count + 1, count + later + 1)
            clock.think_count = later
            clock.order += later
        states = zeros(arrays.REPLICA, count)
        states.idle, states.order, states.verified = True, np.arange(count), -1
        states.head = states.tail = arrays.NOBODY
        for name in ("batch", "kv_blocks"):
            states[name]["interval_s"] = Series().interval_s
        planned = self._lengths is not None
        return arrays.Arrays(
            arrays.LoopLimits(
                limits.max_batch, limits.token_budget, limits.kv_blocks or 0, limits.block_size,
                limits.async_scheduling, serving.lookahead, scenario.mode == "static",
                clients is not None, float(arrivals.think_s),
                np.inf if scenario.max_time_s is None else float(scenario.max_time_s),
                float(open_until_s), serving.trace.takes_verified, planned,
            ),
            arrays.prices_of(self._cost, most),
            np.array(self._lengths or [], arrays.LENGTH).view(np.recarray),
            arrays.starts_of(serving.trace) if planned else zeros(arrays.START, 0),
            NO_ROUNDS, zeros(arrays.REQUEST, 0), np.empty(0, np.int64), thinking, clock,
            self._marks, np.zeros((len(self._marks), count), np.int64), states,
            zeros(arrays.SEAT, count, most),
            zeros(arrays.FREE, count, (limits.kv_blocks or 0) + 4),
            np.zeros((count, 2, arrays.POINTS)), arrays.nothing_seen(count),
            np.zeros((count, arrays.BINS), np.int64),
        )  # fmt: skip

    def _list(self) -> None:
        """List more requests: all of them, or of a bounded run as many as may be needed soon."""
        serving, engine = self._of, self._engine
        scenario = serving.scenario
        size = None if scenario.max_time_s is None else max(len(self._jobs), LISTED)
        new = list(islice(self._more, size))
        engine.clock.listed = size is None or len(new) < size
        self._jobs += new
        router, count = scenario.router, len(self._replicas)
        chosen: Any = 0
        if count > 1:
            chosen = -1
            if not router.reads_load and new:
                unseen = [ReplicaLoad()] * count
                chosen = [router.choose(job.number, unseen, serving.rng) for job in new]
        requests = arrays.requests_of(self._scheduler, serving.trace, new, serving.skip, chosen)
        if len(engine.requests):
            requests = np.concatenate([engine.requests, requests]).view(np.recarray)
        rounds = engine.rounds
        if self._replays is not None:
            rounds, requests["first"] = self._replays.flat(self._jobs)
        else:
            requests["first"] = np.asarray(serving.trace.request_starts)[requests.sequence]
        left = np.zeros(len(requests), np.int64)
        left[: len(engine.left)] = engine.left
        self._engine = engine._replace(requests=requests, rounds=rounds, left=left)

    def _chosen(self, number: int) -> int:
        states = self._engine.replicas
        held = (states.carried + states.tokens).tolist()
        loads = list(map(ReplicaLoad, states.in_system.tolist(), held))
        return self._of.scenario.router.choose(number, loads, self._of.rng)

    # --- out ---------------------------------------------------------------------------

    def _raise_lost(self, slot: int) -> None:
        """Raise the replay's own error of why it cannot go on."""
        engine, serving = self._engine, self._of
        request, job = engine.requests[slot], self._jobs[slot]
        state = engine.replicas[request.replica]
        assert self._lengths is not None
        served = ServedSequence(serving.trace, job, serving.lookahead, EngineState())
        while served.position < request.tokens:
            served.commit(int(request.tokens) - served.position - 1)
        next(speculate(served, Fixed(int(self._lengths[state.asked].passes))))

    def _served(self, now_s: float, cut: bool) -> ServedLoad:
        engine = self._engine
        requests = engine.requests
        finished = requests[engine.left[: int(engine.clock[0].finished)]]
        recorders = [
            self._recorder(place, number, finished[finished.replica == place], now_s)
            for place, number in enumerate(self._replicas)
        ]
        coverage = [entry for seen in engine.seen for entry in self._coverage(seen)]
        inside = requests[requests.entered & ~requests.left]
        cut_off = CutOff(inside.number, inside.arrival_s, inside.first_s, inside.output)
        return ServedLoad(recorders, coverage, self._cost.unpriced, now_s, cut_off, cut)

    def _recorder(self, place: int, number: int, left: Any, now_s: float) -> RunRecorder:
        engine = self._engine
        state, gaps = engine.replicas[place], engine.gaps[place]
        sums = engine.sums[place]
        recorder = RunRecorder(
            self._of.skip, self._of.expected, number, _changed_s=float(state.changed_s),
            batch=Series.of(sums[0], *state.batch.tolist()),
            kv_blocks=Series.of(sums[1], *state.kv_blocks.tolist()),
            **{name: state[name].item() for name in COUNTS},
        )  # fmt: skip
        columns = {
            "index": left.number, "sequence": left.sequence, "prompt_tokens": left.prompt,
            "tokens": left.tokens, "arrival_s": left.arrival_s,
            "first_s": left.first_s + left.around_s, "finish_s": left.last_s + left.around_s,
            "rounds": left.steps, "drafted": left.drafted, "accepted": left.accepted,
            "draft_forwards": left.forwards, "preemptions": left.preemptions,
            "replica": np.full(len(left), number),
        }  # fmt: skip
        for name, values in columns.items():
            recorder.requests[name].frombytes(values.tobytes())
        bins = gaps.nonzero()[0]
        counts = zip((bins + arrays.FINEST).tolist(), gaps[bins].tolist(), strict=True)
        recorder.itl.add_bins(dict(counts), float(state.gaps_s))
        recorder.enter(now_s, 0)
        for mark, tokens in zip(self._marks, engine.marked[:, place].tolist(), strict=True):
            if mark.passed:
                recorder.mark(int(mark.index), float(mark.at_s), tokens)
        return recorder

    def _coverage(self, seen: Any) -> Iterator[Coverage]:
        """Yield what was read, in the order of `EngineCost.coverage`."""
        composed = seen[-1]
        for place, origin in zip(*seen["passes"][:-1].nonzero(), strict=True):
            phases = self._cost.phases[PLACES[place]]
            yield covered(phases, ORIGINS[origin], seen[place, origin].tolist())
        if composed[0].passes:
            yield covered(("target", "mixed"), COMPOSED, composed[0].tolist())


def _marks(marks: Mapping[int, float], marked: tuple[int, int]) -> Any:
    """Return the ends of the measured window: at given times, or where a request arrives."""
    timed = sorted(marks.items(), key=lambda mark: mark[1])
    if timed:
        rows = [(arrays.NOBODY, index, at_s, False) for index, at_s in timed]
    else:
        rows = [(index, index, 0.0, False) for index in sorted({*marked})]
    return np.array(rows, arrays.MARK).view(np.recarray)


def _patiently(run: Callable[..., Any], engine: arrays.Arrays) -> Any:
    """Run the loop; say so where its first call has to compile it."""
    if getattr(run, "signatures", ()):
        return run(engine)
    text = "draftsim compiles its serving loop, once after every installation: some 20 s"
    said = Timer(PATIENCE_S, partial(print, text, file=sys.stderr))
    said.daemon = True
    said.start()
    try:
        return run(engine)
    finally:
        said.cancel()
