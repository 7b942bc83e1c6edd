"""Pricing speed: 10,000 cost ratios over a log of 150,000 tokens, the aim under 50 ms.

Run with ``make bench``, or ``pytest benchmarks/bench_pricing.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import Fixed
from simulator.pricing import price
from simulator.ratios import ratio_costs
from simulator.summary import summarize
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable, as_cells
from traces.replay.rounds import RoundLog
from traces.replay.run import replay


@pytest.fixture(scope="module")
def log() -> RoundLog:
    return replay(synthetic_trace(0.8, requests=300, tokens=500), Fixed(5))


@pytest.fixture(scope="module")
def latency() -> LatencyTable:
    """Return a measured table's shape: both models over widths and contexts."""
    rows = [
        (model, "forward", 1, width, context, base * (1 + width / 50 + context / 4000), 0.0, 9)
        for model, base in (("target", 0.01), ("draft", 0.002))
        for width in (1, 2, 3, 5, 9, 17, 25)
        for context in (0, 64, 256, 1024)
    ]
    return LatencyTable(as_cells(rows))


def test_cost_ratios(benchmark: Any, log: RoundLog) -> None:
    ratios = np.linspace(0.001, 1, 10_000)
    costs = benchmark(lambda: ratio_costs(log).at(ratios, 1.2))
    assert costs.shape == (10_000, 300)


def test_price(benchmark: Any, log: RoundLog, latency: LatencyTable) -> None:
    assert benchmark(price, log, latency).total_s > 0


def test_summarize(benchmark: Any, log: RoundLog, latency: LatencyTable) -> None:
    assert len(benchmark(summarize, [log], latency)) == 2
