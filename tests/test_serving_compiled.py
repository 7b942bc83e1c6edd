"""The compiled engine is the engine by iteration: every metric of open systems."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from policies.rules.registry import parse_rule
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.arrivals import Deterministic
from simulator.serving.compiled import jit, when
from simulator.serving.fleet.routers import RandomSplit, RoundRobin
from simulator.serving.outcome.report import Run
from simulator.serving.station import Policy
from tests.serving import GRID, SMALL, arrival_file, bernoulli, table
from tests.spans import LIMITS, PROMPTED, SIGNALLED, same, same_series
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.store.recordings import find_trace

pytestmark = pytest.mark.skipif(
    not jit.installed(), reason="numba is not installed: pip install '.[fast]'"
)


def around() -> LatencyTable:
    """With several prompts measured in one pass, and what a server puts around its engine."""
    rows = [
        (m, "prefill", b, n, 0, 1e-4 * n * b**0.8)
        for m in ("target", "draft") for b in (2, 4) for n in (8, 40)
    ]  # fmt: skip
    rows += [("server", "iteration", 1, 1, 0, 2e-4), ("server", "request", 1, 1, 0, 3e-3)]
    cells = [PROMPTED["mixed"].cells, table(rows).cells]
    return LatencyTable(pd.concat(cells, ignore_index=True))


CELLS = {**PROMPTED, "around": around()}
SCENARIOS = st.builds(
    Scenario,
    st.sampled_from([0.2, 2.0, 20.0, 200.0]).map(Poisson), LIMITS,
    requests=st.integers(1, 25), seed=st.integers(0, 5), warmup=st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip
POLICIES = st.sampled_from(
    ["fixed:gamma=3", "autoregressive", "gammatune", "oracle:gamma_max=6", "svip:gamma_max=6"]
)


def compiling(least: float = 1) -> AbstractContextManager[Any]:
    """Let the compiled engine serve from so many requests on."""
    return patch.object(when, "MANY", least)


def both(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario, **options: Any
) -> tuple[Run, Run]:
    """A run of the compiled engine, and of the one by iteration, held together."""
    from simulator.serving.compiled import engine

    with compiling(), patch.object(engine.loop, "run", wraps=engine.loop.run) as ran:
        run = simulate(trace, latency, policy, scenario, **options)
    assert ran.called
    reference = simulate(trace, latency, policy, scenario, by_iteration=True, **options)
    row, expected = run.row(), reference.row()
    for measured in (row, expected):
        del measured["elapsed_s"]
    same(row, expected, "row")
    pd.testing.assert_frame_equal(run.requests, reference.requests, rtol=1e-9)
    same_series(run, reference)
    same([list(c) for c in run.coverage], [list(c) for c in reference.coverage], "coverage")
    for name in ("carried", "iterations", "peak_batch", "tokens", "drafted", "draft_forwards"):
        assert getattr(run.recorder, name) == getattr(reference.recorder, name), name
    return run, reference


@pytest.mark.invariant(3)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCENARIOS, POLICIES, st.sampled_from([*CELLS]))
@example(
    # Both requests are refused: nothing runs at all.
    Scenario(Poisson(200.0), Limits(6, 200, 14, 4, False), requests=2), "svip:gamma_max=6", "narrow"
)  # fmt: skip
def test_compiled_iterations_are_the_iterations(scenario, policy, cells):
    both(SIGNALLED, CELLS[cells], parse_policy(policy, max_gamma=24), scenario)


def test_some_of_these_lose_their_place():
    scenario = Scenario(Poisson(200.0), Limits(9, kv_blocks=20), requests=25)
    run, _ = both(SIGNALLED, GRID, Fixed(3), scenario)
    assert run.requests["preemptions"].sum() > 5


@pytest.mark.parametrize("cells", ["grid", "around"])
def test_lengths_of_a_file_cut_and_repeat_recordings(tmp_path, cells):
    rows = [
        f"2023-11-16 18:15:{i % 40:02d}.{i:07d},{1 + 7 * i % 90},{1 + 11 * i % 130}"
        for i in sorted(range(60), key=lambda i: (i % 40, i))
    ]
    arrivals = ArrivalFile(arrival_file(tmp_path / "arrivals.csv", *rows))
    for scale in (0.5, 30.0):
        scenario = Scenario(arrivals.scaled(scale), Limits(9), requests=None)
        both(bernoulli(0.75, 12, 40, seed=2), CELLS[cells], parse_policy("gammatune"), scenario)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("router", [RoundRobin(), RandomSplit()])
@pytest.mark.parametrize("rate", [5.0, 90.0])
def test_replicas_share_one_window(router, rate):
    scenario = Scenario(Poisson(rate), Limits(4), requests=40, replicas=3, router=router)
    run, reference = both(SMALL, GRID, Fixed(3), scenario)
    assert run.recorder.window.end_s == reference.recorder.window.end_s
    only = replace(scenario, warmup=0.5)
    both(SMALL, GRID, Fixed(3), only, only=[1])


def test_a_window_may_end_when_a_replica_has_long_finished():
    # Dealt in turn, the last arrives at the other: this one has nothing left to do by then.
    scenario = Scenario(Deterministic(0.01), requests=4, replicas=2, warmup=0.5)
    both(SMALL, GRID, Fixed(3), scenario, only=[0])
    both(SMALL, GRID, Fixed(3), scenario, only=[1])


def test_lossy_rules_that_learn_nothing_are_served_too():
    scenario = Scenario(Poisson(30.0), Limits(4), requests=20)
    both(find_trace("bundled"), GRID, Fixed(4), scenario, rule=parse_rule("typical"))


def test_iterations_are_logged_in_pieces():
    from simulator.serving.compiled import engine

    left: list[int] = []
    scenario = Scenario(Poisson(30.0), Limits(4), requests=30)
    with patch.object(engine, "LOGGED", 7):
        both(SMALL, GRID, Fixed(3), scenario)
        with compiling():
            simulate(SMALL, GRID, Fixed(3), scenario, advance=left.append)
    assert sum(left) == 30
    assert len(left) > 5


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(ClosedLoop(3), requests=9),
        Scenario(Poisson(20.0), requests=9, max_time_s=1.0),
        Scenario(Poisson(20.0), requests=9, max_tokens=100),
        Scenario(Poisson(20.0), requests=9, mode="static"),
    ],
)
def test_bounds_closed_loops_and_static_batches_are_left_to_spans(scenario):
    with compiling():
        assert not when.compiles(scenario, GRID, 9)
        assert when.compiles(Scenario(Poisson(20.0), requests=9), GRID, 9)
    assert not when.compiles(Scenario(Poisson(20.0), requests=9), GRID, 9)


def test_sizes_never_varied_are_refused_as_ever():
    alone = table([
        (m, "forward", 1, n, c, 0.01) for m in ("target", "draft") for n in (1, 4) for c in (0, 99)
    ])  # fmt: skip
    narrow = table([("target", "forward", b, 1, 0, 0.01) for b in (1, 4)])
    scenario = Scenario(Poisson(20.0), requests=9)
    with compiling():
        assert not when.compiles(scenario, alone, 9)
        assert not when.compiles(scenario, narrow, 9)
        assert when.compiles(scenario, LatencyTable.constant(0.02, 0.002, 0.025), 9)


def test_without_numba_spans_serve(monkeypatch):
    monkeypatch.setattr(when, "installed", lambda: False)
    with compiling():
        assert not when.compiles(Scenario(Poisson(20.0), requests=9), GRID, 9)
        run = simulate(SMALL, GRID, Fixed(3), Scenario(Poisson(20.0), requests=9))
    assert len(run.requests) == 9
