"""The figures of a run: warm-up, targets, paired policies, histograms and series."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.lengths.basic import Autoregressive, Fixed
from simulator.serving import Limits, Poisson, Scenario, serve, simulate
from simulator.serving.outcome.metrics import Histogram, Series
from simulator.serving.outcome.report import t_interval
from tests.serving import CONSTANT, SMALL


def test_policies_meet_the_same_requests():
    scenario = Scenario(Poisson(1.0), Limits(max_batch=4), requests=60, replications=5)
    result = serve(SMALL, CONSTANT, {"ar": Autoregressive(), "fixed": Fixed(3)}, scenario)
    for ar, fixed in zip(result.runs["ar"], result.runs["fixed"], strict=True):
        a, b = (r.requests.sort_values("index") for r in (ar, fixed))
        assert a["arrival_s"].tolist() == b["arrival_s"].tolist()
        assert a["sequence"].tolist() == b["sequence"].tolist()
    ar, fixed = (
        np.array([run.row()["e2e_s"]["mean"] for run in result.runs[name]])
        for name in ("ar", "fixed")
    )
    mean, low, high = t_interval(fixed - ar)
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
    times, means = series.means(now)
    widths = np.minimum(now - times, series.interval_s)
    assert len(times) <= 16
    assert (means * widths).sum() == pytest.approx(series.integral)
    assert series.integral == pytest.approx(sum(s * v for s, v in steps))
