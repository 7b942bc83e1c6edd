"""When requests arrive, and which recorded sequence each of them replays.

Sequences are dealt from a shuffled deck of the recording, so that every sequence is used
once before any is used twice.  A file that gives lengths is matched by length instead:
see `ArrivalFile`.  Both draw from the generator of the replication alone, never from a
policy's, so every policy meets the same requests at the same times (common random
numbers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.serving.recorded import Requests, read_requests
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError

AT_ONCE = 4096
"""Rows of a file that are given sequences together."""


class Job(NamedTuple):
    """One request as the engine sees it arrive."""

    arrival_s: float
    """Time of arrival; a lower bound in a closed loop, where completions decide."""
    sequence: int
    """Index of the recorded sequence whose acceptance it replays."""
    prompt_tokens: int
    output_tokens: int
    number: int = 0
    """Place in the order of arrival, which a run gives it."""


class Arrivals(ABC):
    """A source of requests.  Subclass it and define `times`."""

    @abstractmethod
    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times in seconds, never decreasing."""

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield the first `requests` requests, each bound to a sequence of `trace`."""
        if not trace.requests:
            raise DraftsimError("the trace holds no request to replay: record one")
        deck = _deck(len(trace.requests), rng)
        for _, arrival_s, sequence in zip(
            range(_bounded(requests)), self.times(rng), deck, strict=False
        ):
            info = trace.requests[sequence]
            # A log may not know its prompts; a request has one token at the least.
            yield Job(arrival_s, sequence, max(info.prompt_length, 1), info.tokens)

    @property
    def rate(self) -> float | None:
        """Requests offered per second; None if the engine's own pace decides."""
        return None

    @property
    def concurrency(self) -> int | None:
        """Requests kept in the system by a closed loop; None for open arrivals."""
        return None

    @property
    def think_s(self) -> float:
        """Seconds between a completion and the next request of a closed loop."""
        return 0.0


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Independent arrivals at `per_second` requests a second."""

    per_second: float

    def __post_init__(self) -> None:
        _positive("rate", self.per_second)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Sums of exponential gaps."""
        now = 0.0
        while True:
            for gap in rng.exponential(1 / self.per_second, 256).tolist():
                now += gap
                yield now

    @property
    def rate(self) -> float:
        """Requests offered per second."""
        return self.per_second


@dataclass(frozen=True)
class Deterministic(Arrivals):
    """Arrivals at equal distances, `per_second` requests a second."""

    per_second: float

    def __post_init__(self) -> None:
        _positive("rate", self.per_second)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """0, 1 / rate, 2 / rate, ..."""
        del rng
        count = 0
        while True:
            yield count / self.per_second
            count += 1

    @property
    def rate(self) -> float:
        """Requests offered per second."""
        return self.per_second


@dataclass(frozen=True)
class ClosedLoop(Arrivals):
    """`clients` clients that each send the next request `think` seconds after an answer."""

    clients: int
    think: float = 0.0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise DraftsimError(f"concurrency is {self.clients}, expected at least 1")
        if not 0 <= self.think < np.inf:
            raise DraftsimError(f"think time is {self.think}, expected >= 0 seconds")

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Zero for every request: completions decide."""
        del rng
        while True:
            yield 0.0

    @property
    def concurrency(self) -> int:
        """Requests kept in the system."""
        return self.clients

    @property
    def think_s(self) -> float:
        """Seconds between a completion and the next request."""
        return self.think


@dataclass(frozen=True)
class ArrivalFile(Arrivals):
    """Requests of a file (`simulator.serving.recorded.read_requests`).

    The first request arrives at time 0, and `scale` > 1 speeds the file up.
    A request keeps the file's prompt and output lengths and replays one of the `nearest`
    recorded sequences closest in output length (smallest |log(recorded / asked)|), drawn
    at random: cut where the recording is longer, begun again where it is shorter.  The
    recorded acceptance is taken to hold at the file's prompt length.

    ``requests`` are the file's requests where they were read before; by default they are read
    from ``path`` when needed, which raises FileError.
    """

    path: str | Path
    scale: float = 1.0
    nearest: int = 8
    requests: Requests | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _positive("rate scale", self.scale)
        if self.nearest < 1:
            raise DraftsimError(f"nearest is {self.nearest}, expected at least 1 sequence")

    def scaled(self, factor: float) -> ArrivalFile:
        """Return the same file sped up by a further `factor`; it is not read again."""
        return replace(self, scale=self.scale * factor, requests=self.read)

    @cached_property
    def read(self) -> Requests:
        """The requests at the file's own pace, and what was measured of them."""
        return read_requests(Path(self.path)) if self.requests is None else self.requests

    @property
    def rows(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Unscaled arrival seconds from the first request on, prompt and output tokens."""
        return self.read.arrival_s, self.read.prompt, self.read.output

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield the file's times, scaled."""
        del rng
        yield from (self.rows[0] / self.scale).tolist()

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield the file's requests, each bound to a recorded sequence of about its length."""
        if not trace.requests:
            raise DraftsimError("the trace holds no request to replay: record one")
        _, prompts, outputs = self.rows
        recorded = np.log([r.tokens for r in trace.requests])
        order = recorded.argsort(kind="stable")
        ranked = recorded[order]
        window, asked = min(self.nearest, len(order)), np.log(outputs.astype(float))
        pick = rng.integers(window, size=len(asked))
        count = len(asked) if requests is None else min(requests, len(asked))
        rows = zip(self.times(rng), prompts.tolist(), outputs.tolist(), strict=True)
        for first in range(0, count, AT_ONCE):
            own = asked[first : min(first + AT_ONCE, count), None]
            # The nearest in log length are consecutive in rank: as many to either side.
            at = ranked.searchsorted(own)
            ranks = np.maximum(at - window, 0) + np.arange(2 * window)
            last = np.minimum(at + window, len(ranked)) - 1
            away = np.where(ranks <= last, np.abs(ranked[np.minimum(ranks, last)] - own), np.inf)
            near = np.take_along_axis(ranks, away.argsort(axis=1, kind="stable"), axis=1)
            chosen = order[near[np.arange(len(own)), pick[first : first + len(own)]]]
            for sequence, (arrival_s, prompt, output) in zip(chosen.tolist(), rows, strict=False):
                yield Job(arrival_s, sequence, prompt, output)

    @property
    def rate(self) -> float | None:
        """Mean requests per second over the scaled file; None if it spans no time."""
        times = self.rows[0]
        return float((len(times) - 1) / times[-1] * self.scale) if times[-1] > 0 else None


@dataclass(frozen=True)
class ArrivalTimes(Arrivals):
    """The times of `file` alone: requests keep the lengths of the recorded sequences."""

    file: ArrivalFile

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return the file's times, scaled."""
        return self.file.times(rng)

    @property
    def rate(self) -> float | None:
        """The file's mean rate; None if it spans no time."""
        return self.file.rate


def _deck(size: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(size).tolist()


def _bounded(requests: int | None) -> int:
    if requests is None:
        raise DraftsimError("these arrivals never end: give the number of requests")
    return requests


def _positive(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise DraftsimError(f"{name} is {value}, expected a positive finite number")
