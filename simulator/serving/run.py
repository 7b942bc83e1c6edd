"""Serving in simulated time: one scenario under any policies, with replications.

The compiled loop runs where it can serve the scenario, and otherwise an `EventEngine` for each
replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import simpy

from policies.batch.base import BatchPolicy, Policy
from policies.core import DraftPolicy, Round, caught_up
from policies.guard import PolicyError
from policies.registry import describe
from policies.rules.base import VerifyRule
from policies.rules.registry import describe_rule
from policies.spec import parameters
from policies.together import Synchronise, Together, together_of
from simulator.serving.arrivals import ArrivalFile, Job
from simulator.serving.compiled.engine import CompiledRun, ServedLoad, Serving
from simulator.serving.cost import Chunk, Seconds
from simulator.serving.outcome.metrics import CutOff, RunRecorder, joined_recorders
from simulator.serving.outcome.report import Run, joined_runs
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.overlap import Dsi, Overlapped, Pearl
from simulator.serving.routers import ReplicaLoad
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Iteration, Scheduler
from simulator.serving.sequence import Slot, step
from simulator.serving.source import Events, Replica, RequestSource, SimulatedClock
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import is_one_pass, passes_always
from traces.replay.ruled import prepared_rule
from traces.replay.run import fidelity_of, own_policy

OVERLAPPED: Mapping[str, type[Overlapped]] = {"pearl": Pearl, "dsi": Dsi}
SYNCHRONISED: Mapping[str, Synchronise] = {"static-minimum": "minimum", "static-mean": "mean"}


def simulate(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario, *,
    name: str | None = None, rule: VerifyRule | None = None, replication: int = 0,
    timeline: Timeline | None = None, advance: Callable[[int], None] = lambda _: None,
    by_iteration: bool = False, only: Sequence[int] | None = None,
) -> Run:  # fmt: skip
    """Return one replication of `scenario` under `policy`.

    `rule` decides what is accepted; by default the recorded verdicts do.  One copy serves
    all requests of an engine, as in `traces.replay.run.replay`; overlapped modes take none.
    `timeline` is of the first replica.  `advance` is called with the number of requests that have
    just left.  `by_iteration` and `timeline` give every iteration an event of its own even where
    the compiled loop would serve: slower, and the same to rounding.  `only` runs some of the
    replicas, where they know nothing of each other (`Scenario.splits`):
    `simulator.serving.outcome.report.joined_runs` puts the runs of all together.

    Raises
    ------
    SignalError, TailError, PolicyError
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
    if expected is None or isinstance(scenario.arrivals, ArrivalFile):
        listed = list(jobs)
        expected, jobs = len(listed), iter(listed)
    lookahead = _longest_draft(policy, trace, scenario)
    serving = Serving(
        trace, latency, policy, scenario, rule, lookahead, expected, advance, choosing
    )
    check_mode(trace, latency, policy, scenario, rule)
    by_events = by_iteration or timeline is not None or not serving.serves
    run = partial(served_by, serving, name, by_events, timeline)
    replicas = range(scenario.replicas) if only is None else only
    if not scenario.splits:
        return run(jobs, replicas, {})
    shares, marks = _shares(scenario, jobs, replicas, serving.marked, choosing)
    runs = [run(iter(shares[i]), [i], marks) for i in replicas if shares[i]]
    if idle := [i for i in replicas if not shares[i]]:
        # All that get no request are alike: one is run, and counted for the others, too.
        runs.append(replace(run(iter(()), idle[:1], marks), replicas=len(idle)))
    return joined_runs(runs)


def check_mode(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario,
    rule: VerifyRule | None,
) -> None:  # fmt: skip
    """Raise DraftsimError if `scenario` cannot serve these drafts or this policy.

    Its mode may not fit, or too many replicas share a clock.
    """
    scenario.check_clock()
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
    if mode == "dsi" and trace.open_ended.any():
        raise DraftsimError(
            "--mode dsi drafts on until a rejection: it needs a recording with longer drafts"
        )


def lookahead_of(policy: Policy, trace: Trace) -> int:
    """Return the longest draft `policy` may make: its own bound, or else the recording's.

    Raises DraftsimError if neither does.
    """
    own = policy.longest_draft()
    bound = trace.max_gamma if own is None else own
    if bound is None:
        text, remedy = type(policy).__name__, "give it a longest_draft()"
        if "gamma_max" in parameters(type(policy)):
            text = describe(policy)
            remedy = f"write {text}{',' if ':' in text else ':'}gamma_max=8"
        raise DraftsimError(
            f"policy {text} sets no longest draft, and neither does the trace: {remedy}, or set "
            "Limits.lookahead in Python"
        )
    return bound


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
    choose, unseen = scenario.router.choose, [ReplicaLoad()] * scenario.replicas
    for job in jobs:
        if job.number in marked:
            marks[job.number] = job.arrival_s
        replica = choose(job.number, unseen, rng)
        if replica in shares:
            shares[replica].append(job)
    return shares, marks


def served_by(
    serving: Serving, name: str, by_events: bool, timeline: Timeline | None, jobs: Iterator[Job],
    replicas: Sequence[int], marks: Mapping[int, float],
) -> Run:  # fmt: skip
    """Serve `jobs` with these replicas of the fleet, on one clock, by events or the compiled loop.

    With more than one the scenario's router chooses.  `marks` are the times of the
    `Serving.marked` requests, for a replica that they may not arrive at.
    """
    began = time.perf_counter()
    scenario, trace = serving.scenario, serving.trace
    try:
        if by_events:
            served = _by_events(serving, timeline, jobs, replicas, marks)
        else:
            served = CompiledRun(serving, jobs, replicas, marks).run()
    except PolicyError as error:
        raise error.by(serving.policy) from None
    recorders = served.recorders
    recorder = recorders[0] if len(recorders) == 1 else joined_recorders(recorders)
    status = f"stopped at max_time_s={scenario.max_time_s:g}" if served.cut else "complete"
    assumed = serving.latency.said_batch_free(scenario.largest_batch)
    lossless = "rejection-sampling" if trace.temperature > 0 else "exact"
    # Other lengths cut or repeat recordings; a lossy rule leaves them.
    departs = assumed or serving.lossy is not None or scenario.arrivals.resized
    return Run(
        name, scenario, lossless if serving.rule is None else describe_rule(serving.rule),
        "approximate" if departs else fidelity_of(trace), recorder, served.coverage,
        [*served.unpriced, *([assumed] if assumed else [])], served.now_s,
        time.perf_counter() - began, status, served.cut_off, trace.source, len(recorders),
    )  # fmt: skip


def _by_events(
    serving: Serving, timeline: Timeline | None, jobs: Iterator[Job], replicas: Sequence[int],
    marks: Mapping[int, float],
) -> ServedLoad:  # fmt: skip
    """Serve with an event for every iteration."""
    scenario, env = serving.scenario, SimulatedClock()
    source = RequestSource(
        env, jobs, scenario.arrivals, scenario.router, serving.rng, serving.marked,
        serving.advance, max(marks.values(), default=0.0), serving.apart_s,
    )  # fmt: skip
    engines = [
        _engine(serving, env, source, number, timeline if number == 0 else None)
        for number in replicas
    ]
    processes = [env.process(engine.run()) for engine in engines]
    for index, at_s in marks.items():
        for engine in engines:
            env.at(at_s).callbacks.append(partial(_mark, engine, index, at_s))
    source.start(engines)
    ended: simpy.Event = env.all_of(processes)
    if scenario.max_time_s is not None:
        ended |= env.timeout(scenario.max_time_s)
    env.run(until=ended)
    for engine in engines:
        engine.recorder.enter(env.now, 0)
    unfinished = [
        (slot.index, slot.arrival_s, slot.first_s, slot.job.output_tokens)
        for engine in engines for slot in engine.unfinished
    ]  # fmt: skip
    return ServedLoad(
        [engine.recorder for engine in engines],
        [entry for engine in engines for entry in engine.cost.coverage],
        engines[0].cost.unpriced, env.now, CutOff(*np.array(unfinished).reshape(-1, 4).T),
        any(process.is_alive for process in processes),
    )  # fmt: skip


def _engine(
    serving: Serving, env: SimulatedClock, source: RequestSource, number: int,
    timeline: Timeline | None,
) -> Replica:  # fmt: skip
    trace, scenario, policy = serving.trace, serving.scenario, serving.policy
    recorder = RunRecorder(serving.skip, serving.expected, replica=number)
    shared = env, source, trace, serving.cost(), recorder, timeline, serving.lookahead
    if scenario.one_stream and isinstance(policy, DraftPolicy):
        # Nothing runs next to a target that decodes plainly, so nothing slows it.
        interference = scenario.interference if serving.lookahead else 0.0
        return OVERLAPPED[scenario.mode](*shared, policy, interference)
    style = SYNCHRONISED.get(scenario.mode, "ragged")
    return EventEngine(
        *shared, serving.scheduler(),
        together_of(policy, style, trace.vocab_size, guarded=True),
        prepared_rule(serving.rule, trace),
    )  # fmt: skip


def _mark(engine: Replica, index: int, at_s: float, _: object = None) -> None:
    engine.recorder.mark(index, at_s, engine.recorder.tokens)


@dataclass(eq=False)
class EventEngine(Replica):
    """One model replica as a SimPy process: a scheduler, a policy's rounds, and what they cost.

    It has one event per arrival, and one per iteration during which anything else is to happen.  A
    round's outcome is decided when its iteration begins and takes effect when it ends.
    """

    scheduler: Scheduler
    together: Together
    rule: VerifyRule | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._idle = True

    def submit(self, job: Job) -> None:
        """Queue a request, or count it as rejected if it could never finish."""
        if not self.scheduler.admissible(job.prompt_tokens, job.output_tokens):
            self.recorder.rejected += 1
            self.source.completed()
            return
        self.scheduler.arrive(self.slot_of(job, self.rule), busy=not self._idle)
        self.wake()

    def run(self) -> Events:
        """Iterate until every request has left."""
        env, state = self.env, self.state
        while True:
            plan = self.scheduler.next(self.source.more_to_come)
            decode, chunks = plan
            self._idle = not decode and not chunks
            if self._idle:
                if self.idle_for_good():
                    return
                yield self.sleep()
                continue
            state.batch = len(decode) or 1
            rounds = step(self.together, decode) if decode else []
            self.recorder.length_changes = self.together.changes
            if self.scheduler.drafts_ahead:
                state.scheduled = len(decode) + len(chunks)
            cost = self.cost(decode, self._kept_up(decode, rounds), chunks)
            start = env.now
            seconds = cost.total_s
            if not env.skip(seconds):
                yield env.timeout(seconds)
            self._account(start, plan, rounds, cost)
            if rounds:
                self._decoded(start, decode, rounds)
            for chunk in chunks:
                self.prefilled(chunk)

    def _kept_up(self, slots: list[Slot], rounds: list[Round]) -> list[Round]:
        """Return the rounds with the catch-up tokens of a drafter that runs in every iteration.

        In other engines they stay as they are.
        """
        if not self.cost.always:
            return rounds
        found = []
        for slot, outcome in zip(slots, rounds, strict=True):
            unread = min(outcome.catch_up, slot.unread)
            passes = max(outcome.draft_forwards, self.cost.always)
            slot.unread = caught_up(unread, passes, outcome.accepted, slot.takes_verified)
            found.append(outcome._replace(catch_up=unread))
        return found

    @property
    def unfinished(self) -> Sequence[Slot]:
        """Requests that wait or run."""
        return [*self.scheduler.waiting, *self.scheduler.running]

    def idle_for_good(self) -> bool:
        """Return True if no request will come any more and nothing is planned for the next
        iteration.

        Raises DraftsimError where requests wait and none of them could ever run.
        """
        scheduler, source = self.scheduler, self.source
        if source.exhausted and not scheduler.waiting:
            return True
        # Who still thinks wakes the engine, with another request or to say that none is left.
        last = source.exhausted and not source.more_to_come
        if scheduler.running or (scheduler.waiting and last):
            raise DraftsimError("the scheduler found nothing to run with requests waiting")
        return False

    def _account(self, start: float, plan: Iteration, rounds: list[Round], cost: Seconds) -> None:
        recorder, now = self.recorder, self.env.now
        recorder.iterations += 1
        recorder.busy_s += now - start
        running = len(self.scheduler.running)
        recorder.peak_batch = max(recorder.peak_batch, running)
        recorder.batch.add(start, now, running)
        recorder.kv_blocks.add(start, now, self.scheduler.pool.used)
        if self.timeline is not None:
            _draw(self.timeline, start, plan, rounds, cost)

    def _decoded(self, start: float, slots: list[Slot], rounds: list[Round]) -> None:
        recorder, now = self.recorder, self.env.now
        on_time = 0
        ended: list[Slot] = []
        for slot, outcome in zip(slots, rounds, strict=True):
            recorder.count_round(slot, outcome)
            if slot.last_s != start:
                recorder.gap(slot, now - slot.last_s)
            elif slot.index >= recorder.skip:
                on_time += 1
            slot.last_s = now
            if slot.decoder.ended:
                ended.append(slot)
        if on_time:
            recorder.itl.add(now - start, on_time)
        for slot in ended:
            self.leave(slot)

    def prefilled(self, chunk: Chunk) -> None:
        """Note that prompt tokens were processed; the last of a prompt emit the first token."""
        slot = chunk.slot
        slot.prefilled += chunk.tokens
        slot.prefill_left -= chunk.tokens
        if slot.prefill_left or slot.tokens:
            return
        self.emit_first(slot)
        self.together.join(slot)
        slot.decoder.declare(self.together.reads)
        if slot.decoder.ended:
            self.together.leave(slot)
            self.leave(slot)

    def leave(self, slot: Slot) -> None:
        """Note that a request has emitted its last token."""
        around_s = self.cost.host(len(self.scheduler.running)).request_s
        self.scheduler.finish(slot)
        self.recorder.leave(slot, self.env.now, around_s)
        if self.rule is not None:
            self.rule.end_request()
        self.source.completed(around_s)


def _draw(
    timeline: Timeline, start: float, plan: Iteration, rounds: list[Round], cost: Seconds
) -> None:
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    wasted = sum(r.draft_forwards for r in rounds) - accepted
    prompts = ["prefill"] if plan.chunks else []
    sizes = {"batch": len(rounds), "prompt_tokens": sum(c.tokens for c in plan.chunks)}
    label = " + ".join((["draft"] if accepted + wasted else []) + prompts)
    timeline.device(1, "draft model", start, cost.draft_s, label, **sizes, drafted=drafted)
    label = " + ".join(([("verify" if drafted else "decode")] if rounds else []) + prompts)
    timeline.device(
        0, "target model", start + cost.draft_s, cost.target_s, label,
        **sizes, drafted=drafted, accepted=accepted, wasted=wasted,
    )  # fmt: skip
    timeline.device(2, "host", start + cost.draft_s + cost.target_s, cost.host_s, "host")
    timeline.tokens(start, cost.total_s, accepted, wasted)
    for slot, outcome in zip(plan.decode, rounds, strict=True):
        lost = outcome.draft_forwards - outcome.accepted
        timeline.round(slot.index, start, cost.total_s, outcome, lost)
    for slot, tokens in plan.chunks:
        if not slot.prefilled:
            since = max(slot.arrival_s, slot.last_s)
            label = "pre-empted" if slot.preemptions else "waiting"
            timeline.request(slot.index, since, start - since, label)
        timeline.request(slot.index, start, cost.total_s, "prefill", tokens=tokens)
