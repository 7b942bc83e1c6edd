"""Predictions from totals: tokens a second and acceptance of whole runs, without a trace."""

from simulator.aggregate.acceptance import (
    TwoState,
    emitted_of_rate,
    emitted_rows,
    iid_mean,
    known_totals,
)
from simulator.aggregate.hazard import Interval, emitted_at

__all__ = [
    "Interval",
    "TwoState",
    "emitted_at",
    "emitted_of_rate",
    "emitted_rows",
    "iid_mean",
    "known_totals",
]
