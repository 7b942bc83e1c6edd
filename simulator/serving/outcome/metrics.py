"""The results of a run: rows per finished request, and statistics."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.serving.outcome.statistics import Histogram, Series
from simulator.serving.sequence import Slot

REQUEST_COLUMNS: Mapping[str, str] = {
    "index": "q", "sequence": "q", "prompt_tokens": "q", "tokens": "q", "arrival_s": "d",
    "first_s": "d", "finish_s": "d", "rounds": "q", "drafted": "q", "accepted": "q",
    "draft_forwards": "q", "preemptions": "q", "replica": "q",
}  # fmt: skip
"""Columns of a run's request table and their array codes."""
COUNTS = (
    "arrived", "rejected", "in_system", "carried", "peak_batch", "iterations", "length_changes",
    "tokens", "drafted", "accepted", "draft_forwards",
)  # fmt: skip
"""Numbers of a record that replicas add up; of the most that ran at a time, the sum bounds it."""


@dataclass(eq=False)
class Window:
    """Counters at the two ends of the measured interval, see `Recorder`."""

    start_s: float = 0.0
    end_s: float = math.nan
    start_tokens: int = 0
    end_tokens: int = 0


@dataclass(eq=False)
class Recorder:
    """Collects a run.  Memory grows by one row per finished request, and by nothing else.

    Warm-up rule: the first `skip` requests by order of arrival are left out of every
    latency; throughput is measured from the arrival of the first request kept to the
    arrival of the last of `expected`, so neither the filling nor the draining of the
    engine counts.  Where all requests arrive at once there is no such interval, and where an
    overload brings them in less than half of the run it shows little but the filling:
    throughput is then taken over the whole run.
    """

    skip: int = 0
    expected: int = 0
    replica: int = 0
    """Which of a fleet's replicas this is the record of."""
    requests: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(code) for name, code in REQUEST_COLUMNS.items()}
    )
    itl: Histogram = field(default_factory=Histogram)
    batch: Series = field(default_factory=Series)
    kv_blocks: Series = field(default_factory=Series)
    window: Window = field(default_factory=Window)
    arrived: int = 0
    rejected: int = 0
    in_system: int = 0
    area_s: float = 0.0
    """Integral of the number in the system over time, for Little's law."""
    _changed_s: float = 0.0
    carried: int = 0
    """Prompt tokens of the requests in the system, less the tokens that finished ones emitted."""
    peak_batch: int = 0
    """Most requests that ran at a time."""
    iterations: int = 0
    length_changes: int = 0
    """Iterations that drafted another length than the one before, where one holds for all."""
    busy_s: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_forwards: int = 0

    def arrive(self, index: int, now: float, tokens: int) -> None:
        """The request `index` arrived here, after `tokens` had been emitted."""
        self.mark(index, now, tokens)
        self.arrived += 1

    def mark(self, index: int, now: float, tokens: int) -> None:
        """The request `index` arrived, here or at another replica: an end of the window maybe."""
        if index == self.skip:
            self.window.start_s, self.window.start_tokens = now, tokens
        if index == self.expected - 1:
            self.window.end_s, self.window.end_tokens = now, tokens

    def enter(self, now: float, change: int) -> None:
        """The number in the system changed by `change`."""
        self.area_s += self.in_system * (now - self._changed_s)
        self._changed_s = now
        self.in_system += change

    def leave(self, slot: Slot, now: float, around_s: float = 0.0) -> None:
        """A request got its last token, of which its client knows `around_s` later.

        This is the server's own time around a request: all of it is counted after the arrival at
        the engine, though some of it comes before.
        """
        self.enter(now, -1)
        self.area_s += around_s
        self.carried -= slot.job.prompt_tokens + slot.tokens
        row = (
            slot.index, slot.job.sequence, slot.job.prompt_tokens, slot.tokens, slot.arrival_s,
            slot.first_s + around_s, now + around_s, slot.steps, slot.drafted, slot.accepted,
            slot.draft_forwards, slot.preemptions, self.replica,
        )  # fmt: skip
        for column, value in zip(self.requests.values(), row, strict=True):
            column.append(value)

    def gap(self, slot: Slot, gap_s: float) -> None:
        """A request got tokens `gap_s` after the last ones."""
        if slot.index >= self.skip:
            self.itl.add(gap_s)


def joined_recorders(recorders: Sequence[Recorder]) -> Recorder:
    """The records of replicas that saw the same window, as one; requests in order of finishing."""
    first = recorders[0]
    joined = Recorder(
        first.skip, first.expected, requests=_requests([r.requests for r in recorders]),
        itl=Histogram.joined([r.itl for r in recorders]),
        batch=Series.joined([r.batch for r in recorders]),
        kv_blocks=Series.joined([r.kv_blocks for r in recorders]),
        window=Window(
            first.window.start_s, first.window.end_s,
            sum(r.window.start_tokens for r in recorders),
            sum(r.window.end_tokens for r in recorders),
        ),
        area_s=sum(r.area_s for r in recorders), busy_s=sum(r.busy_s for r in recorders),
    )  # fmt: skip
    for name in COUNTS:
        setattr(joined, name, sum(getattr(r, name) for r in recorders))
    return joined


def _requests(parts: Sequence[dict[str, array[Any]]]) -> dict[str, array[Any]]:
    columns = {name: np.concatenate([np.array(p[name]) for p in parts]) for name in REQUEST_COLUMNS}
    order = np.argsort(columns["finish_s"], kind="stable")
    return {
        name: array(code, columns[name][order].tobytes()) for name, code in REQUEST_COLUMNS.items()
    }
