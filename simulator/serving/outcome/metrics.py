"""What a run leaves behind: rows per finished request and statistics of fixed size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.serving.sequence import Slot

Floats = npt.NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
HELD = 4096
"""Values that wait to be counted together: numpy is slow on few."""
NOTHING = {"mean": math.nan, **dict.fromkeys(QUANTILES, math.nan)}


def summary(values: Floats) -> dict[str, float]:
    """Mean, p50, p95 and p99 of `values`; NaN where there are none."""
    if not len(values):
        return dict(NOTHING)
    at = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, at.tolist(), strict=True))}


class Histogram:
    """Counts of positive values in bins 0.5 % wide; size grows with the range alone.

    The mean is exact, quantiles are within 0.25 %.
    """

    WIDTH = math.log(1.005)

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: dict[int, int] = {}
        self._waiting: dict[int, list[Floats]] = {}
        self._held = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times; values below a nanosecond share one bin."""
        self.count += times
        self.total += value * times
        at = math.floor(math.log(value if value > 1e-9 else 1e-9) / self.WIDTH)
        self._bins[at] = self._bins.get(at, 0) + times

    def add_all(self, values: Floats, times: int) -> None:
        """Count each of `values` `times` times."""
        self.count += times * len(values)
        self._waiting.setdefault(times, []).append(values)
        self._held += len(values)
        if self._held > HELD:
            self._fold()

    def _fold(self) -> None:
        bins = self._bins
        for times, parts in self._waiting.items():
            values = np.concatenate(parts)
            self.total += float(values.sum()) * times
            at = np.floor(np.log(np.maximum(values, 1e-9)) / self.WIDTH).astype(int)
            for place, count in zip(*np.unique(at, return_counts=True), strict=True):
                bins[int(place)] = bins.get(int(place), 0) + int(count) * times
        self._waiting.clear()
        self._held = 0

    @classmethod
    def joined(cls, parts: Sequence[Histogram]) -> Histogram:
        """What `parts` counted, counted by one."""
        whole = cls()
        for part in parts:
            part._fold()
            whole.count += part.count
            whole.total += part.total
            for at, count in part._bins.items():
                whole._bins[at] = whole._bins.get(at, 0) + count
        return whole

    @property
    def summary(self) -> dict[str, float]:
        """As `summary`, of everything counted."""
        if not self.count:
            return dict(NOTHING)
        self._fold()
        bins = sorted(self._bins.items())
        below = np.cumsum([n for _, n in bins])
        result = {"mean": self.total / self.count}
        for name, share in QUANTILES.items():
            at = int(np.searchsorted(below, share * self.count))
            result[name] = math.exp((bins[at][0] + 0.5) * self.WIDTH)
        return result


class Series:
    """A quantity over time as at most `points` time-weighted means of equal intervals.

    When the last interval is full, neighbours are merged and intervals double.
    """

    def __init__(self, points: int = 128) -> None:
        self.points = points
        self.interval_s = 1e-3
        self._integral = 0.0
        self._sums = np.zeros(points)
        # The value that the quantity last had, and since and until when.
        self._value, self._since_s, self._until_s = 0.0, 0.0, 0.0
        # What is not in the sums yet: single stretches, and many one after another.
        self._stretches: list[tuple[float, float, float]] = []
        self._waiting: list[tuple[Floats, Floats, Floats]] = []
        self._held = 0

    def add(self, start_s: float, end_s: float, value: float) -> None:
        """The quantity had this value from `start_s` to `end_s`."""
        if value == self._value and start_s == self._until_s:
            self._until_s = end_s
            return
        self._close()
        self._value, self._since_s, self._until_s = value, start_s, end_s

    def add_all(self, start_s: float, ends_s: Floats, values: npt.NDArray[np.int64]) -> None:
        """The quantity had each of `values` until its end, the first from `start_s` on."""
        starts = np.concatenate(([start_s], ends_s[:-1]))
        self._waiting.append((starts, ends_s, values.astype(float)))
        self._held += len(ends_s)
        if self._held > HELD:
            self._fold()

    @property
    def integral(self) -> float:
        """Integral over time."""
        self._close()
        self._fold()
        return self._integral

    def _close(self) -> None:
        if self._value and self._until_s > self._since_s:
            self._stretches.append((self._since_s, self._until_s, self._value))
            self._held += 1
            if self._held > HELD:
                self._fold()
        self._since_s = self._until_s

    def _fold(self) -> None:
        parts = self._waiting
        if self._stretches:
            singles = np.array(self._stretches).T
            parts = [*parts, (singles[0], singles[1], singles[2])]
        if not parts:
            return
        starts, ends, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = starts.argsort(kind="stable")
        starts, ends, values = starts[order], ends[order], values[order]
        areas = values * (ends - starts)
        self._integral += float(areas.sum())
        while ends[-1] > self.interval_s * self.points:
            half = self._sums.reshape(-1, 2).sum(axis=1)
            self._sums = np.concatenate([half, np.zeros(self.points - len(half))])
            self.interval_s *= 2
        # The area up to a time grows linearly within a stretch and stands still between two.
        until = np.stack([starts, ends], axis=1).ravel()
        area = np.stack([np.cumsum(areas) - areas, np.cumsum(areas)], axis=1).ravel()
        first = min(int(starts[0] / self.interval_s), self.points - 1)
        last = min(int(ends[-1] / self.interval_s), self.points - 1)
        edges = np.arange(first, last + 2) * self.interval_s
        edges[-1] = max(edges[-1], ends[-1])
        self._sums[first : last + 1] += np.diff(np.interp(edges, until, area))
        self._waiting, self._stretches, self._held = [], [], 0

    @classmethod
    def joined(cls, parts: Sequence[Series]) -> Series:
        """The sum of `parts` over the same time, each of as many points."""
        whole = cls(parts[0].points)
        for part in parts:
            part._close()
            part._fold()
        whole.interval_s = max(part.interval_s for part in parts)
        for part in parts:
            # Intervals only ever double.
            merged = round(whole.interval_s / part.interval_s)
            sums = np.pad(part._sums, (0, -len(part._sums) % merged))
            sums = sums.reshape(-1, merged).sum(axis=1)
            whole._sums[: len(sums)] += sums
            whole._integral += part._integral
        return whole

    def means(self, until_s: float) -> tuple[Floats, Floats]:
        """Where the intervals up to `until_s` start, and the quantity's mean in each."""
        self._close()
        self._fold()
        # A sliver of an interval would hold nothing but rounding.
        count = min(self.points, max(math.ceil(until_s / self.interval_s - 1e-9), 1))
        starts = np.asarray(np.arange(count) * self.interval_s, float)
        widths = np.minimum(until_s - starts, self.interval_s)
        return starts, self._sums[:count] / np.where(widths > 0, widths, 1)


REQUEST_COLUMNS: Mapping[str, str] = {
    "index": "q", "sequence": "q", "prompt_tokens": "q", "tokens": "q", "arrival_s": "d",
    "first_s": "d", "finish_s": "d", "rounds": "q", "drafted": "q", "accepted": "q",
    "draft_forwards": "q", "preemptions": "q", "replica": "q",
}  # fmt: skip
"""Columns of a run's request table and their array codes."""


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

        That is what a server puts around a request: all of it stands behind the arrival at the
        engine, where some of it lies before.
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
