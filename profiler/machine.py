"""Seconds that work takes on a device, and the part of them without a processor.

On a CPU, wall time beyond the thread's own processor time is time in which the thread was
descheduled, or the virtual machine was.  On a GPU the host waits for the device, which looks
the same: there time without a processor counts only together with involuntary switches.  With
several threads the calling one alone is watched; a worker that others hold up shows as the
caller's wait, or not at all where the caller spins.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from policies.arrays import half_iqr
from traces.errors import DraftsimError
from traces.machine import DISTURBED

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def involuntary_switches() -> int:
    """Return how often the system took the processor from this thread; 0 if unknown."""
    if resource is None:
        return 0
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(who).ru_nivcsw


Run = TypeVar("Run")


class Timing(NamedTuple):
    """The time of one run."""

    wall_s: float
    off_s: float = 0.0
    """Seconds without a processor."""
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
        """Return both as one timing."""
        if not isinstance(other, Timing):
            return NotImplemented
        return Timing(
            self.wall_s + other.wall_s, self.off_s + other.off_s, self.switches + other.switches
        )


class Stopwatch:
    """Times calls on a device: host clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def measure(self, run: Callable[[], Run]) -> tuple[Timing, Run]:
        """Run once; return the time and the result.  The device is idle before and after."""
        if self._cuda:
            found: list[Run] = []
            [taken] = self._marked([lambda: found.append(run())])
            return taken, found[0]
        read = _started()
        result = run()
        return read(), result

    def each(self, runs: Sequence[Callable[[], object]]) -> list[Timing]:
        """Run one call after another; the device is idle before the first and after the last.

        On a GPU the host does not wait between them: it prepares a call while the device still
        runs the one before, as in a round of decoding.
        """
        return self._marked(runs) if self._cuda else [self.measure(run)[0] for run in runs]

    def _marked(self, runs: Sequence[Callable[[], object]]) -> list[Timing]:
        """Return the times between events on a GPU's stream."""
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        read = _started()
        marks[0].record()
        for run, mark in zip(runs, marks[1:], strict=True):
            run()
            mark.record()
        torch.cuda.synchronize()
        _, off, count = read()
        taken = [float(start.elapsed_time(stop)) / 1e3 for start, stop in pairwise(marks)]
        whole = sum(taken)
        share = min(off / whole, 1.0) if count and whole > 0 else 0.0
        return [Timing(t, share * t, 0 if i else count) for i, t in enumerate(taken)]


def _started() -> Callable[[], Timing]:
    """Start a clock of the host; a call returns the time since then."""
    before = involuntary_switches()

    def read() -> Timing:
        taken = perf_counter() - begin
        off = max(0.0, taken - (thread_time() - on))
        return Timing(taken, off, involuntary_switches() - before)

    on, begin = thread_time(), perf_counter()
    return read


def timed(device: torch.device, run: Callable[[], Run]) -> tuple[Timing, Run]:
    """Return the time of `run` without garbage collection, and its result."""
    gc.collect(0)
    gc.disable()
    try:
        return Stopwatch(device).measure(run)
    finally:
        gc.enable()


class NoTimeError(DraftsimError):
    """The time for a measurement is over; another run can continue it."""


MOST = 3
"""Most repeats of a disturbed run."""
WARMING = 1
"""Sweeps that warm up before those that count."""


def sweeps(repeats: int, times: int = 1) -> range:
    """Return a measurement's numbers of sweeps; below 0 they warm up, `times` as many as usual."""
    return range(-WARMING * times, repeats)


@dataclass
class Repeats:
    """Keeps the least disturbed of a run's repeats, and counts.

    ``share``: runs made again per run, over all runs so far: the budget.
    """

    share: float = 0.5
    runs: int = field(default=0, init=False)
    disturbed: int = field(default=0, init=False)
    repeated: int = field(default=0, init=False)
    kept: Timing = field(default=Timing(0.0), init=False)
    """All kept runs, one after the other."""

    def best(self, run: Callable[[], tuple[Timing, Run]]) -> tuple[Timing, Run]:
        """Make a run, again while it is disturbed; return the result of the least disturbed one."""
        self.runs += 1
        best = run()
        self.disturbed += best[0].disturbed
        again = 0
        while best[0].disturbed and again < MOST and self.repeated < self.share * self.runs:
            again += 1
            self.repeated += 1
            other = run()
            if other[0].off < best[0].off:
                best = other
        self.kept += best[0]
        return best


STAT = Path("/proc/stat")


class Machine:
    """Keeps the figures of `traces.machine` while something is measured.

    The reference work reads every weight matrix of the target once, by a product with a vector.
    It uses memory like a decoding pass, without the rest of the model.

    ``model``, ``device``: the target, and where it runs.

    Attributes
    ----------
    taken: Seconds of the reference work, every time it was done.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._watch, self._work = Stopwatch(device), matrix_vector_products(model)
        self.taken: list[float] = []
        self._warm = False
        self._since = read_stat(), perf_counter(), os.times()

    def pulse(self) -> None:
        """Time the reference work once; the first time, warm up before it."""
        if self._work is None:
            return
        if not self._warm:
            self._work()
            self._warm = True
        self.taken.append(self._watch.measure(self._work)[0].seconds)

    def state(self, repeats: Sequence[Repeats]) -> dict[str, Any]:
        """Return the figures so far, those of runs from their counters."""
        kept, middle, spread = sum((r.kept for r in repeats), Timing(0.0)), None, None
        if self.taken:
            middle, spread = float(np.median(self.taken)), float(half_iqr(self.taken))
        return {
            "runs": sum(r.runs for r in repeats),
            "disturbed": sum(r.disturbed for r in repeats),
            "repeated": sum(r.repeated for r in repeats),
            "off": kept.off, "switches": kept.switches, **self._others(),
            "reference_s": middle, "reference_spread_s": spread,
        }  # fmt: skip

    def _others(self) -> dict[str, float | None]:
        """Return steal and other work since the beginning."""
        before, begin, own = self._since
        now, wall, spent = read_stat(), perf_counter() - begin, os.times()
        if before is None or now is None or wall <= 0:
            return {"steal": None, "others": None}
        change = now - before
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = float(change[[0, 1, 2, 5, 6]].sum()) / ticks
        mine = spent.user + spent.system - own.user - own.system
        return {
            "steal": float(change[7] / max(change[:8].sum(), 1)),
            "others": max(0.0, (busy - mine) / wall),
        }


def read_stat(path: Path = STAT) -> Any:
    """Read the processors' time by kind, in ticks, as an array; None if there is no such file."""
    try:
        fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        values = np.array(fields, dtype=np.int64)
    except (OSError, ValueError):
        return None
    return values if len(values) >= 8 else None


def matrix_vector_products(model: torch.nn.Module) -> Callable[[], object] | None:
    """Return a product of each weight matrix of `model` with a vector; None if it has none."""
    matrices = [p.detach() for p in model.parameters() if p.ndim == 2 and p.is_floating_point()]
    if not matrices:
        return None
    vectors = {m.shape[1]: m.new_ones(m.shape[1]) for m in matrices}

    def run() -> None:
        with torch.inference_mode():
            for matrix in matrices:
                torch.mv(matrix, vectors[matrix.shape[1]])

    return run
