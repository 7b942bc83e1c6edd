"""A span equals its iterations: every metric of a run, whichever way it is priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.basic import Fixed, Oracle
from policies.batch.tables import BatchTable, DisableByBatchSize
from policies.core import DraftPolicy, Load
from policies.registry import parse_policy, policy_names
from policies.rules.registry import parse_rule
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.cost.iteration import IterationCost
from simulator.serving.cost.reader import PassReader
from simulator.serving.cost.together import TogetherCost
from simulator.serving.cost.work import Work, Works
from simulator.serving.outcome.report import Run
from simulator.serving.spans import PlannedEngine, SpanEngine, clock_free
from simulator.serving.station import Policy
from tests.serving import CONSTANT, GRID, arrival_file, bernoulli, table
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import TailError
from traces.latency.table import LatencyTable
from traces.replay.always import drafting_always
from traces.store.recordings import find_trace

SIGNALLED = synthetic_trace(0.7, requests=6, tokens=40, max_gamma=24, concentration=3.0, seed=1)
PLAIN = bernoulli(0.75, 12, 40, seed=2)
SHORT = synthetic_trace(0.5, requests=5, tokens=30, max_gamma=3, concentration=3.0, seed=3)
RECORDED = {
    "signalled": SIGNALLED,
    "plain": PLAIN,
    "takes verified": replace(SIGNALLED, meta={**SIGNALLED.meta, "takes_verified": True}),
    "drafts end": replace(SHORT, meta={**SHORT.meta, "drafts_end": True}),
    "eos": replace(PLAIN, requests=[replace(r, ended="eos") for r in PLAIN.requests]),
}
NARROW = table(
    [
        (m, "forward", b, n, c, s * (0.01 + 1e-4 * b * n + 2e-6 * b * c))
        for m, s in (("target", 1.0), ("draft", 0.15))
        for b in (1, 2) for n in (1, 2) for c in (30, 60)
    ]
)  # fmt: skip
"""Most sizes lie beyond what it measured."""
RAGGED = table(
    [
        ("target", "forward", b, n, c + b + 5 * n, 0.01 + 1e-4 * b * n + 2e-6 * b * c * n)
        for b, n in ((1, 1), (1, 4), (1, 9), (2, 1), (2, 3), (2, 9), (8, 1), (8, 2), (8, 9))
        for c in (20, 90, 210) if (b, n, c) != (2, 3, 210)
    ]
)  # fmt: skip
"""Every line has contexts of its own."""
ALONG = LatencyTable(
    pd.concat([
        GRID.cells,
        GRID.cells.query("model == 'draft' and phase == 'forward'").assign(phase="along"),
    ], ignore_index=True)
)  # fmt: skip
"""Of an engine whose drafter runs in every iteration."""


def ran(
    trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario, **options: Any
) -> tuple[Run, Any]:
    engines: list[Any] = []
    run = simulate(trace, latency, policy, scenario, audit=engines.append, **options)
    return run, engines[0]


def assert_same(trace: Trace, latency: LatencyTable, policy: Policy, scenario: Scenario) -> Any:
    run, engine = ran(trace, latency, policy, scenario)
    reference, other = ran(trace, latency, policy, scenario, by_iteration=True)
    assert isinstance(engine, SpanEngine)
    assert not isinstance(other, SpanEngine)
    row, expected = run.row(), reference.row()
    for measured in (row, expected):
        del measured["elapsed_s"]
    same(row, expected, "row")
    pd.testing.assert_frame_equal(run.requests, reference.requests, rtol=1e-9)
    for name in ("batch", "kv_blocks"):
        ours, theirs = getattr(run.recorder, name), getattr(reference.recorder, name)
        np.testing.assert_allclose(ours.integral, theirs.integral, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(
            ours.means(run.simulated_s), theirs.means(run.simulated_s), rtol=1e-9, atol=1e-9
        )
    assert run.recorder.length_changes == reference.recorder.length_changes
    assert len(run.coverage) == len(reference.coverage)
    for entry, wanted in zip(run.coverage, reference.coverage, strict=True):
        same(list(entry), list(wanted), f"coverage of {wanted.model} {wanted.phase}")
    slots = [
        [(s.index, s.context, s.tokens, s.steps, s.drafted, s.accepted, s.prefill_left)
         for s in (*e.scheduler.running, *e.scheduler.waiting)]
        for e in (engine, other)
    ]  # fmt: skip
    assert slots[0] == slots[1]
    if run.status == "complete":  # a run cut off in an iteration has reserved blocks for it
        assert engine.scheduler.pool.used == other.scheduler.pool.used
    engine.scheduler.pool.audit()
    return engine


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
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12, err_msg=where)
    else:
        assert value == expected, where


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
    chunked_prefill=st.booleans(),
)
POLICIES = st.sampled_from(
    ["fixed:gamma=3", "autoregressive", "gammatune", "oracle:gamma_max=6", "svip:gamma_max=6"]
)

TABLES = {
    "grid": GRID, "narrow": NARROW, "constant": CONSTANT, "along": ALONG,
    "always": drafting_always(GRID, 4), "both": drafting_always(ALONG, 3),
}  # fmt: skip


@pytest.mark.invariant(3)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(ARRIVALS, LIMITS, POLICIES, st.sampled_from([*TABLES]), st.data())
def test_spans_are_their_iterations(arrivals, limits, policy, cells, data):
    latency = TABLES[cells]
    scenario = Scenario(
        arrivals, limits, requests=data.draw(st.integers(1, 25)),
        mode=data.draw(st.sampled_from(["continuous", "continuous", "static"])),
        seed=data.draw(st.integers(0, 5)),
        max_time_s=data.draw(st.sampled_from([None, None, 0.7, 3.0])),
        max_tokens=data.draw(st.sampled_from([None, None, 100, 333])),
    )  # fmt: skip
    assert_same(SIGNALLED, latency, parse_policy(policy, max_gamma=24), scenario)


LENGTHS = [
    BatchTable([[1, 1, 5], [2, 3, 2], [4, 9, 0]]),
    BatchTable([[1, 2, 0], [3, 4, 4], [5, 9, 1]], in_step=False),
    BatchTable([[1, 9, 3]]),
    DisableByBatchSize(4, threshold=3, forever=False),
]


@pytest.mark.invariant(3)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ARRIVALS, LIMITS, st.sampled_from(LENGTHS), st.sampled_from([*TABLES]),
    st.sampled_from([*RECORDED]), st.data(),
)  # fmt: skip
def test_lengths_by_number_of_requests_are_served_by_spans(
    arrivals, limits, policy, cells, recorded, data
):
    scenario = Scenario(
        arrivals, limits, requests=data.draw(st.integers(1, 25)),
        mode=data.draw(st.sampled_from(["continuous", "continuous", "static"])),
        seed=data.draw(st.integers(0, 5)),
        max_time_s=data.draw(st.sampled_from([None, None, 0.7, 3.0])),
        max_tokens=data.draw(st.sampled_from([None, None, 100, 333])),
    )  # fmt: skip
    engine = assert_same(RECORDED[recorded], TABLES[cells], policy, scenario)
    assert isinstance(engine, PlannedEngine)


@pytest.mark.parametrize("kv_blocks", [None, 40])
def test_planned_lengths_cut_and_repeat_recordings(tmp_path, kv_blocks):
    rng = np.random.default_rng(5)
    rows = [
        f"2023-11-16 18:15:{i:02d}.0000000,{rng.integers(1, 90)},{rng.integers(1, 130)}"
        for i in range(40)
    ]
    arrivals = ArrivalFile(arrival_file(tmp_path / "arrivals.csv", *rows))
    for scale in (0.5, 30.0):
        scenario = Scenario(arrivals.scaled(scale), Limits(9, kv_blocks=kv_blocks), requests=None)
        for policy in LENGTHS:
            assert_same(PLAIN, GRID, policy, scenario)


def test_a_length_past_the_recorded_tail_is_refused_alike():
    trace = synthetic_trace(0.5, requests=3, tokens=40, max_gamma=3, concentration=3.0, seed=2)
    scenario = Scenario(ClosedLoop(2), Limits(2), requests=6)
    for by_iteration in (False, True):
        with pytest.raises(TailError, match="past the recorded tail"):
            simulate(trace, GRID, BatchTable([[1, 9, 8]]), scenario, by_iteration=by_iteration)


def test_tables_by_context_and_requests_switched_off_for_good_go_iteration_by_iteration():
    by_context = BatchTable([[1, 9, 0, 40, 3], [1, 9, 41, 999, 1]])
    assert by_context.planned_at(1) is None
    assert DisableByBatchSize(4, threshold=3).planned_at(1) is None
    _, engine = ran(PLAIN, GRID, by_context, Scenario(ClosedLoop(2), Limits(2), requests=4))
    assert not isinstance(engine, SpanEngine)


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
def test_lengths_of_a_file_cut_and_repeat_recordings(tmp_path, kv_blocks):
    rng = np.random.default_rng(3)
    rows = [
        f"2023-11-16 18:15:{i:02d}.0000000,{rng.integers(1, 90)},{rng.integers(1, 130)}"
        for i in range(40)
    ]
    arrivals = ArrivalFile(arrival_file(tmp_path / "arrivals.csv", *rows))
    for scale in (0.5, 30.0):
        scenario = Scenario(arrivals.scaled(scale), Limits(6, kv_blocks=kv_blocks), requests=None)
        for policy in (Fixed(4), parse_policy("gammatune")):
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


SIZES = st.tuples(
    st.lists(
        st.tuples(
            st.one_of(st.floats(1, 9), st.integers(1, 9).map(float)),
            st.one_of(st.floats(0, 900), st.sampled_from([0.0, 20.0, 50.0, 90.0, 210.0, 300.0])),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([1, 2, 3, 5.5, 8]),
)


@pytest.mark.invariant(3)
@settings(max_examples=120, deadline=None)
@given(SIZES, st.sampled_from([GRID, RAGGED]))
def test_many_readings_are_the_readings_one_by_one(sizes, latency):
    pairs, batch = sizes
    together, alone = PassReader(latency, "target"), PassReader(latency, "target")
    widths, contexts = (np.array(column) for column in zip(*pairs, strict=True))
    many = together.many(batch, widths, contexts)
    expected = [alone(batch, w, c) for w, c in pairs]
    np.testing.assert_allclose(many, expected, rtol=1e-12)
    together.count(batch, widths, contexts)
    assert together.coverage == alone.coverage


@pytest.mark.invariant(3)
@pytest.mark.parametrize("batch", [1, 5.5, 12])
def test_many_readings_beyond_the_measured_sizes_are_the_readings_one_by_one(batch):
    together, alone = PassReader(GRID, "target"), PassReader(GRID, "target")
    widths, contexts = np.linspace(1, 14, 60), np.linspace(900, 0, 60).round()
    many = together.many(batch, widths, contexts)
    expected = [alone(batch, w, c) for w, c in zip(widths, contexts, strict=True)]
    np.testing.assert_allclose(many, expected, rtol=1e-12)
    together.count(batch, widths, contexts)
    assert {entry.origin for entry in alone.coverage} >= {"extrapolated"}
    assert together.coverage == alone.coverage


def test_few_sizes_beyond_the_measured_ones_are_left_to_the_reader():
    reader = PassReader(GRID, "target")
    one = np.ones(1)
    assert reader.many(9, one, one) is None
    assert reader.many(1, 10 * one, one) is None
    assert reader.many(1, one, 301 * one) is not None
