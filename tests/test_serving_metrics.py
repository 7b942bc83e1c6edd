"""The figures of a run: warm-up, targets, paired policies, histograms and series."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.lengths.basic import Autoregressive, Fixed, Oracle
from simulator.serving import ClosedLoop, Deterministic, Limits, Poisson, Scenario, simulate
from simulator.serving.outcome.metrics import Histogram, Series
from simulator.serving.outcome.report import merged_rows, t_interval
from simulator.serving.outcome.results import flat
from simulator.targets import Targets
from tests.serving import CONSTANT, GRID, SMALL, little_error
from traces.acceptance.synthetic import trace_by_position
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError


def test_policies_meet_the_same_requests():
    scenario = Scenario(Poisson(1.0), Limits(max_batch=4), requests=60, replications=5)
    runs = [
        [
            simulate(SMALL, CONSTANT, policy, scenario, replication=i)
            for i in range(scenario.replications)
        ]
        for policy in (Autoregressive(), Fixed(3))
    ]
    for ar, fixed in zip(*runs, strict=True):
        a, b = (r.requests.sort_values("index") for r in (ar, fixed))
        assert a["arrival_s"].tolist() == b["arrival_s"].tolist()
        assert a["sequence"].tolist() == b["sequence"].tolist()
    ar, fixed = (np.array([run.row()["e2e_s"]["mean"] for run in own]) for own in runs)
    mean, low, high = t_interval(fixed - ar)
    assert low < mean < high < 0
    rows = [merged_rows([run.row() for run in own]) for own in runs]
    unpaired = sum(r["e2e_s_hi"] - r["e2e_s_lo"] for r in rows)
    assert high - low < unpaired, "common random numbers sharpen differences"
    assert {"ttft_s_p99", "tpot_s_mean", "throughput_tok_s"} <= set(flat(rows).columns)
    json.dumps(rows)


def test_warmup_requests_do_not_count():
    run = simulate(SMALL, CONSTANT, Fixed(3), Scenario(Poisson(2), requests=50, warmup=0.2))
    frame = run.requests
    kept = frame[frame["index"] >= 10]
    assert run.row()["e2e_s"]["mean"] == pytest.approx(kept["e2e_s"].mean())
    assert run.row()["warmup_requests"] == 10
    start, end = run.recorder.start_s, run.recorder.end_s
    assert start == frame.set_index("index")["arrival_s"][10]
    assert end == frame["arrival_s"].max()


@pytest.mark.parametrize(
    ("clients", "requests", "warmup", "skipped"),
    [(8, 100, 0.1, 16), (8, 100, 0.3, 30), (8, 20, 0.1, 10), (8, 100, 0.0, 0), (1, 100, 0.1, 10)],
)
def test_what_fills_a_closed_loop_does_not_count(clients, requests, warmup, skipped):
    scenario = Scenario(ClosedLoop(clients), Limits(clients), requests=requests, warmup=warmup)
    for by_iteration in (False, True):
        run = simulate(SMALL, CONSTANT, Fixed(3), scenario, by_iteration=by_iteration)
        assert run.row()["warmup_requests"] == skipped


def test_time_to_the_first_token_of_a_full_engine_is_that_of_a_long_run():
    # All prompts of the start wait for each other; later each comes almost alone.
    lengths = np.random.default_rng(1).integers(20, 200, 60)
    infos = [Request(str(i), "", 60, n, n, "length") for i, n in enumerate(lengths.tolist())]
    columns = {
        "request": np.repeat(np.arange(60), lengths).astype(np.int32),
        "position": np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        "offset": np.zeros(lengths.sum(), np.int16),
        "match": np.ones(lengths.sum(), np.int8),
    }
    trace = Trace(columns, infos)
    full = Scenario(ClosedLoop(32), Limits(32, token_budget=1 << 20), requests=320)
    short, long = (
        simulate(trace, GRID, Autoregressive(), replace(full, requests=n)).row()["ttft_s"]["mean"]
        for n in (320, 6400)
    )
    assert short == pytest.approx(long, rel=0.2)


def test_goodput_counts_requests_within_both_targets():
    scenario = Scenario(Poisson(20), Limits(max_batch=2), requests=60, warmup=0.0)
    loose = simulate(SMALL, CONSTANT, Fixed(3), scenario)
    frame = loose.requests
    ttft, tpot = float(frame["ttft_s"].median()), float(frame["tpot_s"].median())
    tight = simulate(
        SMALL, CONSTANT, Fixed(3), replace(scenario, targets=Targets(ttft, tpot))
    ).row()
    both = ((frame["ttft_s"] <= ttft) & (frame["tpot_s"] <= tpot)).mean()
    assert tight["within_targets"] == pytest.approx(both)
    assert loose.row()["within_targets"] == 1


@pytest.mark.parametrize("arrivals", [ClosedLoop(16), Poisson(8.0)])
def test_goodput_leaves_out_the_drain_as_throughput_does(arrivals):
    scenario = Scenario(arrivals, Limits(max_batch=16), requests=160)
    row = simulate(SMALL, CONSTANT, Fixed(3), scenario).row()
    # Every output has 40 tokens, and no target is missed.
    assert row["goodput_req_s"] == pytest.approx(row["throughput_tok_s"] / 40, rel=0.05)
    if arrivals.concurrency:  # Little's law
        assert row["goodput_req_s"] == pytest.approx(16 / row["e2e_s"]["mean"], rel=0.03)


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
    times, means = series.means(now)
    widths = np.minimum(now - times, series.interval_s)
    assert len(times) <= 16
    assert (means * widths).sum() == pytest.approx(series.integral)
    assert series.integral == pytest.approx(sum(s * v for s, v in steps))


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
    assert little_error(by_time) < 1e-9


@pytest.mark.parametrize("by_iteration", [False, True])
@pytest.mark.parametrize("mode", ["continuous", "pearl"])
def test_requests_cut_off_too_late_for_the_targets_have_missed_them(mode, by_iteration):
    # One at a time, a request takes 39 x 20 ms.  All are there within half a second.
    scenario = Scenario(
        Poisson(1000), Limits(max_batch=1), requests=200, warmup=0.0, max_time_s=10, mode=mode,
        targets=Targets(ttft_s=0.5),
    )  # fmt: skip

    def within(**targets):
        run = simulate(
            SMALL, CONSTANT, Autoregressive(), replace(scenario, **targets),
            by_iteration=by_iteration,
        )  # fmt: skip
        assert 0 < len(run.requests) < 20
        return run.row()["within_targets"]

    # The first meets it; the others waited longer, and most of them got no token at all.
    assert within() == pytest.approx(1 / 200)
    # The one that was being decoded can still meet this target, and so can those that wait.
    assert within(targets=Targets(tpot_s=0.03)) == 1
    # Nothing is known of requests that have just arrived.
    assert within(max_time_s=1.0, warmup=0.0, targets=Targets(ttft_s=2.0)) == 1


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
        (
            lambda: simulate(
                trace_by_position((0.6, 0.4)),
                CONSTANT,
                Fixed(1),
                Scenario(ClosedLoop(1), mode="dsi"),
            ),
            "longer drafts",
        ),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(DraftsimError, match=message):
        make()


def test_a_look_ahead_of_none_drafts_nothing():
    limits = Limits(lookahead=0)
    run = simulate(SMALL, CONSTANT, Fixed(3), Scenario(Poisson(1), limits, requests=5, warmup=0.0))
    assert run.recorder.drafted == 0
    assert run.recorder.tokens == 5 * 40
    with pytest.raises(DraftsimError, match="lookahead is -1, expected at least 0"):
        Limits(lookahead=-1)
