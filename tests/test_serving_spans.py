"""A span equals its iterations: every metric of a run, whichever way it is priced."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.batch.tables import BatchTable
from policies.core import DraftPolicy, Load
from policies.lengths.basic import Fixed, Oracle
from policies.registry import parse_policy, policy_names
from policies.rules.registry import parse_rule
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.cost.iteration import IterationCost
from simulator.serving.cost.together import TogetherCost
from simulator.serving.cost.work import Work, Works
from simulator.serving.spans import SpanEngine, clock_free
from tests.serving import GRID, arrival_file, bernoulli
from tests.spans import (
    LENGTHS,
    NARROW,
    PLAIN,
    SCENARIOS,
    SIGNALLED,
    TABLES,
    assert_same,
    ran,
)
from traces.store.recordings import find_trace

POLICIES = st.sampled_from(
    ["fixed:gamma=3", "autoregressive", "gammatune", "oracle:gamma_max=6", "svip:gamma_max=6"]
)


@pytest.mark.invariant(3)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCENARIOS, POLICIES, st.sampled_from([*TABLES]))
def test_spans_are_their_iterations(scenario, policy, cells):
    latency = TABLES[cells]
    assert_same(SIGNALLED, latency, parse_policy(policy, max_gamma=24), scenario)


@pytest.mark.parametrize("cells", ["grid", "along", "both"])
def test_drafts_that_are_not_handed_on_cost_the_same_many_at_a_time(cells):
    cost = IterationCost(TABLES[cells])
    # Contexts, drafted, draft passes, sequences that drafted, ...: nothing handed on, then some.
    works = [Work(90, 0, 3, 2, 2, 90, False, True), Work(96, 4, 3, 2, 3, 96, True, False)]
    works.append(Work(4, 2, 2, 2, 4, 4, True, True))  # a drafter that has read nothing yet
    one_by_one = [cost.of_work(work, 2, ()).total_s for work in works]
    columns = Works(
        *(np.array([int(value) for value in column]) for column in zip(*works, strict=True))
    )
    found = cost.together.seconds(columns, 2)
    assert found is not None
    np.testing.assert_allclose(found[0], one_by_one, rtol=1e-12)


@pytest.mark.parametrize("kv_blocks", [None, 40])
@pytest.mark.parametrize("policy", [Fixed(4), parse_policy("gammatune"), *LENGTHS])
def test_lengths_of_a_file_cut_and_repeat_recordings(tmp_path, kv_blocks, policy):
    rng = np.random.default_rng(3)
    rows = [
        f"2023-11-16 18:15:{i:02d}.0000000,{rng.integers(1, 90)},{rng.integers(1, 130)}"
        for i in range(40)
    ]
    arrivals = ArrivalFile(arrival_file(tmp_path / "arrivals.csv", *rows))
    for scale in (0.5, 30.0):
        scenario = Scenario(arrivals.scaled(scale), Limits(9, kv_blocks=kv_blocks), requests=None)
        assert_same(PLAIN, GRID, policy, scenario)


def test_lossy_rules_that_learn_nothing_are_replayed_too():
    trace, rule = find_trace("bundled"), parse_rule("typical")
    scenario = Scenario(ClosedLoop(4), Limits(4), requests=20)
    run, engine = ran(trace, GRID, Fixed(4), scenario, rule=rule)
    reference, _ = ran(trace, GRID, Fixed(4), scenario, rule=rule, by_iteration=True)
    assert isinstance(engine, SpanEngine)
    pd.testing.assert_frame_equal(run.requests, reference.requests, rtol=1e-9)


def test_the_last_to_think_ends_a_static_batch_that_waits_for_company():
    scenario = Scenario(ClosedLoop(3, 0.2), Limits(2), requests=15, mode="static")
    assert_same(SIGNALLED, GRID, Fixed(3), scenario)


@pytest.mark.invariant(3)
def test_long_spans_at_every_size_of_batch():
    long = bernoulli(0.6, 5, 700, seed=4)
    for batch in (1, 2, 5):
        assert_same(long, GRID, Fixed(3), Scenario(ClosedLoop(batch), Limits(batch), requests=9))


@pytest.mark.invariant(3)
@pytest.mark.parametrize("cells", [*TABLES])
def test_a_request_alone_costs_what_it_cost_before(cells):
    trace, latency = bernoulli(0.6, 4, 60, seed=5), TABLES[cells]
    for policy in (Fixed(3), BatchTable([[1, 9, 2]])):
        for arrivals in (ClosedLoop(1), Poisson(0.7)):  # others cut requests off
            for replication in range(2):
                scenario = Scenario(arrivals, Limits(2), requests=14, seed=replication)
                assert_same(trace, latency, policy, scenario)


def test_a_request_alone_is_priced_once(monkeypatch):
    priced = []
    keep = TogetherCost.seconds
    monkeypatch.setattr(TogetherCost, "seconds", lambda *args: priced.append(1) or keep(*args))
    trace, scenario = bernoulli(0.6, 4, 60, seed=6), Scenario(ClosedLoop(1), Limits(1), requests=12)
    simulate(trace, GRID, Fixed(3), scenario)
    assert len(priced) == 4
    simulate(trace, GRID, Fixed(3), scenario, replication=1)
    assert len(priced) == 4
    simulate(trace, NARROW, Fixed(3), scenario)
    assert len(priced) == 8


class LooksAtTheBatch(DraftPolicy):
    def __init__(self) -> None:
        self.length, self.gamma = 1, 4

    def begin_round(self, load: Load) -> None:
        self.length = 1 if load.batch > 2 else 4

    def keep_drafting(self, draft):
        return len(draft) < self.length


def test_policies_that_look_at_the_load_or_learn_go_iteration_by_iteration():
    scenario = Scenario(ClosedLoop(4), Limits(4), requests=8)
    _, engine = ran(PLAIN, GRID, LooksAtTheBatch(), scenario)
    assert not isinstance(engine, SpanEngine)
    assert not clock_free(parse_policy("hf-heuristic:persist=persistent"), None)
    assert not clock_free(parse_policy("exp3"), None)
    assert clock_free(Oracle(), None)
    free = {name for name in policy_names("single") if clock_free(parse_policy(name), None)}
    assert {"fixed", "gammatune", "svip", "cm-asd", "adaedl", "autoregressive"} <= free


def test_runs_of_equal_policies_share_their_replay(monkeypatch):
    seen = []
    keep = Fixed.keep_drafting
    monkeypatch.setattr(
        Fixed, "keep_drafting", lambda self, draft: seen.append(1) or keep(self, draft)
    )
    trace = bernoulli(0.7, 4, 30, seed=9)
    scenario = Scenario(ClosedLoop(2), Limits(2), requests=12)
    simulate(trace, GRID, Fixed(3), scenario)
    first = len(seen)
    simulate(trace, GRID, Fixed(3), scenario)
    assert 0 < first == len(seen)
    simulate(trace, GRID, Fixed(2), scenario)
    assert len(seen) > first
