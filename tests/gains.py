"""The gain of one log over another, both priced at one latency table."""

from __future__ import annotations

from simulator.summary import gains_over, price_all
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog


def paired_gain(
    log: RoundLog, other: RoundLog, latency: LatencyTable, *, resamples: int = 2000
) -> tuple[float, float, float]:
    """Return seconds per token of `other` over those of `log`, with the interval of that ratio."""
    _, run, rival = price_all([log, other], latency)
    return gains_over(rival, [run], resamples=resamples)[0]
