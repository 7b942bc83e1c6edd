"""Compile the serving loop ahead of time: ``python -m simulator.serving.compiled``."""

from __future__ import annotations

from policies.lengths.basic import Fixed
from simulator.serving.arrivals import ClosedLoop
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable

if __name__ == "__main__":
    simulate(
        synthetic_trace(0.5, requests=1, tokens=4), LatencyTable.constant(0.02, 0.002, 0.025),
        Fixed(2), Scenario(ClosedLoop(1), requests=1),
    )  # fmt: skip
