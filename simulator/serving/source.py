"""Feeds requests to a server as SimPy events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import simpy

from simulator.serving.arrivals import Job
from simulator.serving.clock import Clock

Events = Generator[simpy.Event, Any, None]


class Server(Protocol):
    """A server that takes requests."""

    def submit(self, job: Job) -> None:
        """Queue a request."""
        ...

    def wake(self) -> None:
        """Look at the queue again: something changed."""
        ...


class Source:
    """Feeds requests to a queue: at their times, or as completions allow.

    `advance` is called with the number of requests that have just left.  Of open arrivals nobody
    knows before `open_until_s` that none is to come.  The first requests of a closed loop, which
    are sent at once, reach the queue one by one, `apart_s` from each other.
    """

    def __init__(
        self, env: Clock, jobs: Iterator[Job], concurrency: int | None, think_s: float,
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

    def start(self, server: Server) -> None:
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
        """A request left: a closed loop sends another.

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
