"""Runs of the compiled loop held against the same by events, and what both are run on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from policies.batch.base import Policy
from policies.batch.engines import TensorRTLLM
from policies.batch.tables import BatchTable, DisableByBatchSize
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.compiled import loop
from simulator.serving.outcome.report import Run
from tests.serving import CONSTANT, GRID, bernoulli, table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.calls import drafting_always

SIGNALLED = synthetic_trace(0.7, requests=6, tokens=40, max_gamma=24, concentration=3.0, seed=1)
PLAIN = bernoulli(0.75, 12, 40, seed=2)
NARROW = table_of(
    [
        (m, "forward", b, n, c, s * (0.01 + 1e-4 * b * n + 2e-6 * b * c))
        for m, s in (("target", 1.0), ("draft", 0.15))
        for b in (1, 2) for n in (1, 2) for c in (30, 60)
    ]
)  # fmt: skip
"""Most sizes lie beyond what it measured."""
ALONG = LatencyTable(
    pd.concat([
        GRID.cells,
        GRID.cells.query("model == 'draft' and phase == 'forward'").assign(phase="along"),
    ], ignore_index=True)
)  # fmt: skip
"""Latencies of an engine whose drafter runs in every iteration."""


TABLES = {
    "grid": GRID, "narrow": NARROW, "constant": CONSTANT, "along": ALONG,
    "always": drafting_always(GRID, 4), "both": drafting_always(ALONG, 3),
}  # fmt: skip


def added(*rows: tuple[int, int, float]) -> LatencyTable:
    """With what prompts make of a pass that decodes, measured."""
    cells = table_of([("target", "mixed", b, n, 0, s) for b, n, s in rows]).cells
    return LatencyTable(pd.concat([GRID.cells, cells], ignore_index=True))


PROMPTED = {
    **TABLES,
    "mixed": added(*((b, n, 1e-5 * (b + n)) for b in (1, 8, 40) for n in (1, 30, 200))),
    "another kernel": LatencyTable(
        pd.concat([
            GRID.cells,
            GRID.cells.query("model == 'target' and phase == 'forward'").assign(
                phase="with_prompts", median_s=lambda cells: cells["median_s"] * 1.3
            ),
        ], ignore_index=True)
    ),
    "free prompts": table_of([
        (model, "forward", b, n, 0, 0.01 * n + 1e-3 * b)
        for model in ("target", "draft") for b in (1, 8) for n in (1, 9)
    ]),
}  # fmt: skip
"""Cells of their own for prompts in steps that decode, and prompts without a price."""
LENGTHS = [
    BatchTable([[1, 1, 5], [2, 3, 2], [4, 9, 0]]),
    BatchTable([[1, 2, 0], [3, 4, 4], [5, 9, 1]], in_step=False),
    BatchTable([[1, 9, 3]]),
    TensorRTLLM({1: 5, 3: 2}),
    DisableByBatchSize(4, threshold=3, forever=False),
]
"""Policies that look at the number of requests, and at nothing else."""

ARRIVALS = st.one_of(
    st.builds(Poisson, st.sampled_from([0.2, 2.0, 20.0, 200.0])),
    st.builds(ClosedLoop, st.integers(1, 9), st.sampled_from([0.0, 0.3])),
)
LIMITS = st.builds(
    Limits,
    max_batch=st.integers(1, 9),
    token_budget=st.sampled_from([30, 70, 200, 8192]),
    kv_blocks=st.sampled_from([None, 14, 20, 40]),
    block_size=st.sampled_from([4, 16]),
    async_scheduling=st.booleans(),
)


def scenario_of(arrivals: Any, limits: Limits, mode: Any, **options: Any) -> Scenario:
    """A scenario; static batches are never planned ahead."""
    if mode == "static":
        limits = replace(limits, async_scheduling=False)
    return Scenario(arrivals, limits, mode=mode, **options)


SCENARIOS = st.builds(
    scenario_of,
    ARRIVALS,
    LIMITS,
    requests=st.integers(1, 25),
    mode=st.sampled_from(["continuous", "continuous", "static"]),
    seed=st.integers(0, 5),
    max_time_s=st.sampled_from([None, None, 0.7, 3.0]),
)


COUNTS = (
    "carried", "iterations", "length_changes", "peak_batch", "tokens", "drafted", "accepted",
    "draft_forwards", "in_system",
)  # fmt: skip


def ran(*args: Any, **options: Any) -> tuple[Run, bool]:
    """A run, and whether the compiled loop served it."""
    with patch.object(loop, "run", wraps=loop.run) as called:
        run = simulate(*args, **options)
    return run, called.called


def assert_same(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario, **options: Any
) -> tuple[Run, Run]:
    """A run of the compiled loop, and one by events, which agree in all that they tell."""
    run, compiled = ran(trace, latency, policy, scenario, **options)
    assert compiled
    reference = simulate(trace, latency, policy, scenario, by_iteration=True, **options)
    row, expected = run.row(), reference.row()
    for measured in (row, expected):
        del measured["elapsed_s"]
    same(row, expected, "row")
    pd.testing.assert_frame_equal(run.requests, reference.requests, rtol=1e-9)
    same_series(run, reference)
    same([list(c) for c in run.coverage], [list(c) for c in reference.coverage], "coverage")
    for name in COUNTS:
        assert getattr(run.recorder, name) == getattr(reference.recorder, name), name
    return run, reference


def same_series(run: Run, reference: Run) -> None:
    """Batch and blocks over time."""
    for name in ("batch", "kv_blocks"):
        ours, theirs = getattr(run.recorder, name), getattr(reference.recorder, name)
        np.testing.assert_allclose(ours.integral, theirs.integral, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(
            ours.means(run.simulated_s), theirs.means(run.simulated_s), rtol=1e-9, atol=1e-9
        )


def same(value: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), where
        for key in expected:
            same(value[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), where
        for i, (one, other) in enumerate(zip(value, expected, strict=True)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        # As numpy.testing.assert_allclose has it, which takes a hundred times as long.
        near = abs(value - expected) <= 1e-12 + 1e-9 * abs(expected)
        both_nan = math.isnan(value) and math.isnan(expected)
        assert near or value == expected or both_nan, (where, value, expected)
    else:
        assert value == expected, where
