"""Records of a run: a row per finished request, counters, and statistics of fixed size."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from policies.arrays import Floats, Ints
from policies.core import Round
from simulator.serving.sequence import Slot

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
COMPARED = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Quantiles that predicted and measured requests are compared at."""


def summary(values: Floats, quantiles: Mapping[str, float] = QUANTILES) -> dict[str, float]:
    """Return the mean and the `quantiles` of `values`; NaN if there are no values."""
    if not len(values):
        return {"mean": math.nan, **dict.fromkeys(quantiles, math.nan)}
    at = np.quantile(values, list(quantiles.values()))
    return {"mean": float(values.mean()), **dict(zip(quantiles, at.tolist(), strict=True))}


def compared(
    predicted: Mapping[str, Floats], measured: Mapping[str, Floats]
) -> list[dict[str, Any]]:
    """Return a row for each statistic of each metric of the same requests, with its error."""
    found = []
    for metric, values in measured.items():
        if not len(values):  # no output has a second token
            continue
        ours = summary(np.asarray(predicted[metric], dtype=float), COMPARED)
        found += [
            {
                "metric": metric, "statistic": name, "predicted": ours[name], "measured": value,
                "error": ours[name] / value - 1 if value else math.nan,
            }
            for name, value in summary(values, COMPARED).items()
        ]  # fmt: skip
    return found


class Histogram:
    """Counts of positive values in bins 0.5% wide; size grows with the range alone.

    The mean is exact, quantiles are within 0.25%.
    """

    WIDTH = math.log(1.005)

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times; values below a nanosecond share one bin."""
        self.count += times
        self.total += value * times
        at = math.floor(math.log(value if value > 1e-9 else 1e-9) / self.WIDTH)
        self._bins[at] += times

    def add_bins(self, bins: Mapping[int, int], total: float) -> None:
        """Count values by bin, floor(log(value) / `WIDTH`), which add up to `total`."""
        self.count += sum(bins.values())
        self.total += total
        self._bins.update(bins)

    @classmethod
    def joined(cls, parts: Sequence[Histogram]) -> Histogram:
        """Return the counts of `parts` added up."""
        whole = cls()
        for part in parts:
            whole.add_bins(part._bins, part.total)
        return whole

    @property
    def summary(self) -> dict[str, float]:
        """As `summary`, of everything counted."""
        if not self.count:
            return summary(np.empty(0))
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

    Attributes
    ----------
    interval_s, integral:
        Seconds of an interval, and the integral over time.
    """

    def __init__(self, points: int = 128) -> None:
        self.points = points
        self.interval_s = 1e-3
        self.integral = 0.0
        self._sums = np.zeros(points)

    @classmethod
    def of(cls, sums: Floats, interval_s: float, integral: float) -> Series:
        """Return a series with these integrals over its intervals, all as long, and over all."""
        series = cls(len(sums))
        series._sums, series.interval_s, series.integral = sums, interval_s, integral
        return series

    def add(self, start_s: float, end_s: float, value: float) -> None:
        """Note that the quantity had this value from `start_s` to `end_s`."""
        area = value * (end_s - start_s)
        self.integral += area
        self._reach(end_s)
        most = self.points - 1
        first, last = (min(int(at / self.interval_s), most) for at in (start_s, end_s))
        if first == last:
            self._sums[first] += area
            return
        edges = np.arange(first, last + 2) * self.interval_s
        edges[0], edges[-1] = start_s, end_s
        self._sums[first : last + 1] += value * np.diff(edges)

    def _reach(self, until_s: float) -> None:
        """Double the intervals until they cover the time up to `until_s`."""
        while until_s > self.interval_s * self.points:
            half = self._sums.reshape(-1, 2).sum(axis=1)
            self._sums = np.concatenate([half, np.zeros(self.points - len(half))])
            self.interval_s *= 2

    @classmethod
    def joined(cls, parts: Sequence[Series]) -> Series:
        """Return the sum of `parts` over the same time, each of as many points."""
        whole = cls(parts[0].points)
        whole.interval_s = max(part.interval_s for part in parts)
        for part in parts:
            # Intervals only ever double.
            merged = round(whole.interval_s / part.interval_s)
            sums = np.pad(part._sums, (0, -len(part._sums) % merged))
            sums = sums.reshape(-1, merged).sum(axis=1)
            whole._sums[: len(sums)] += sums
            whole.integral += part.integral
        return whole

    def means(self, until_s: float) -> tuple[Floats, Floats]:
        """Return where the intervals up to `until_s` start, and the quantity's mean in each."""
        self._reach(until_s)
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
COUNTS = (
    "arrived", "rejected", "in_system", "carried", "peak_batch", "iterations", "length_changes",
    "busy_s", "area_s", "tokens", "drafted", "accepted", "draft_forwards",
)  # fmt: skip
"""Numbers of a record that replicas add up; of the most that ran at a time, the sum bounds it."""


class CutOff(NamedTuple):
    """Requests in the system when a bound of time ended the run; arrays of shape (requests,)."""

    number: Ints
    """Place in the order of arrival."""
    arrival_s: Floats
    first_s: Floats
    """Time of the first token, negative if there is none yet."""
    output_tokens: Ints


@dataclass(eq=False)
class RunRecorder:
    """Records of a run.  Memory grows by one row per finished request, and by nothing else.

    Warm-up rule: every latency leaves out the first `skip` requests by order of arrival.
    In a closed loop these are at least two for each client, because all clients begin at once
    (`simulator.serving.scenario.Scenario`).

    Throughput is measured from the arrival of the first request kept to the arrival of the last of
    `expected`, so the filling and the draining of the engine do not count.  If all requests arrive
    at once there is no such interval, and if they arrive in less than half of the run (overload) it
    is mostly filling: throughput is then that of the whole run.
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
    start_s: float = 0.0
    """Start of the measured interval, and ``start_tokens`` emitted by then."""
    end_s: float = math.nan
    start_tokens: int = 0
    end_tokens: int = 0
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

    def mark(self, index: int, now: float, tokens: int) -> None:
        """Note that request `index` arrived, here or at another replica, when this one had emitted
        `tokens`.  The arrival may be an end of the window.
        """
        if index == self.skip:
            self.start_s, self.start_tokens = now, tokens
        if index == self.expected - 1:
            self.end_s, self.end_tokens = now, tokens

    def enter(self, now: float, change: int) -> None:
        """Note that the number in the system changed by `change`."""
        self.area_s += self.in_system * (now - self._changed_s)
        self._changed_s = now
        self.in_system += change

    def leave(self, slot: Slot, now: float, around_s: float = 0.0) -> None:
        """Note that a request got its last token, of which its client knows `around_s` later.

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

    def count_round(self, slot: Slot, outcome: Round) -> None:
        """Add a finished round to the counts of its request and of the run."""
        _, drafted, accepted, emitted, forwards, _ = outcome
        slot.steps += 1
        slot.context += emitted
        slot.tokens += emitted
        slot.drafted += drafted
        slot.accepted += accepted
        slot.draft_forwards += forwards
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.draft_forwards += forwards

    def gap(self, slot: Slot, gap_s: float) -> None:
        """Note that a request got tokens `gap_s` after the last ones."""
        if slot.index >= self.skip:
            self.itl.add(gap_s)


def joined_recorders(recorders: Sequence[RunRecorder]) -> RunRecorder:
    """Return the records of replicas that saw the same window as one, in order of finishing."""
    first = recorders[0]
    joined = RunRecorder(
        first.skip, first.expected, requests=_requests([r.requests for r in recorders]),
        itl=Histogram.joined([r.itl for r in recorders]),
        batch=Series.joined([r.batch for r in recorders]),
        kv_blocks=Series.joined([r.kv_blocks for r in recorders]),
        start_s=first.start_s, end_s=first.end_s,
    )  # fmt: skip
    for name in (*COUNTS, "start_tokens", "end_tokens"):
        setattr(joined, name, sum(getattr(r, name) for r in recorders))
    return joined


def _requests(parts: Sequence[dict[str, array[Any]]]) -> dict[str, array[Any]]:
    columns = {name: np.concatenate([np.array(p[name]) for p in parts]) for name in REQUEST_COLUMNS}
    order = np.argsort(columns["finish_s"], kind="stable")
    return {
        name: array(code, columns[name][order].tobytes()) for name, code in REQUEST_COLUMNS.items()
    }
