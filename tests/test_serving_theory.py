"""The serving simulator against queueing theory and closed forms, within 4 standard errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.lengths.basic import Autoregressive, Fixed
from simulator.formulas import batching, leviathan, parallel
from simulator.pricing import price
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario, simulate
from tests.queues import PER_TOKEN_S, SERVICE, exponential, one_token_jobs
from tests.serving import GRID, SMALL, bernoulli, little_error
from traces.latency.table import LatencyTable
from traces.replay.run import replay

WHOLE = {"warmup": 0.0}


def constant(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.ones(size)


def two_point(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.where(rng.random(size) < 0.8, 0.5, 3.0)


@pytest.mark.invariant(7)
@pytest.mark.parametrize(
    ("service", "second_moment"),
    [(exponential, 2.0), (constant, 1.0), (two_point, 0.8 * 0.25 + 0.2 * 9)],
    ids=["M/M/1", "M/D/1", "M/G/1"],
)
def test_waiting_time_is_pollaczek_khinchine(service, second_moment):
    # Independent replications with their own jobs; every customer's service is drawn again.
    load, customers, means = 0.5, 800, []
    for replication in range(20):
        jobs = service(np.random.default_rng(1000 + replication), customers)
        trace = one_token_jobs(np.rint(jobs / PER_TOKEN_S).astype(int))
        limits = Limits(max_batch=1, token_budget=1 << 30)
        scenario = Scenario(Poisson(load), limits, requests=customers, warmup=0.2, seed=replication)
        run = simulate(trace, SERVICE, Autoregressive(), scenario)
        frame = run.requests
        kept = frame[frame["index"] >= run.recorder.skip]
        wait = kept["ttft_s"] - kept["prompt_tokens"] * PER_TOKEN_S
        assert wait.min() > -1e-9
        means.append(wait.mean())
        assert little_error(run) < 1e-9
    expected = load * second_moment / (2 * (1 - load))
    z = (np.mean(means) - expected) / (np.std(means, ddof=1) / math.sqrt(len(means)))
    assert abs(z) < 4


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("clients", [1, 2, 6])
def test_closed_network_bounds(clients, batch):
    """Asymptotic bounds (Denning and Buzen 1978): X <= N / (D + Z) and X <= B / D."""
    trace = bernoulli(0.7, 10, 50)
    think = 3.0
    scenario = Scenario(ClosedLoop(clients, think), Limits(max_batch=batch), requests=60, **WHOLE)
    run = simulate(trace, LatencyTable.constant(0.1, 0.01), Autoregressive(), scenario)
    demand = 49 * 0.1
    throughput = len(run.requests) / run.simulated_s
    assert throughput <= min(clients / (demand + think), batch / demand) * (1 + 1e-9)
    if clients == 1:
        assert run.simulated_s == pytest.approx(60 * (demand + think), rel=1e-9)
    # A pass costs the same at any batch here, so nobody queues and the bound is met.
    if clients <= batch:
        assert run.requests["e2e_s"].max() == pytest.approx(demand, rel=0.25)
    assert little_error(run) < 1e-9


@pytest.mark.invariant(10)
@pytest.mark.parametrize("policy", [Autoregressive(), Fixed(1), Fixed(4), Fixed(8)])
@pytest.mark.parametrize("latency", [GRID, LatencyTable.constant(0.1, 0.01, 0.12)])
def test_light_load_equals_clock_free_pricing(policy, latency):
    trace = bernoulli(0.7, 12, 80, seed=3)
    scenario = Scenario(Poisson(1e-4), Limits(max_batch=1), requests=12, **WHOLE)
    run = simulate(trace, latency, policy, scenario)
    priced = price(replay(trace, policy), latency)
    frame = run.requests.sort_values("sequence")
    decode = frame["finish_s"] - frame["first_s"]
    # Differences of clock readings near 1e5 s carry rounding of 1e-11.
    np.testing.assert_allclose(decode, priced.decode_s, rtol=1e-9)
    np.testing.assert_allclose(frame["e2e_s"], priced.wall_s, rtol=1e-9)


@pytest.mark.parametrize("mode", ["continuous", "static", "static-minimum", "static-mean"])
def test_batch_of_one_costs_the_same_in_every_style(mode):
    trace = bernoulli(0.6, 8, 60, seed=5)
    scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=8, mode=mode, **WHOLE)
    run = simulate(trace, GRID, Fixed(3), scenario)
    wall = price(replay(trace, Fixed(3)), GRID).wall_s
    assert run.simulated_s == pytest.approx(wall.sum(), rel=1e-9)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_truncating_to_the_minimum(batch):
    """Tokens per sequence and round: 1 + sum over k of alpha**(k B)."""
    alpha, gamma, means = 0.8, 5, []
    for seed in range(12):
        trace = bernoulli(alpha, batch, 601, seed=seed)
        scenario = Scenario(
            ClosedLoop(batch),
            Limits(max_batch=batch),
            requests=batch,
            mode="static-minimum",
            **WHOLE,
        )
        run = simulate(trace, LatencyTable.constant(1, 0.1), Fixed(gamma), scenario)
        frame = run.requests
        assert frame["rounds"].nunique() == 1, "a truncated batch stays in step"
        means.append(600 / frame["rounds"].iloc[0])
    expected = batching.truncated_tokens([alpha] * batch, gamma)
    z = (np.mean(means) - expected) / (np.std(means, ddof=1) / math.sqrt(len(means)))
    # The last round is cut short: a bias of about one token in 600.
    assert abs(z) < 4


def test_ragged_batches_keep_each_sequence_expectation():
    alpha, gamma, batch = 0.8, 5, 8
    trace = bernoulli(alpha, 64, 401, seed=2)
    scenario = Scenario(
        ClosedLoop(batch), Limits(max_batch=batch), requests=64, mode="static", **WHOLE
    )
    frame = simulate(trace, LatencyTable.constant(1, 0.1), Fixed(gamma), scenario).requests
    per_round = (400 / frame["rounds"]).to_numpy()
    z = (per_round.mean() - leviathan.expected_tokens(alpha, gamma)) / (per_round.std(ddof=1) / 8)
    assert abs(z) < 4
    starts = frame.groupby("first_s")["finish_s"].max().to_numpy()
    assert len(starts) == 8, "a static batch ends with its slowest, and only then the next begins"
    assert (frame["first_s"].unique()[1:] >= starts[:-1] - 1e-9).all()


@pytest.mark.invariant(7)
@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 5), (0.6, 3), (0.9, 8), (0.5, 1)])
def test_pearl_tokens_per_step(alpha, gamma):
    trace = bernoulli(alpha, 40, 401, seed=7)
    draft_s, target_s = 0.3, 1.0
    scenario = Scenario(ClosedLoop(1), requests=40, mode="pearl", **WHOLE)
    run = simulate(trace, LatencyTable.constant(target_s, draft_s), Fixed(gamma), scenario)
    frame = run.requests
    per_step = (400 / frame["rounds"]).to_numpy()
    error = per_step.std(ddof=1) / math.sqrt(len(per_step))
    # With gamma = 1 every step emits one token, without any scatter.
    assert abs(per_step.mean() - parallel.tokens_per_step(alpha, gamma)) < 4 * error + 1e-9
    # Only a block cut at the end of a request can be shorter than gamma.
    step = max(gamma * draft_s, target_s)
    assert run.simulated_s <= frame["rounds"].sum() * step * (1 + 1e-9)
    assert run.simulated_s >= (frame["rounds"] - 3).sum() * step


@pytest.mark.invariant(7)
@pytest.mark.parametrize(
    ("alpha", "lookahead", "c"), [(0.8, 1, 0.1), (0.8, 5, 0.1), (0.3, 3, 0.2), (0.9, 4, 0.6)]
)
def test_dsi_latency(alpha, lookahead, c):
    tokens = 100
    trace = bernoulli(alpha, 100, tokens + 1, seed=11)
    scenario = Scenario(ClosedLoop(1), requests=100, mode="dsi", **WHOLE)
    run = simulate(trace, LatencyTable.constant(1.0, c), Fixed(lookahead), scenario)
    latency = run.requests["e2e_s"].to_numpy()
    expected = parallel.distributed_latency(tokens, alpha, lookahead, c)
    z = (latency.mean() - expected) / (latency.std(ddof=1) / math.sqrt(len(latency)))
    assert abs(z) < 4
    assert latency.max() <= tokens * (1 + 1e-9), "never slower than plain decoding"


def test_dsi_without_acceptance_is_plain_decoding():
    scenario = Scenario(ClosedLoop(1), requests=3, mode="dsi", **WHOLE)
    run = simulate(bernoulli(0.0, 3, 41), LatencyTable.constant(1.0, 0.1), Fixed(4), scenario)
    np.testing.assert_allclose(run.requests["e2e_s"], 40.0, rtol=1e-9)


@pytest.mark.parametrize("mode", ["pearl", "dsi"])
@pytest.mark.parametrize("policy", [Autoregressive(), Fixed(0)])
def test_no_drafter_slows_plain_decoding(mode, policy):
    alone = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=5, **WHOLE)
    shared = replace(alone, mode=mode, interference=1.0)
    expected, run = (simulate(SMALL, GRID, policy, own) for own in (alone, shared))
    assert run.row()["simulated_s"] == pytest.approx(expected.row()["simulated_s"], rel=1e-9)
    assert run.recorder.draft_forwards == 0


@pytest.mark.parametrize("mode", ["pearl", "dsi"])
def test_sharing_a_device_slows_overlap_by_the_interference(mode):
    trace, latency = bernoulli(0.7, 5, 60), LatencyTable.constant(1.0, 0.25)
    times = []
    for interference in (0.0, 0.5):
        scenario = Scenario(
            ClosedLoop(1), requests=5, mode=mode, interference=interference, **WHOLE
        )
        times.append(simulate(trace, latency, Fixed(4), scenario).simulated_s)
    # Draft and verify take one second each, so both are slowed from beginning to end.
    assert times[0] < times[1] <= 1.5 * times[0] * (1 + 1e-9)
