"""Latencies measured again between real runs, so that drift falls on both sides alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from profiler.models.loading import Pair
    from profiler.sources.modules import Modules
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

SWEEPS = 15
"""Latency sweeps spread over the real runs."""


class Remeasured:
    """Sweeps over the latencies of a pair, block by block between real runs.

    Parameters
    ----------
    total:
        Steps of real work to come, as fine as possible.
    trace:
        What is decoded: how long requests get, and text to look up.
    modules:
        Trained modules of the target: the cells of sources are measured too.
    """

    def __init__(
        self, pair: Pair, total: int, trace: Trace, modules: Modules | None = None
    ) -> None:
        from commands.profile.source_runs import timed_layers
        from profiler.latency.table import Grid
        from profiler.profile import LatencyProfile
        from profiler.sources.latency import SourceLatency

        self._profile = LatencyProfile(pair, Grid().holding(trace.requests))
        self._sources = None
        if modules is not None:
            layers = timed_layers(pair, trace.longest, modules.trees)
            self._sources = SourceLatency(layers, modules, trace)
        self._total, self._done = total, 0

    def advance(self) -> None:
        """A step of real work is done; perhaps some blocks of a sweep are due.

        Sweeps are cut into their blocks, so that passes are timed at as many moments as runs
        are: where the machine is slow for seconds, whole sweeps fall beside it.
        """
        self._done += 1
        share = SWEEPS * self._done / self._total
        while self._profile.sweeps.steps < int(share * len(self._profile.sweeps.blocks)):
            self._profile.step()
        if self._sources is not None:
            self._sources.advance(share)

    def compare(
        self, logs: Sequence[RoundLog], times: pd.DataFrame, latency: LatencyTable, run: Path
    ) -> pd.DataFrame:
        """`simulator.validation.compare` from these latencies, which are kept in `run`.

        The column ``profile_error`` is the error from the run's own, ``latency``.
        """
        from commands.profile.source_runs import with_sources
        from simulator.pricing import price
        from simulator.validation import compare
        from traces.store.files import CHECKED, write_latency

        now = self._profile.table()
        if self._sources is not None:
            now = with_sources(now, self._sources.cells())
        rows = compare([price(log, now) for log in logs], times)
        before = compare([price(log, latency) for log in logs], times)
        write_latency(now, run / CHECKED)
        return rows.assign(profile_error=before["error"])
