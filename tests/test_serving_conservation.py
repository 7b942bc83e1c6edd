"""Nothing is lost or made in serving: requests, tokens, blocks, rounds, memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed, Oracle
from simulator.serving import MODES, ClosedLoop, Limits, Poisson, Scenario, simulate
from tests.serving import (
    CONSTANT,
    GRID,
    SMALL,
    assert_no_block_is_lost,
    bernoulli,
    kept_engines,
    little_error,
)
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import SignalError
from traces.latency.table import LatencyTable
from traces.replay.run import replay


@pytest.mark.invariant(2)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(["continuous", "static", "static-minimum", "static-mean"]),
    gamma=st.integers(0, 6),
    max_batch=st.integers(1, 9),
    budget=st.integers(7, 120),
    blocks=st.one_of(st.none(), st.integers(5, 40)),
    block_size=st.integers(1, 16),
    rate=st.one_of(st.none(), st.floats(0.05, 50)),
    seed=st.integers(0, 99),
)
def test_conservation(mode, gamma, max_batch, budget, blocks, block_size, rate, seed):
    limits = Limits(max_batch, budget, blocks, block_size)
    arrivals = ClosedLoop(max_batch + 1) if rate is None else Poisson(rate)
    scenario = Scenario(arrivals, limits, requests=25, mode=mode, warmup=0.0, seed=seed)
    policy = Fixed(gamma) if gamma else Autoregressive()
    with kept_engines() as engines:
        run = simulate(SMALL, GRID, policy, scenario, by_iteration=True)
    frame = run.requests
    # Every request leaves once, or was refused at the door.
    assert run.recorder.arrived == 25
    assert len(frame) + run.recorder.rejected == 25
    assert frame["index"].is_unique
    # Every token is emitted once.
    assert (frame["tokens"] == 40).all()
    assert run.recorder.tokens == frame["tokens"].sum()
    # No block leaks.
    pool = engines[0].scheduler.pool
    assert_no_block_is_lost(pool)
    assert pool.used == len(pool._held) == 0
    # Time never runs back.
    assert (frame["arrival_s"] <= frame["first_s"]).all()
    assert (frame["first_s"] <= frame["finish_s"]).all()
    assert frame["finish_s"].is_monotonic_increasing
    assert little_error(run) < 1e-9
    assert run.status == "complete"
    # The same seed gives the same run.
    again = simulate(SMALL, GRID, policy, scenario)
    pd.testing.assert_frame_equal(frame, again.requests)
    # Fitting is decided by size alone: all requests here are alike.
    need = 32 + 40 + gamma
    fits = blocks is None or math.ceil(need / block_size) <= blocks
    assert run.recorder.rejected == (0 if fits else 25)


@pytest.mark.invariant(2)
def test_preemption_recomputes_and_loses_nothing():
    limits = Limits(max_batch=8, kv_blocks=14, block_size=16)
    scenario = Scenario(ClosedLoop(8), limits, requests=30, warmup=0.0)
    tight = simulate(SMALL, GRID, Fixed(4), scenario)
    roomy = simulate(SMALL, GRID, Fixed(4), replace(scenario, limits=Limits(max_batch=8)))
    assert tight.requests["preemptions"].sum() > 0 == roomy.requests["preemptions"].sum()
    assert tight.simulated_s > roomy.simulated_s
    rounds = [r.requests.sort_values("index")["rounds"].tolist() for r in (tight, roomy)]
    assert rounds[0] == rounds[1], "pre-emption costs time and changes no outcome"
    assert tight.row()["mean_kv_blocks"] <= 14


@pytest.mark.invariant(9)
@pytest.mark.parametrize("policy", [Fixed(3), Oracle()])
def test_rounds_are_those_of_the_clock_free_replay(policy):
    scenario = Scenario(Poisson(5), Limits(max_batch=8, lookahead=39), requests=20, warmup=0.0)
    frame = simulate(SMALL, GRID, policy, scenario).requests.sort_values("sequence")
    log = replay(SMALL, policy)
    assert frame["rounds"].tolist() == log.per_request(np.ones(len(log))).tolist()
    assert frame["accepted"].tolist() == log.per_request(log.rounds["accepted"]).tolist()


def test_signals_are_replayed_and_charged():
    class Confident(DraftPolicy):
        reads = ("prob",)
        gamma_max = 6

        def keep_drafting(self, draft):
            return len(draft) < self.gamma_max and not (draft and draft[-1].prob < 0.5)

    trace = synthetic_trace(0.7, requests=10, tokens=60, seed=2, concentration=2)
    slow = LatencyTable.constant(0.02, 0.002, signal=0.001)
    scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=10, warmup=0.0)
    free = simulate(trace, LatencyTable.constant(0.02, 0.002), Confident(), scenario)
    paid = simulate(trace, slow, Confident(), scenario)
    forwards = paid.recorder.draft_forwards
    assert forwards == replay(trace, Confident()).rounds["draft_forwards"].sum()
    assert paid.simulated_s - free.simulated_s == pytest.approx(forwards * 0.001, rel=1e-9)
    with pytest.raises(SignalError, match="prob"):
        simulate(SMALL, slow, Confident(), scenario)


@pytest.mark.parametrize("mode", MODES)
def test_one_token_outputs(mode):
    trace = bernoulli(0.7, 10, 1)
    run = simulate(trace, GRID, Fixed(4), Scenario(Poisson(3), requests=30, mode=mode, warmup=0.0))
    assert (run.requests["tokens"] == 1).all()
    row = run.row()
    assert math.isnan(row["tpot_s"]["mean"])
    assert row["ttft_s"]["mean"] == pytest.approx(row["e2e_s"]["mean"])
    assert row["within_targets"] == 1


def test_memory_does_not_grow_with_simulated_events():
    import tracemalloc

    peaks = []
    for repeats in (1, 8):
        trace = bernoulli(0.7, 8, 60 * repeats)
        scenario = Scenario(ClosedLoop(8), Limits(max_batch=8), requests=8)
        simulate(trace, CONSTANT, Fixed(3), scenario)  # its rounds belong to the trace
        tracemalloc.start()
        simulate(trace, CONSTANT, Fixed(3), scenario)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, "eight times the rounds, the same memory"
