"""What totals tell: tokens a second and acceptance of whole runs, without a trace or a profile."""

from simulator.aggregate.acceptance import Interval, TwoState, emitted_at, iid_mean, unevenness

__all__ = ["Interval", "TwoState", "emitted_at", "iid_mean", "unevenness"]
