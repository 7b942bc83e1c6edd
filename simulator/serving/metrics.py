"""What a run leaves behind: rows per finished request and statistics of fixed size."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.serving.sequence import Slot

Floats = npt.NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
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

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times; values below a nanosecond share one bin."""
        self.count += times
        self.total += value * times
        at = math.floor(math.log(value if value > 1e-9 else 1e-9) / self.WIDTH)
        self._bins[at] = self._bins.get(at, 0) + times

    def add_all(self, values: list[float], times: int) -> None:
        """Count each of `values` `times` times."""
        self.count += times * len(values)
        self.total += sum(values) * times
        bins, log, floor, width = self._bins, math.log, math.floor, self.WIDTH
        for value in values:
            at = floor(log(value if value > 1e-9 else 1e-9) / width)
            bins[at] = bins.get(at, 0) + times

    @property
    def summary(self) -> dict[str, float]:
        """As `summary`, of everything counted."""
        if not self.count:
            return dict(NOTHING)
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
        self._sums = [0.0] * points
        # The value that the quantity last had, and since and until when.
        self._value, self._since_s, self._until_s = 0.0, 0.0, 0.0

    def add(self, start_s: float, end_s: float, value: float) -> None:
        """The quantity had this value from `start_s` to `end_s`."""
        if value == self._value and start_s == self._until_s:
            self._until_s = end_s
            return
        self._settle()
        self._value, self._since_s, self._until_s = value, start_s, end_s

    def add_all(self, start_s: float, ends_s: Floats, values: npt.NDArray[np.int64]) -> None:
        """The quantity had each of `values` until its end, the first from `start_s` on."""
        end_s = float(ends_s[-1])
        if int(start_s / self.interval_s) != int(end_s / self.interval_s):
            for until_s, value in zip(ends_s.tolist(), values.tolist(), strict=True):
                self.add(start_s, until_s, value)
                start_s = until_s
            return
        # All of it in one interval, the usual case: no need to go through it.
        self._settle()
        area = float(values @ np.diff(ends_s, prepend=start_s))
        if end_s > self.interval_s * self.points:
            self._widen(end_s)
        self._integral += area
        if area:
            self._sums[min(int(start_s / self.interval_s), self.points - 1)] += area
        self._value, self._since_s, self._until_s = 0.0, end_s, end_s

    @property
    def integral(self) -> float:
        """Integral over time."""
        self._settle()
        return self._integral

    def _settle(self) -> None:
        start_s, end_s, value = self._since_s, self._until_s, self._value
        self._since_s = end_s
        self._integral += value * (end_s - start_s)
        if not value or end_s <= start_s:
            return
        self._widen(end_s)
        width = self.interval_s
        first, last = int(start_s / width), min(int(end_s / width), self.points - 1)
        if first == last:
            self._sums[first] += value * (end_s - start_s)
            return
        for i in range(first, last + 1):
            self._sums[i] += value * (min(end_s, (i + 1) * width) - max(start_s, i * width))

    def _widen(self, end_s: float) -> None:
        while end_s > self.interval_s * self.points:
            pairs = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
            self._sums = pairs + [0.0] * (self.points - len(pairs))
            self.interval_s *= 2

    def to_frame(self, until_s: float) -> pd.DataFrame:
        """Columns ``time_s`` (start of the interval) and ``value`` (its mean)."""
        self._settle()
        count = min(self.points, max(math.ceil(until_s / self.interval_s), 1))
        starts = np.arange(count) * self.interval_s
        widths = np.minimum(until_s - starts, self.interval_s)
        sums = np.array(self._sums[:count])
        return pd.DataFrame({"time_s": starts, "value": sums / np.where(widths > 0, widths, 1)})


REQUEST_COLUMNS: Mapping[str, str] = {
    "index": "q", "sequence": "q", "prompt_tokens": "q", "tokens": "q", "arrival_s": "d",
    "first_s": "d", "finish_s": "d", "rounds": "q", "drafted": "q", "accepted": "q",
    "draft_forwards": "q", "preemptions": "q",
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
    peak_batch: int = 0
    """Most requests that ran at a time."""
    iterations: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_forwards: int = 0

    def arrive(self, now: float) -> int:
        """A request arrived; returns its index."""
        index = self.arrived
        if index == self.skip:
            self.window.start_s, self.window.start_tokens = now, self.tokens
        if index == self.expected - 1:
            self.window.end_s, self.window.end_tokens = now, self.tokens
        self.arrived += 1
        return index

    def enter(self, now: float, change: int) -> None:
        """The number in the system changed by `change`."""
        self.area_s += self.in_system * (now - self._changed_s)
        self._changed_s = now
        self.in_system += change

    def leave(self, slot: Slot, now: float) -> None:
        """A request got its last token."""
        self.enter(now, -1)
        row = (
            slot.index, slot.job.sequence, slot.job.prompt_tokens, slot.tokens, slot.arrival_s,
            slot.first_s, now, slot.steps, slot.drafted, slot.accepted, slot.draft_forwards,
            slot.preemptions,
        )  # fmt: skip
        for column, value in zip(self.requests.values(), row, strict=True):
            column.append(value)

    def gap(self, slot: Slot, gap_s: float) -> None:
        """A request got tokens `gap_s` after the last ones."""
        if slot.index >= self.skip:
            self.itl.add(gap_s)

    def to_frame(self) -> pd.DataFrame:
        """One row per finished request in order of finishing; times in seconds."""
        return pd.DataFrame({name: np.array(values) for name, values in self.requests.items()})
