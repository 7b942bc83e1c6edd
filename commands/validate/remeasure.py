"""Latencies measured again between real runs, so that drift falls on both sides alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from profiler.models.loading import Pair
    from profiler.recording.checkpoint import Checkpoint
    from profiler.sources.modules import Modules
    from simulator.pricing import Priced
    from traces.acceptance.trace import Trace
    from traces.replay.rounds import RoundLog

SWEEPS = 15
"""Latency sweeps spread over the real runs, where they are cheap."""
FEWEST = 3
"""Where a sweep is dear: a large model's takes minutes."""
SHARE = 0.5
"""Share of the real runs' seconds that sweeps may take before there are fewer of them."""


class Remeasured:
    """Sweeps over the latencies of a pair: the first at once, the others block by block.

    Those come between real runs, as many as are to be had for half of the runs' time.  Whole
    sweeps are kept with the real runs, so that a stopped check goes on with both; of the sweep
    under way its blocks are timed again at once.

    Parameters
    ----------
    total, expected_s:
        Steps of real work to come, as fine as possible, and about how long all of it takes.
    trace:
        What is decoded: how long requests get, and text to look up.
    modules:
        Trained modules of the target: the cells of sources are measured too.
    kept:
        Of the real runs.
    """

    def __init__(
        self, pair: Pair, total: int, expected_s: float, trace: Trace,
        kept: Checkpoint, modules: Modules | None = None,
    ) -> None:  # fmt: skip
        from commands.profile.source_modules import timed_layers
        from profiler.latency.table import Grid
        from profiler.profile import LatencyProfile
        from profiler.sources.latency import SourceLatency

        passes = kept.within("passes")
        self._profile = LatencyProfile(pair, Grid().holding(trace.requests), passes)
        self._sources = None
        if modules is not None:
            layers = timed_layers(pair, trace.longest, modules.trees)
            own = kept.within("sources")
            self._sources = SourceLatency(layers, modules, trace, checkpoint=own)
        self._total, self._done = total, 0
        if (planned := passes.get("planned")) is None:
            began = time.perf_counter()
            self._sweep_until(1.0)
            fit = int(SHARE * expected_s / (time.perf_counter() - began))
            planned = {"sweeps": np.array(min(max(fit, FEWEST), SWEEPS))}
            passes.put("planned", planned)
        self._sweeps = int(planned["sweeps"])

    def advance(self) -> None:
        """A step of real work is done; perhaps some blocks of a sweep are due.

        Sweeps are cut into their blocks, so that passes are timed at as many moments as runs are:
        where the machine is slow for seconds, whole sweeps would miss it.
        """
        self._done += 1
        self._sweep_until(self._sweeps * self._done / self._total)

    def _sweep_until(self, share: float) -> None:
        """Time the next blocks until `share` sweeps are done; a part of one counts."""
        while self._profile.sweeps.steps < int(share * len(self._profile.sweeps.blocks)):
            self._profile.step()
        if self._sources is not None:
            self._sources.advance(share)

    def compare(
        self, logs: Sequence[RoundLog], times: pd.DataFrame, expected: Sequence[Priced], run: Path
    ) -> pd.DataFrame:
        """`simulator.validation.compare` from these latencies, which are kept in `run`.

        ``profile_error`` and ``profile_speedup_error`` are the errors of what was `expected`.
        """
        from commands.profile.source_modules import with_sources
        from simulator.pricing import price
        from simulator.validation import compare
        from traces.store.files import CHECKED, write_latency

        now = self._profile.table()
        if self._sources is not None:
            now = with_sources(now, self._sources.cells())
        rows = compare([price(log, now) for log in logs], times)
        write_latency(now, run / CHECKED)
        before = compare(expected, times)
        return rows.assign(
            profile_error=before["error"], profile_speedup_error=before["speedup_error"]
        )


def seconds_of(priced: Sequence[Priced]) -> float:
    """Return how long all of these runs take, one after another."""
    return sum(p.total_s + float(p.prefill_s.sum()) for p in priced)
