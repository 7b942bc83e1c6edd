"""The serving simulator: conservation, limits, edge cases, files and reports."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.basic import Autoregressive, Fixed, Oracle
from policies.batch import BatchPolicy
from policies.core import DraftPolicy
from policies.registry import parse_serving_policy, policy_names
from policies.rules import VerifyRule
from simulator.serving import (
    MODES,
    ArrivalFile,
    ClosedLoop,
    Deterministic,
    Limits,
    Poisson,
    ResultsFile,
    Scenario,
    Timeline,
    break_even_load,
    over_batches,
    over_rates,
    plots,
    read_results,
    serve,
    simulate,
    speedup_grid,
    sweep,
)
from simulator.serving.metrics import Histogram, Series
from simulator.serving.policy_cost import TableCost
from simulator.serving.reader import PassReader
from simulator.serving.scheduler import Continuous
from tests.test_serving_theory import GRID, bernoulli, table
from traces.errors import DraftsimError, FileError, SignalError
from traces.latency import EXTRAPOLATED, INTERPOLATED, LatencyTable
from traces.replay import replay
from traces.synthetic import synthetic_trace
from traces.trace import Trace

CONSTANT = LatencyTable.constant(0.02, 0.002, 0.025)
SMALL = bernoulli(0.7, 20, 40, seed=1)


class ByBatch(BatchPolicy):
    """Drafts 4 tokens in batches up to 4, none in larger ones; verifies at most 3."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.seen = 0
        self.gamma_max = 4

    def plan(self, loads):
        self.batches.append(len(loads))
        assert all(load.batch == len(loads) for load in loads)
        return 4 if len(loads) <= 4 else 0

    def allot(self, drafts):
        return [min(len(d), 3) for d in drafts]

    def observe(self, outcomes):
        self.seen += len(outcomes)


class KeepDraftingBelow(DraftPolicy):
    """Reads the engine's batch: a single-stream policy may know it."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self.gamma_max = 4

    def begin_round(self, load):
        self._on = load.batch <= self.limit

    def keep_drafting(self, draft):
        return self._on and len(draft) < self.gamma_max


# --- conservation -------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mode=st.sampled_from(["continuous", "static", "static-minimum", "static-mean"]),
    gamma=st.integers(0, 6),
    max_batch=st.integers(1, 9),
    budget=st.integers(7, 120),
    blocks=st.one_of(st.none(), st.integers(5, 40)),
    block_size=st.integers(1, 16),
    rate=st.one_of(st.none(), st.floats(0.05, 50)),
    chunked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_conservation(mode, gamma, max_batch, budget, blocks, block_size, rate, chunked, seed):
    limits = Limits(max_batch, budget, blocks, block_size, chunked)
    arrivals = ClosedLoop(max_batch + 1) if rate is None else Poisson(rate)
    scenario = Scenario(arrivals, limits, requests=25, mode=mode, warmup=0.0, seed=seed)
    engines = []
    policy = Fixed(gamma) if gamma else Autoregressive()
    run = simulate(SMALL, GRID, policy, scenario, audit=engines.append)
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
    pool.audit()
    assert pool.used == pool.holders == 0
    # Time never runs back.
    assert (frame["arrival_s"] <= frame["first_s"]).all()
    assert (frame["first_s"] <= frame["finish_s"]).all()
    assert frame["finish_s"].is_monotonic_increasing
    assert run.little_error < 1e-9
    assert run.status == "complete"
    # The same seed gives the same run.
    again = simulate(SMALL, GRID, policy, scenario)
    pd.testing.assert_frame_equal(frame, again.requests)
    # Fitting is decided by size alone: all requests here are alike.
    need = 32 + 40 + gamma
    fits = (blocks is None or math.ceil(need / block_size) <= blocks) and (chunked or budget >= 72)
    assert run.recorder.rejected == (0 if fits else 25)


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


# --- scheduling and cost ------------------------------------------------------------


def test_budget_charges_lookahead_and_chunks_prompts(monkeypatch):
    trace = bernoulli(0.5, 4, 10, prompt=100)
    limits = Limits(max_batch=4, token_budget=40)
    plans = []
    original = Continuous.next

    def recording(self, more_to_come):
        plan = original(self, more_to_come)
        plans.append((len(plan.decode), sum(c.tokens for c in plan.chunks)))
        return plan

    monkeypatch.setattr(Continuous, "next", recording)
    simulate(trace, GRID, Fixed(4), Scenario(ClosedLoop(4), limits, requests=4, warmup=0.0))
    assert max(5 * decode + prompt for decode, prompt in plans) == 40
    assert any(decode and prompt for decode, prompt in plans), "chunks ride along with decoding"
    assert sum(prompt for _, prompt in plans) == 400


def test_batched_draft_steps_are_those_of_the_longest_draft():
    # Constant passes: an iteration costs longest * draft + verify, whatever the batch.
    trace = bernoulli(0.6, 6, 50, seed=4)
    scenario = Scenario(ClosedLoop(6), Limits(max_batch=6), requests=6, mode="static", warmup=0.0)
    run = simulate(trace, LatencyTable.constant(1.0, 0.01), Fixed(3), scenario)
    iterations = run.requests["rounds"].max()
    expected = iterations * 1.03
    # Only the slowest sequence's last rounds may draft fewer than 3.
    assert expected - 0.09 <= run.simulated_s <= expected + 1e-9


def test_active_drafting_costs_no_more_than_padded():
    base = Scenario(ClosedLoop(8), Limits(max_batch=8), requests=40, warmup=0.0)
    trace = synthetic_trace(0.7, requests=10, tokens=60, seed=2)
    padded = simulate(trace, GRID, Oracle(gamma_max=8), base)
    active = simulate(trace, GRID, Oracle(gamma_max=8), replace(base, draft_batch="active"))
    assert active.simulated_s < padded.simulated_s


def test_batch_policies_see_the_whole_batch():
    trace = bernoulli(0.7, 30, 40, seed=8)
    run = simulate(trace, CONSTANT, ByBatch(), Scenario(Poisson(2), requests=30, warmup=0.0))
    assert run.recorder.draft_forwards > run.recorder.drafted > 0, "allotted 3 of 4"
    crowd = Scenario(ClosedLoop(16), Limits(max_batch=16), requests=16, mode="static", warmup=0.0)
    busy = simulate(trace, CONSTANT, ByBatch(), replace(crowd, max_tokens=300))
    assert busy.recorder.drafted == 0
    with pytest.raises(DraftsimError, match="batch policy decides"):
        simulate(trace, CONSTANT, ByBatch(), replace(crowd, mode="static-minimum"))
    with pytest.raises(DraftsimError, match="one stream"):
        simulate(trace, CONSTANT, ByBatch(), replace(crowd, mode="dsi"))


def test_single_stream_policies_may_read_the_batch():
    crowd = Scenario(Poisson(8), Limits(max_batch=8), requests=60, warmup=0.0)
    run = simulate(SMALL, CONSTANT, KeepDraftingBelow(4), crowd)
    total = simulate(SMALL, CONSTANT, Fixed(4), crowd)
    assert 0 < run.recorder.drafted < total.recorder.drafted


def test_policy_prototypes_stay_untouched():
    policy = ByBatch()
    simulate(SMALL, CONSTANT, policy, Scenario(ClosedLoop(2), requests=4))
    assert policy.batches == []
    assert policy.seen == 0


@pytest.mark.parametrize("model", ["target", "draft"])
@settings(max_examples=80, deadline=None)
@given(
    batch=st.one_of(st.integers(1, 12), st.floats(0.5, 20)),
    width=st.one_of(st.integers(1, 12), st.floats(0.5, 20)),
    context=st.one_of(st.integers(0, 400), st.floats(0, 900)),
)
def test_scalar_reading_equals_the_table(model, batch, width, context):
    reader = PassReader(GRID, model)
    expected = GRID.estimate(model, "forward", batch=batch, new_tokens=width, context=context)
    assert reader(batch, width, context) == pytest.approx(float(expected.seconds), rel=1e-12)
    names = {INTERPOLATED: "interpolated", EXTRAPOLATED: "extrapolated"}
    assert reader.coverage[0].origin == names.get(int(expected.origin), "measured")


def test_a_run_says_what_was_not_measured():
    alone = simulate(SMALL, GRID, Fixed(4), Scenario(ClosedLoop(1), requests=20)).row()
    assert alone["interpolated"] > 0 == alone["extrapolated"]
    sparse = table([("target", "forward", 1, 1, 0, 0.1), ("draft", "forward", 1, 1, 0, 0.01)])
    run = simulate(SMALL, sparse, Fixed(4), Scenario(ClosedLoop(3), requests=20))
    beyond = [c for c in run.coverage if c.origin == "extrapolated" and c.model == "target"]
    assert beyond[0].batch.high == 3
    assert "target prefill" in run.row()["unpriced"]


# --- arrivals and edge cases --------------------------------------------------------


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_file_lengths_hold_and_sequences_match_by_length(tmp_path):
    path = write(tmp_path / "a.csv", ["0,500,10", "1.5,20,40", "2,7,1", "2,9,90"])
    run = simulate(SMALL, GRID, Fixed(3), Scenario(ArrivalFile(path), requests=None, warmup=0.0))
    frame = run.requests.sort_values("index")
    assert frame["prompt_tokens"].tolist() == [500, 20, 7, 9]
    assert frame["tokens"].tolist() == [10, 40, 1, 90], "cut, whole, one token, begun again"
    assert frame["arrival_s"].tolist() == [0, 1.5, 2, 2]
    assert run.fidelity == "approximate"
    faster = simulate(SMALL, GRID, Fixed(3), Scenario(ArrivalFile(path, scale=2), requests=3))
    assert faster.requests.sort_values("index")["arrival_s"].tolist() == [0, 0.75, 1]


def test_matching_prefers_the_nearest_length(tmp_path):
    mixed = synthetic_lengths([5, 50, 500])
    path = write(tmp_path / "a.csv", [f"{i},10,{n}" for i, n in enumerate((4, 60, 400, 900))])
    arrivals = ArrivalFile(path, nearest=1)
    jobs = list(arrivals.jobs(mixed, np.random.default_rng(0), None))
    assert [mixed.requests[j.sequence].tokens for j in jobs] == [5, 50, 500, 500]


def synthetic_lengths(lengths: list[int]) -> Trace:
    parts = [bernoulli(0.7, 1, n, seed=n) for n in lengths]
    columns = {
        name: np.concatenate([p.columns[name] for p in parts])
        for name in ("position", "offset", "match")
    }
    columns["request"] = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Trace(columns, [p.requests[0] for p in parts])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no request"),
        (["2,10,5", "1,10,5"], "row 2: TIMESTAMP goes back"),
        (["-1,10,5"], "row 1: TIMESTAMP is -1"),
        (["0,10,5", "x,10,5"], "row 2: TIMESTAMP is x"),
        (["0,10,0"], "GeneratedTokens is 0"),
        (["0,1.5,3"], "ContextTokens is 1.5"),
        (["0,,3"], "ContextTokens is nan"),
    ],
)
def test_bad_arrivals_files_are_named(tmp_path, rows, message):
    path = write(tmp_path / "bad.csv", rows)
    with pytest.raises(FileError, match=message):
        simulate(SMALL, CONSTANT, Fixed(2), Scenario(ArrivalFile(path), requests=None))


def test_missing_or_foreign_files(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        _ = ArrivalFile(tmp_path / "none.csv").rows
    (tmp_path / "zero.csv").write_text("")
    with pytest.raises(FileError, match="cannot be read"):
        _ = ArrivalFile(tmp_path / "zero.csv").rows
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match="lacks the column"):
        _ = ArrivalFile(tmp_path / "other.csv").rows


@pytest.mark.parametrize("mode", MODES)
def test_one_token_outputs(mode):
    trace = bernoulli(0.7, 10, 1)
    run = simulate(trace, GRID, Fixed(4), Scenario(Poisson(3), requests=30, mode=mode, warmup=0.0))
    assert (run.requests["tokens"] == 1).all()
    row = run.row()
    assert math.isnan(row["tpot_s"]["mean"])
    assert row["ttft_s"]["mean"] == pytest.approx(row["e2e_s"]["mean"])
    assert row["within_targets"] == 1


def test_overload_ends_and_says_so():
    scenario = Scenario(Poisson(1000), Limits(max_batch=4), requests=200)
    row = simulate(SMALL, CONSTANT, Fixed(3), scenario).row()
    assert row["overloaded"]
    assert row["requests"] == 200
    assert not simulate(SMALL, CONSTANT, Fixed(3), replace(scenario, arrivals=Poisson(0.1))).row()[
        "overloaded"
    ]


def test_an_overloaded_engine_s_throughput_is_no_lower_for_more_load():
    # All have arrived before a full batch has decoded: the arrivals' span shows the filling only.
    scenario = Scenario(Poisson(1), Limits(max_batch=8), requests=200)
    rows = [
        simulate(SMALL, CONSTANT, Fixed(3), replace(scenario, arrivals=Poisson(rate))).row()
        for rate in (100, 1e3, 1e6, 1e12)
    ]
    full = simulate(SMALL, CONSTANT, Fixed(3), replace(scenario, arrivals=ClosedLoop(8))).row()
    for row in rows:
        assert row["overloaded"]
        assert row["throughput_tok_s"] == pytest.approx(full["throughput_tok_s"], rel=0.1)


def test_prompts_larger_than_the_pool_are_rejected_and_counted():
    for arrivals in (ClosedLoop(3), Poisson(2), Deterministic(2)):
        scenario = Scenario(arrivals, Limits(kv_blocks=2, block_size=16), requests=2000)
        row = simulate(SMALL, CONSTANT, Fixed(3), scenario).row()
        assert row["rejected"] == 2000
        assert row["requests"] == 0


def test_bounds_end_a_run():
    endless = Scenario(Poisson(5), requests=10**9, warmup=0.0)
    by_time = simulate(SMALL, CONSTANT, Fixed(3), replace(endless, max_time_s=30))
    assert by_time.simulated_s == 30
    assert by_time.status.startswith("stopped at max_time_s=30")
    assert by_time.little_error < 1e-9
    by_tokens = simulate(SMALL, CONSTANT, Fixed(3), replace(endless, max_tokens=500))
    assert 500 <= by_tokens.recorder.tokens < 800
    assert by_tokens.row()["status"] == "stopped at max_tokens=500"


def run_with(policy: DraftPolicy, limits: Limits):
    return simulate(SMALL, CONSTANT, policy, Scenario(Poisson(1), limits))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0), "rate is 0"),
        (lambda: ClosedLoop(0), "concurrency is 0"),
        (lambda: Limits(max_batch=0), "max_batch is 0"),
        (lambda: Limits(kv_blocks=0), "kv_blocks is 0"),
        (lambda: Scenario(Poisson(1), warmup=1.0), "warmup is 1"),
        (lambda: Scenario(Poisson(1), requests=0), "requests is 0"),
        (lambda: Scenario(Poisson(1), mode="other"), "mode is 'other'"),
        (
            lambda: simulate(
                SMALL, CONSTANT, Fixed(9), Scenario(Poisson(1), Limits(token_budget=9))
            ),
            "look-ahead",
        ),
        (lambda: simulate(SMALL, CONSTANT, Oracle(), Scenario(Poisson(1))), "lookahead"),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(DraftsimError, match=message):
        make()


# --- reports ------------------------------------------------------------------------


def test_policies_meet_the_same_requests():
    scenario = Scenario(Poisson(1.0), Limits(max_batch=4), requests=60, replications=5)
    result = serve(SMALL, CONSTANT, {"ar": Autoregressive(), "fixed": Fixed(3)}, scenario)
    for ar, fixed in zip(result.runs["ar"], result.runs["fixed"], strict=True):
        a, b = (r.requests.sort_values("index") for r in (ar, fixed))
        assert a["arrival_s"].tolist() == b["arrival_s"].tolist()
        assert a["sequence"].tolist() == b["sequence"].tolist()
    mean, low, high = result.difference("fixed", "ar", "e2e_s_mean")
    assert low < mean < high < 0
    rows = result.rows()
    unpaired = sum(r["e2e_s_hi"] - r["e2e_s_lo"] for r in rows)
    assert high - low < unpaired, "common random numbers sharpen differences"
    assert {"ttft_s_p99", "tpot_s_mean", "throughput_tok_s"} <= set(result.summary.columns)
    json.dumps(rows)


def test_warmup_requests_do_not_count():
    run = simulate(SMALL, CONSTANT, Fixed(3), Scenario(Poisson(2), requests=50, warmup=0.2))
    frame = run.requests
    kept = frame[frame["index"] >= 10]
    assert run.row()["e2e_s"]["mean"] == pytest.approx(kept["e2e_s"].mean())
    assert run.row()["warmup_requests"] == 10
    start, end = run.recorder.window.start_s, run.recorder.window.end_s
    assert start == frame.set_index("index")["arrival_s"][10]
    assert end == frame["arrival_s"].max()


def test_goodput_counts_requests_within_both_targets():
    scenario = Scenario(Poisson(20), Limits(max_batch=2), requests=60, warmup=0.0)
    loose = simulate(SMALL, CONSTANT, Fixed(3), scenario)
    frame = loose.requests
    ttft, tpot = float(frame["ttft_s"].median()), float(frame["tpot_s"].median())
    tight = simulate(
        SMALL, CONSTANT, Fixed(3), replace(scenario, ttft_target_s=ttft, tpot_target_s=tpot)
    ).row()
    both = ((frame["ttft_s"] <= ttft) & (frame["tpot_s"] <= tpot)).mean()
    assert tight["within_targets"] == pytest.approx(both)
    assert loose.row()["within_targets"] == 1


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200))
def test_histogram_quantiles_are_within_a_bin(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    result = histogram.summary
    assert result["mean"] == pytest.approx(np.mean(values))
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert result[name] == pytest.approx(exact, rel=0.0051)


@given(st.lists(st.tuples(st.floats(1e-4, 5), st.integers(0, 9)), min_size=1, max_size=100))
def test_series_keeps_the_integral_at_any_length(steps):
    series, now = Series(points=16), 0.0
    for seconds, value in steps:
        series.add(now, now + seconds, value)
        now += seconds
    frame = series.to_frame(now)
    widths = np.minimum(now - frame["time_s"], series.interval_s)
    assert len(frame) <= 16
    assert (frame["value"] * widths).sum() == pytest.approx(series.integral)
    assert series.integral == pytest.approx(sum(s * v for s, v in steps))


def test_memory_does_not_grow_with_simulated_events():
    import tracemalloc

    peaks = []
    for repeats in (1, 8):
        trace = bernoulli(0.7, 8, 60 * repeats)
        replay(trace, Fixed(3))  # the tape belongs to the trace
        tracemalloc.start()
        simulate(
            trace, CONSTANT, Fixed(3), Scenario(ClosedLoop(8), Limits(max_batch=8), requests=8)
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, "eight times the rounds, the same memory"


def test_timeline_opens_as_chrome_trace(tmp_path):
    path = tmp_path / "run.json"
    scenario = Scenario(Poisson(4), Limits(max_batch=4), requests=12, warmup=0.0)
    with Timeline(path) as timeline:
        result = serve(SMALL, GRID, {"fixed": Fixed(3)}, scenario, timeline=timeline)
    events = json.loads(path.read_text())
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"target model", "draft model", *(f"request {i}" for i in range(12))} <= names
    run = result.runs["fixed"][0]
    rounds = [e for e in slices if e["pid"] == 2 and "emitted" in e["args"]]
    assert sum(e["args"]["emitted"] for e in rounds) == run.recorder.tokens - 12
    assert (
        sum(e["args"]["wasted"] for e in rounds)
        == run.recorder.draft_forwards - run.recorder.accepted
    )
    for track in {(e["pid"], e["tid"]) for e in slices}:
        mine = [e for e in slices if (e["pid"], e["tid"]) == track]
        mine.sort(key=lambda e: (e["ts"], e["dur"]))
        for before, after in itertools.pairwise(mine):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3, "slices overlap"


def test_pearl_keeps_both_blocks_of_a_signal_reader_within_the_recorded_tail():
    trace = synthetic_trace(0.6, requests=4, tokens=60, max_gamma=6, concentration=3.0, seed=2)
    scenario = Scenario(ClosedLoop(1), requests=8, mode="pearl", warmup=0.0)
    run = simulate(trace, CONSTANT, parse_serving_policy("svip:gamma_max=6,threshold=5"), scenario)
    assert len(run.requests) == 8
    assert run.recorder.tokens == 8 * 60


def test_sweeps_over_batches_and_rates(tmp_path):
    seen = []
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=20)
    policies = {"ar": Autoregressive(), "fixed": Fixed(3)}
    path = tmp_path / "rows.jsonl"
    rows = sweep(
        SMALL, CONSTANT, policies, over_batches(base, [1, 2, 4]), path=path,
        progress=lambda done, total, name: seen.append((done, total, name)),
    )  # fmt: skip
    assert [(r["batch"], r["policy"]) for r in rows] == [
        (b, p) for b in (1, 2, 4) for p in policies
    ]
    assert seen[-1] == (6, 6, "fixed")
    stored = read_results(path)
    assert stored.complete
    assert [r["throughput_tok_s"] for r in stored.rows] == [r["throughput_tok_s"] for r in rows]
    assert [s.arrivals.rate for s in over_rates(base, [0.5, 2.0])] == [0.5, 2.0]
    with pytest.raises(DraftsimError, match="closed loop has no rate"):
        over_rates(replace(base, arrivals=ClosedLoop(2)), [1.0])


def test_file_rates_scale_to_what_was_asked(tmp_path):
    path = write(tmp_path / "a.csv", [f"{i * 0.5},10,5" for i in range(21)])
    base = Scenario(ArrivalFile(path), requests=None)
    for scenario in over_rates(base, [1.0, 8.0]):
        times = list(scenario.arrivals.times(np.random.default_rng(0)))
        assert 20 / times[-1] == pytest.approx(scenario.arrivals.rate)
    assert [s.arrivals.rate for s in over_rates(base, [1.0, 8.0])] == pytest.approx([1.0, 8.0])


def test_break_even_load():
    assert break_even_load([1, 2, 3], [1, 2, 5], [2, 3, 3]) == pytest.approx(2 + 1 / 3)
    assert break_even_load([1, 2], [1, 1], [2, 2]) == math.inf
    assert math.isnan(break_even_load([1, 2], [3, 1], [2, 2]))


def test_killed_run_leaves_readable_rows_marked_incomplete(tmp_path):
    path = tmp_path / "rows.jsonl"
    script = textwrap.dedent(
        """
        import sys
        from tests.test_serving_theory import bernoulli
        from policies.basic import Fixed
        from simulator.serving import ClosedLoop, Limits, Scenario, over_batches, sweep
        from traces.latency import LatencyTable
        base = Scenario(ClosedLoop(1), requests=10)
        sweep(bernoulli(0.7, 4, 20), LatencyTable.constant(1, 0.1), {"fixed": Fixed(3)},
              over_batches(base, [1] * 20_000), path=sys.argv[1])
        """
    )
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], env=env)
    try:
        for _ in range(600):
            if path.exists() and path.read_text().count("\n") > 4:
                break
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    stored = read_results(path)
    assert len(stored.rows) >= 3
    assert not stored.complete
    assert all(row["policy"] == "fixed" for row in stored.rows)


def test_results_files_tell_damage_from_interruption(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ResultsFile(path) as out:
        out.add({"a": 1.5, "b": math.nan, "c": np.float64(2)})
    assert read_results(path) == ([{"a": 1.5, "b": None, "c": 2.0}], True, {})
    whole = path.read_text()
    header = whole.index("\n")
    for cut in range(1, len(whole)):
        path.write_text(whole[:cut])
        if cut < header:
            with pytest.raises(FileError, match="no header"):
                read_results(path)
        else:
            assert read_results(path).complete == (cut == len(whole) - 1)
    path.write_text(whole.replace('"row"', '"row', 1))
    with pytest.raises(FileError, match="line 2 is not JSON"):
        read_results(path)
    with pytest.raises(FileError, match="cannot be read"):
        read_results(tmp_path / "none")
    with contextlib.suppress(RuntimeError), ResultsFile(path) as out:
        out.add({"a": 1})
        raise RuntimeError
    assert read_results(path) == ([{"a": 1}], False, {})


def test_azure_conversations_are_served(shared_data):
    trace = bernoulli(0.7, 40, 200, seed=9)
    base = ArrivalFile(shared_data / "arrivals" / "AzureLLMInferenceTrace_conv.csv")
    assert base.rate == pytest.approx(19366 / 3500, rel=0.02)
    scenario = Scenario(base, Limits(max_batch=64), requests=300)
    row = simulate(trace, CONSTANT, Fixed(3), scenario).row()
    assert row["requests"] == 300
    assert row["simulated_tokens"] == base.rows[2][:300].sum()


def test_replications_are_drawn_with_their_intervals_and_break_even_names_its_policy():
    scenario = Scenario(Poisson(1), Limits(4), requests=40, replications=3)
    policies = {"plain": Autoregressive(), "fast": Fixed(3)}
    rows = [
        row for rate in (0.05, 0.2, 5)
        for row in serve(SMALL, GRID, policies, replace(scenario, arrivals=Poisson(rate))).rows()
    ]  # fmt: skip
    axes = plots.plot_latency_load(rows, "ttft_s").axes[0]
    bars = [c for c in axes.collections if len(c.get_paths()) == 3]
    assert len(bars) == len(policies)
    assert "bars: 95 %" in axes.get_ylabel()
    assert all(t.get_text().startswith("fast: ") for t in axes.texts)
    single = [{k: v for k, v in row.items() if not k.endswith(("_lo", "_hi"))} for row in rows]
    axes = plots.plot_latency_load(single).axes[0]
    assert not axes.collections
    assert "95 %" not in axes.get_ylabel()


def test_what_is_slower_than_plain_decoding_is_told_without_colour():
    axes = plots.plot_speedup_grid([[0.8, 1.2], [1.0, 0.9]], [1, 8], [10, 200], "fixed").axes[0]
    hatched = [(p.get_x() + 0.5, p.get_y() + 0.5) for p in axes.patches if p.get_hatch()]
    assert sorted(hatched) == [(0, 0), (1, 1)]
    assert "hatched: slower" in axes.get_xlabel()


def test_figures_show_every_policy():
    base = Scenario(Poisson(1), Limits(max_batch=4), requests=30)
    policies = {"autoregressive": Autoregressive(), "fixed": Fixed(3)}
    by_batch = sweep(SMALL, GRID, policies, over_batches(base, [1, 2, 4]))
    axes = plots.plot_latency_throughput(by_batch).axes[0]
    for line, name in zip(axes.lines, policies, strict=True):
        mine = [r for r in by_batch if r["policy"] == name]
        assert line.get_label() == name
        assert list(line.get_xdata()) == [r["throughput_tok_s"] for r in mine]
        np.testing.assert_allclose(line.get_ydata(), [1e3 * r["tpot_s"]["mean"] for r in mine])
    by_rate = sweep(SMALL, GRID, policies, over_rates(base, [0.2, 1.0]))
    assert len(plots.plot_latency_load(by_rate).axes[0].lines) >= 2
    with pytest.raises(DraftsimError, match="rate"):
        plots.plot_latency_load(by_batch)
    grid = speedup_grid(SMALL, GRID, Fixed(3), Autoregressive(), [1, 8], [10, 200], base)
    assert grid.shape == (2, 2)
    assert (grid[0] > grid[1]).all(), "tokens cost more in a batch here, so speculation pays less"
    texts = [t.get_text() for t in plots.plot_speedup_grid(grid, [1, 8], [10, 200]).axes[0].texts]
    assert texts == [f"{v:.2f}" for v in grid.ravel()]
    with pytest.raises(DraftsimError, match="shape"):
        plots.plot_speedup_grid(grid, [1], [10, 200])


def test_lossy_rules_accept_more_and_say_so():
    trace = synthetic_trace(0.6, requests=6, tokens=60, seed=4, concentration=2)
    scenario = Scenario(ClosedLoop(2), Limits(max_batch=2), requests=6, warmup=0.0)

    class Everything(VerifyRule):
        def accept(self, draft, scores):
            return len(draft)

    exact = simulate(trace, CONSTANT, Fixed(3), scenario)
    lossy = simulate(trace, CONSTANT, Fixed(3), scenario, rule=Everything())
    assert lossy.recorder.accepted == lossy.recorder.drafted
    assert lossy.simulated_s < exact.simulated_s
    assert (exact.fidelity, lossy.fidelity) == ("exact", "approximate")
    with pytest.raises(DraftsimError, match="give no rule"):
        simulate(trace, CONSTANT, Fixed(3), replace(scenario, mode="pearl"), rule=Everything())


def test_built_in_batch_policies_serve():
    trace = synthetic_trace(0.7, requests=12, tokens=50, seed=3, concentration=2)
    scenario = Scenario(ClosedLoop(6), Limits(max_batch=6), requests=12, warmup=0.0)
    names = policy_names("batch")
    assert names
    policies = {n: parse_serving_policy(n, max_gamma=trace.max_gamma) for n in names}
    for name, runs in serve(trace, GRID, policies, scenario).runs.items():
        assert (runs[0].requests["tokens"] == 50).all(), name
        assert runs[0].recorder.drafted <= runs[0].recorder.draft_forwards


@given(st.integers(1, 8), st.integers(0, 6), st.integers(0, 200))
def test_policies_are_told_the_engine_s_own_cost(batch, gamma, context):
    told = TableCost(GRID)(batch, gamma, batch * (gamma + 1), context)
    drafts = GRID.seconds("draft", "forward", batch=batch, context=context + np.arange(gamma))
    verify = GRID.seconds("target", "forward", batch=batch, new_tokens=gamma + 1, context=context)
    assert told == pytest.approx(drafts.sum() + float(verify) + 7e-4 + gamma * 3e-4)
