"""Speed and memory of the serving simulator: simulated output tokens per second of one core.

Run with ``pytest benchmarks/bench_serving.py`` or ``python benchmarks/bench_serving.py``.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pandas as pd
import pytest

from policies.basic import Autoregressive, Fixed
from policies.batch import BatchPolicy
from policies.batch_tables import BatchTable
from policies.core import DraftPolicy
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from traces.latency import CELL_COLUMNS, LatencyTable
from traces.synthetic import synthetic_trace
from traces.trace import Trace

CONVERSATIONS = (
    Path(__file__).resolve().parents[2] / "shared" / "data" / "arrivals"
    / "AzureLLMInferenceTrace_conv.csv"
)  # fmt: skip


def measured_like_table() -> LatencyTable:
    """A grid of the size that profiling makes, with interpolation at nearly every pass."""
    rows = [
        (m, "forward", b, n, c, s * (0.012 + 6e-5 * b * n + 3e-8 * b * c), 0.0, 5)
        for m, s in (("target", 1.0), ("draft", 0.08))
        for b in (1, 2, 4, 8, 16, 32, 64) for n in (1, 2, 4, 8, 16) for c in (0, 256, 1024, 4096)
    ]  # fmt: skip
    rows += [
        (m, "prefill", b, n, 0, s * (0.012 + 4e-5 * b * n), 0.0, 5)
        for m, s in (("target", 1.0), ("draft", 0.08)) for b in (1, 4, 16) for n in (16, 256, 4096)
    ]  # fmt: skip
    return LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))


def recorded_like_trace() -> Trace:
    return synthetic_trace(0.7, requests=100, tokens=256, seed=1, concentration=2.0)


CASES: dict[str, tuple[DraftPolicy | BatchPolicy, Scenario]] = {
    "plain, batch 32": (
        Autoregressive(), Scenario(ClosedLoop(32), Limits(32), requests=800),
    ),
    "fixed 4, batch 8": (Fixed(4), Scenario(ClosedLoop(8), Limits(8), requests=800)),
    "fixed 4, batch 32": (Fixed(4), Scenario(ClosedLoop(32), Limits(32), requests=1600)),
    "fixed 4, batch 64, paged": (
        Fixed(4), Scenario(ClosedLoop(64), Limits(64, kv_blocks=1000), requests=1600),
    ),
    "batch table, batch 32": (
        BatchTable([[1, 8, 5], [9, 64, 3]]), Scenario(ClosedLoop(32), Limits(32), requests=800),
    ),
    "fixed 4, Poisson": (Fixed(4), Scenario(Poisson(8.0), Limits(64), requests=1600)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_serving_speed(benchmark, case):
    policy, scenario = CASES[case]
    trace, latency = recorded_like_trace(), measured_like_table()
    simulate(trace, latency, policy, scenario)  # builds the trace's tape once
    run = benchmark.pedantic(simulate, (trace, latency, policy, scenario), rounds=3)
    benchmark.extra_info["tokens_per_s"] = run.recorder.tokens / benchmark.stats["min"]


def main() -> None:
    """Print tokens per second of each case, and peak memory against simulated time."""
    trace, latency = recorded_like_trace(), measured_like_table()
    for name, (policy, scenario) in CASES.items():
        runs = [simulate(trace, latency, policy, scenario) for _ in range(3)]
        best = min(run.elapsed_s for run in runs[1:])
        print(f"{name:28s} {runs[0].recorder.tokens / best:12,.0f} simulated tokens/s")
    for tokens in (256, 1024, 4096):
        long = synthetic_trace(0.7, requests=32, tokens=tokens, seed=1)
        scenario = Scenario(ClosedLoop(32), Limits(32), requests=32)
        simulate(long, latency, Fixed(4), scenario)
        tracemalloc.start()
        run = simulate(long, latency, Fixed(4), scenario)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{run.recorder.iterations:6d} iterations: peak {peak / 1e6:.2f} MB of its own")
    if CONVERSATIONS.exists():
        base = ArrivalFile(CONVERSATIONS)
        simulate(trace, latency, Fixed(4), Scenario(base, requests=100))
        run = simulate(trace, latency, Fixed(4), Scenario(base, Limits(64), requests=10_000))
        speed = run.recorder.tokens / run.elapsed_s
        print(
            f"10,000 Azure conversations: {speed:,.0f} simulated tokens/s in {run.elapsed_s:.1f} s"
        )


if __name__ == "__main__":
    main()
