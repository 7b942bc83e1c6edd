"""The interface of a server: it takes requests, runs, and can say how full it is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from simulator.serving.arrivals import Job
from simulator.serving.cost.reader import Coverage
from simulator.serving.outcome.metrics import Recorder
from simulator.serving.sequence import Slot
from simulator.serving.source import Events


class Replica(ABC):
    """A server with a queue of its own: alone, or one of a fleet's."""

    recorder: Recorder

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue a request."""

    @abstractmethod
    def wake(self) -> None:
        """Look at the queue again: something changed."""

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
