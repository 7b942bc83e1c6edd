"""Turns rounds into seconds: pricing, closed forms, batching and queueing."""

from simulator.pricing import PassCount, Priced, autoregressive, price
from simulator.ratios import RatioCurve, draft_histogram, price_ratios

__all__ = [
    "PassCount",
    "Priced",
    "RatioCurve",
    "autoregressive",
    "draft_histogram",
    "price",
    "price_ratios",
]
