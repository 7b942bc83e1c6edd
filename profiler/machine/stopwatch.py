"""Seconds a piece of work takes on a device, and the part of them that it had no processor.

On a CPU, wall time beyond the thread's own processor time is time in which the thread was
descheduled, or the virtual machine was.  On a GPU the host waits for the device, which looks
the same: there time without a processor counts only together with involuntary switches.  With
several threads the calling one alone is watched; a worker that others hold up shows as the
caller's wait, or not at all where the caller spins.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from traces.machine import DISTURBED

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def involuntary_switches() -> int:
    """Times that the system took the processor from this thread (or process); 0 if unknown."""
    if resource is None:
        return 0
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


class Clock(NamedTuple):
    """Where seconds and switches are read."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.thread_time
    switches: Callable[[], int] = involuntary_switches


class Timing(NamedTuple):
    """The time of one run."""

    wall_s: float
    off_s: float = 0.0
    """Seconds of these that it had no processor."""
    switches: int = 0
    """Involuntary context switches."""

    @property
    def off(self) -> float:
        """Share of the time that it had no processor."""
        return self.off_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def disturbed(self) -> bool:
        """Return True if that share is too large for the wall time to represent the run."""
        return self.off > DISTURBED

    @property
    def seconds(self) -> float:
        """Wall seconds; of a disturbed run those in which it had the processor."""
        return self.wall_s - self.off_s if self.disturbed else self.wall_s

    def __add__(self, other: object) -> Timing:
        """Both, one after the other."""
        if not isinstance(other, Timing):
            return NotImplemented
        return Timing(
            self.wall_s + other.wall_s, self.off_s + other.off_s, self.switches + other.switches
        )


class Stopwatch:
    """Times calls on a device: host clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._cuda, self._clock = device.type == "cuda", clock or Clock()

    def measure(self, run: Callable[[], object]) -> Timing:
        """Run once; the device is idle before and after."""
        wall, cpu, switches = self._clock
        if self._cuda:
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before, on = switches(), cpu()
        begin = wall()
        if self._cuda:
            start.record()
        run()
        if self._cuda:
            stop.record()
            torch.cuda.synchronize()
        taken = wall() - begin
        off = max(0.0, taken - (cpu() - on))
        count = switches() - before
        if self._cuda:
            taken = float(start.elapsed_time(stop)) / 1e3
            off = min(off, taken) if count else 0.0
        return Timing(taken, off, count)

    def time(self, run: Callable[[], object]) -> float:
        """`Timing.seconds` of a run."""
        return self.measure(run).seconds


class Span:
    """The time a block took, once it is over; called, its seconds."""

    timing = Timing(0.0)

    def __call__(self) -> float:
        """`Timing.seconds` of the block."""
        return self.timing.seconds


@contextmanager
def timed(device: torch.device, clock: Clock | None = None) -> Iterator[Span]:
    """Time a block, garbage collection kept out of it."""
    wall, cpu, switches = clock or Clock()
    gc.collect(0)
    gc.disable()
    span, cuda = Span(), device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    before, on = switches(), cpu()
    begin = wall()
    try:
        yield span
    finally:
        if cuda:
            torch.cuda.synchronize(device)
        taken = wall() - begin
        off, count = max(0.0, taken - (cpu() - on)), switches() - before
        span.timing = Timing(taken, 0.0 if cuda and not count else off, count)
        gc.enable()
