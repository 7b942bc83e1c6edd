"""Runs that were disturbed are made again, as long as a budget lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from profiler.machine.stopwatch import Timing

Run = TypeVar("Run")

MOST = 3
"""Times a run is made again."""
WARMING = 1
"""Sweeps that warm up before those that count."""


def sweeps(repeats: int, times: int = 1) -> range:
    """Numbers of the sweeps of a measurement: those below 0 warm up, `times` as many as usual."""
    return range(-WARMING * times, repeats)


@dataclass
class Repeats:
    """Keeps the least disturbed of a run's repeats, and counts.

    Parameters
    ----------
    share:
        Runs made again per run, over all runs so far: the budget.
    """

    share: float = 0.5
    runs: int = field(default=0, init=False)
    disturbed: int = field(default=0, init=False)
    repeated: int = field(default=0, init=False)
    kept: Timing = field(default=Timing(0.0), init=False)
    """All kept runs, one after the other."""

    def best(self, run: Callable[[], tuple[Timing, Run]]) -> tuple[Timing, Run]:
        """Make a run, again while it is disturbed; what the least disturbed one returned."""
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


def counts(repeats: Sequence[Repeats]) -> dict[str, Any]:
    """Return the figures of `traces.machine` that describe runs, over several counters."""
    kept = sum((r.kept for r in repeats), Timing(0.0))
    return {
        "runs": sum(r.runs for r in repeats),
        "disturbed": sum(r.disturbed for r in repeats),
        "repeated": sum(r.repeated for r in repeats),
        "off": kept.off,
        "switches": kept.switches,
    }
