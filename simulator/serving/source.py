"""Requests as SimPy events: the clock, what feeds requests to servers, and a server's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import Any

import numpy as np
import simpy
from simpy.events import NORMAL

from policies.rules.base import VerifyRule
from simulator.serving.arrivals import Arrivals, Job
from simulator.serving.cost import EngineCost
from simulator.serving.outcome.metrics import RunRecorder
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.routers import ReplicaLoad, Router
from simulator.serving.sequence import EngineState, ServedSequence, Slot
from traces.acceptance.trace import Trace


class SimulatedClock(simpy.Environment):
    """A SimPy environment that a process may move on without an event of its own.

    An engine alone in the system sleeps from iteration to iteration, each time only to be
    the next event itself.  `skip` saves that detour; whatever else is scheduled meanwhile
    still goes first, so a run is the same with and without it.
    """

    def skip(self, seconds: float) -> bool:
        """Advance the clock by `seconds` if no event is due before; return False otherwise.

        Only a process that does not share its current event may call this: time moves on while
        it runs.
        """
        then = self._now + seconds
        if self._queue and self._queue[0][0] <= then:
            return False
        self._now = then
        return True

    def at(self, then: float) -> simpy.Event:
        """Return an event at exactly `then`; a timeout would meet it only to rounding."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (then, NORMAL, next(self._eid), event))
        return event


Events = Generator[simpy.Event, Any, None]


@dataclass(eq=False)
class RequestSource:
    """Feeds requests to replicas: at their times, or as completions allow.

    Parameters
    ----------
    env, jobs, arrivals:
        The clock, the requests, and the arrivals that say when they come.
    router, rng:
        The router that chooses among several replicas, and its random generator.
    marked:
        Numbers of the requests whose arrival every replica records.
    advance:
        Called with the number of requests that have just left.
    open_until_s:
        With open arrivals the source does not report itself exhausted before that time.
    apart_s:
        Seconds between the first requests of a closed loop, which are sent together and reach the
        queue one by one.
    """

    env: SimulatedClock
    jobs: Iterator[Job]
    arrivals: Arrivals
    router: Router
    rng: np.random.Generator
    marked: Container[int]
    advance: Callable[[int], None]
    open_until_s: float
    apart_s: float

    def __post_init__(self) -> None:
        self.exhausted = False
        self._replicas: Sequence[Replica] = ()
        self._thinking = self._due = 0
        self._submitting = False

    def start(self, replicas: Sequence[Replica]) -> None:
        """Begin to submit requests to `replicas`."""
        self._replicas = replicas
        clients = self.arrivals.concurrency
        if clients is None:
            self.env.process(self._open())
            return
        for place in range(clients):
            self._submit_after(self.apart_s * place)

    def completed(self, around_s: float = 0.0) -> None:
        """Let a closed loop send another request after one left.

        ``around_s`` is what a server puts around a request: the answer's way to the client and
        the next request's to the engine.
        """
        self.advance(1)
        if self.arrivals.concurrency is not None:
            self._submit_after(self.arrivals.think_s + around_s)

    @property
    def more_to_come(self) -> bool:
        """Return True if requests will arrive before any now in the system finishes."""
        if self.arrivals.concurrency is None:
            return not self.exhausted
        return self._thinking > 0

    def _open(self) -> Events:
        for job in self.jobs:
            if job.arrival_s > self.env.now:
                yield self.env.at(job.arrival_s)
            self._submit(job)
        if self.open_until_s > self.env.now:
            yield self.env.at(self.open_until_s)
        self._exhaust()

    def _submit_after(self, wait_s: float) -> None:
        if wait_s > 0:
            # Counted at once: a server that plans before this process begins must know.
            self._thinking += 1
            self.env.process(self._think(wait_s))
        else:
            self._submit_next()

    def _think(self, wait_s: float) -> Events:
        yield self.env.timeout(wait_s)
        self._thinking -= 1
        self._submit_next()

    def _submit_next(self) -> None:
        self._due += 1
        if self._submitting:
            return
        # A loop, as a refused request brings the next at once: a recursion has no such depth.
        self._submitting = True
        while self._due:
            self._due -= 1
            job = next(self.jobs, None)
            if job is None:
                self._exhaust()
            else:
                self._submit(job)
        self._submitting = False

    def _submit(self, job: Job) -> None:
        replicas = self._replicas
        if job.number in self.marked:
            for replica in replicas:
                replica.recorder.mark(job.number, self.env.now, replica.recorder.tokens)
        at = 0
        if len(replicas) > 1:
            at = self.router.choose(job.number, [r.load for r in replicas], self.rng)
        replicas[at].recorder.arrived += 1
        replicas[at].submit(job)

    def _exhaust(self) -> None:
        self.exhausted = True
        for replica in self._replicas:
            replica.wake()


@dataclass(eq=False)
class Replica(ABC):
    """A server with a queue of its own: alone, or one of a fleet's.

    Parameters
    ----------
    env, source:
        The clock, and what feeds requests.
    trace, cost:
        The recording that requests replay, and what passes cost.
    recorder, timeline:
        Record of the run, and its timeline; None if it is not drawn.
    lookahead:
        The longest draft.
    """

    env: SimulatedClock
    source: RequestSource
    trace: Trace
    cost: EngineCost
    recorder: RunRecorder
    timeline: Timeline | None
    lookahead: int

    def __post_init__(self) -> None:
        self.state = EngineState()
        self._wakeup: simpy.Event | None = None

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a request."""

    @abstractmethod
    def run(self) -> Events:
        """Serve until no request is left."""

    @property
    @abstractmethod
    def unfinished(self) -> Sequence[Slot]:
        """Requests that wait or run."""

    def sleep(self) -> simpy.Event:
        """Return an event for the next request to arrive."""
        self._wakeup = self.env.event()
        return self._wakeup

    def wake(self) -> None:
        """Wake an idle server, so that it looks at its queue again."""
        if self._wakeup is not None and not self._wakeup.triggered:
            self._wakeup.succeed()

    def slot_of(self, job: Job, rule: VerifyRule | None = None) -> Slot:
        """Return the slot of a request that enters the system now."""
        now = self.env.now
        self.recorder.enter(now, 1)
        self.recorder.carried += job.prompt_tokens
        sequence = ServedSequence(self.trace, job, self.lookahead, self.state, rule)
        return Slot(job.number, job, now, sequence)

    def emit_first(self, slot: Slot) -> None:
        """Record the first token, which the pass that ends a prompt emits."""
        slot.first_s = slot.last_s = self.env.now
        slot.tokens = 1
        slot.context += 1
        self.recorder.tokens += 1

    @property
    def load(self) -> ReplicaLoad:
        """The load that a router sees."""
        recorder = self.recorder
        return ReplicaLoad(recorder.in_system, recorder.carried + recorder.tokens)
