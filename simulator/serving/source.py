"""Requests as SimPy events: the clock, what feeds requests to servers, and a server's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from heapq import heappush
from typing import Any, Protocol

import simpy
from simpy.events import NORMAL

from simulator.serving.arrivals import Job
from simulator.serving.outcome.metrics import RunRecorder
from simulator.serving.passes import Coverage
from simulator.serving.sequence import Slot


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
        """Return an event at `then` exactly; a timeout over the difference would meet it to
        rounding.
        """
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (then, NORMAL, next(self._eid), event))
        return event


Events = Generator[simpy.Event, Any, None]


class RequestServer(Protocol):
    """A server that takes requests."""

    def submit(self, job: Job) -> None:
        """Queue a request."""
        ...

    def wake(self) -> None:
        """Look at the queue again: something changed."""
        ...


class RequestSource:
    """Feeds requests to a queue: at their times, or as completions allow.

    `advance` is called with the number of requests that have just left.  With open arrivals the
    source does not report itself exhausted before `open_until_s`.  The first requests of a closed
    loop are sent together and reach the queue one by one, `apart_s` from each other.
    """

    def __init__(
        self, env: SimulatedClock, jobs: Iterator[Job], concurrency: int | None, think_s: float,
        advance: Callable[[int], None] = lambda _: None, open_until_s: float = 0.0,
        apart_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.env = env
        self.advance = advance
        self.exhausted = False
        self._jobs = jobs
        self._concurrency = concurrency
        self._think_s = think_s
        self._open_until_s = open_until_s
        self._apart_s = apart_s
        self._thinking = 0
        self._due = 0
        self._submitting = False

    def start(self, server: RequestServer) -> None:
        """Begin to submit requests to `server`."""
        self._server = server
        if self._concurrency is None:
            self.env.process(self._open())
            return
        for place in range(self._concurrency):
            if self._apart_s * place > 0:
                self.env.process(self._think(self._apart_s * place))
            else:
                self._submit_next()

    def completed(self, around_s: float = 0.0) -> None:
        """Let a closed loop send another request after one left.

        ``around_s`` is what a server puts around a request: the answer's way to the client and
        the next request's to the engine.
        """
        self.advance(1)
        if self._concurrency is None:
            return
        if (wait_s := self._think_s + around_s) > 0:
            self.env.process(self._think(wait_s))
        else:
            self._submit_next()

    @property
    def more_to_come(self) -> bool:
        """Return True if requests will arrive before any now in the system finishes."""
        if self._concurrency is None:
            return not self.exhausted
        return self._thinking > 0

    def _open(self) -> Events:
        for job in self._jobs:
            if job.arrival_s > self.env.now:
                yield self.env.at(job.arrival_s)
            self._server.submit(job)
        if self._open_until_s > self.env.now:
            yield self.env.at(self._open_until_s)
        self.exhausted = True
        self._server.wake()

    def _think(self, wait_s: float) -> Events:
        # Counted at once: a server that plans before this process begins must know.
        self._thinking += 1
        return self._thought(wait_s)

    def _thought(self, wait_s: float) -> Events:
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
            job = next(self._jobs, None)
            if job is None:
                self.exhausted = True
                self._server.wake()
            else:
                self._server.submit(job)
        self._submitting = False


class Replica(ABC):
    """A server with a queue of its own: alone, or one of a fleet's."""

    env: SimulatedClock
    recorder: RunRecorder
    _wakeup: simpy.Event | None = None

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a request."""

    def sleep(self) -> simpy.Event:
        """Return an event for the next request to arrive."""
        self._wakeup = self.env.event()
        return self._wakeup

    def wake(self) -> None:
        """Wake an idle server, so that it looks at its queue again."""
        if self._wakeup is not None and not self._wakeup.triggered:
            self._wakeup.succeed()

    @abstractmethod
    def run(self) -> Events:
        """Serve until no request is left."""

    @property
    @abstractmethod
    def unfinished(self) -> list[Slot]:
        """Requests that a bound of the run cut off."""

    @property
    @abstractmethod
    def coverage(self) -> list[Coverage]:
        """Count measured, interpolated and extrapolated passes, per model and phase."""

    @property
    @abstractmethod
    def unpriced(self) -> list[str]:
        """Return what happened at no cost because the table lacks its cells."""

    @property
    def emitted(self) -> int:
        """Tokens emitted by now."""
        return self.recorder.tokens

    @property
    def requests(self) -> int:
        """Requests that wait or run."""
        return self.recorder.in_system

    @property
    def tokens(self) -> int:
        """Tokens of the requests that wait or run: of their prompts, and emitted by now."""
        return self.recorder.carried + self.emitted
