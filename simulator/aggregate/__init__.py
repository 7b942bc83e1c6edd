"""Predictions from totals: tokens a second and acceptance of whole runs, without a trace."""

from simulator.aggregate.acceptance import TwoState, iid_mean
from simulator.aggregate.hazard import Interval, emitted_at
from simulator.aggregate.rates import emitted_of_rate, emitted_rows, known_totals

__all__ = [
    "Interval",
    "TwoState",
    "emitted_at",
    "emitted_of_rate",
    "emitted_rows",
    "iid_mean",
    "known_totals",
]
