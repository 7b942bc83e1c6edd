"""Overload, bounds on a run, and values that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.lengths.basic import Fixed, Oracle
from simulator.serving import ClosedLoop, Deterministic, Limits, Poisson, Scenario, simulate
from tests.serving import CONSTANT, SMALL, little_error
from traces.errors import DraftsimError


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


def test_a_look_ahead_of_none_drafts_nothing():
    limits = Limits(lookahead=0)
    run = simulate(SMALL, CONSTANT, Fixed(3), Scenario(Poisson(1), limits, requests=5, warmup=0.0))
    assert run.recorder.drafted == 0
    assert run.recorder.tokens == 5 * 40
    with pytest.raises(DraftsimError, match="lookahead is -1, expected at least 0"):
        Limits(lookahead=-1)
