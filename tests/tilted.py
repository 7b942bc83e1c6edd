"""A recording of easy and hard stretches, and what tilts it to another acceptance."""

from __future__ import annotations

from functools import cache
from typing import Any

from simulator.whatif.tilt import Tilter
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace


@cache
def bursty(seed: int = 0, easy: float = 0.95, hard: float = 0.4) -> Trace:
    """Easy and hard stretches, with signals that say part of it."""
    return synthetic_trace(
        Bursty(easy, hard), requests=30, tokens=150, concentration=8.0, seed=seed, eos_fraction=0.3
    )


@cache
def tilter(method: Any = "coupled") -> Tilter:
    return Tilter(bursty(), method)
