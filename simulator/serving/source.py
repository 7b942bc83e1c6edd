"""Feeds requests to a server as SimPy events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import simpy

from simulator.serving.arrivals import Job

Events = Generator[simpy.Event, Any, None]


class Server(Protocol):
    """What takes requests."""

    def submit(self, job: Job) -> None:
        """Queue a request."""
        ...

    def wake(self) -> None:
        """Look at the queue again: something changed."""
        ...


class Source:
    """Feeds requests to a queue: at their times, or as completions allow.

    `advance` is called whenever a request leaves.
    """

    def __init__(
        self, env: simpy.Environment, jobs: Iterator[Job], concurrency: int | None, think_s: float,
        advance: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.env = env
        self.advance = advance
        self.exhausted = False
        self._jobs = jobs
        self._concurrency = concurrency
        self._think_s = think_s
        self._thinking = 0

    def start(self, server: Server) -> None:
        """Begin to submit requests to `server`."""
        self._server = server
        if self._concurrency is None:
            self.env.process(self._open())
            return
        for _ in range(self._concurrency):
            self._submit_next()

    def completed(self) -> None:
        """A request left: a closed loop sends another."""
        self.advance()
        if self._concurrency is None:
            return
        if self._think_s > 0:
            self.env.process(self._think())
        else:
            self._submit_next()

    @property
    def more_to_come(self) -> bool:
        """Whether requests will arrive without any now in the system finishing first."""
        if self._concurrency is None:
            return not self.exhausted
        return self._thinking > 0

    def _open(self) -> Events:
        for job in self._jobs:
            if job.arrival_s > self.env.now:
                yield self.env.timeout(job.arrival_s - self.env.now)
            self._server.submit(job)
        self.exhausted = True
        self._server.wake()

    def _think(self) -> Events:
        self._thinking += 1
        yield self.env.timeout(self._think_s)
        self._thinking -= 1
        self._submit_next()

    def _submit_next(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            self.exhausted = True
            self._server.wake()
        else:
            self._server.submit(job)
