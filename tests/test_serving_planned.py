"""Lengths by the number of running requests: served by spans, as by iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.batch.tables import BatchTable, DisableByBatchSize
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Scenario, Timeline, simulate
from simulator.serving.spans import PlannedEngine, SpanEngine
from tests.serving import GRID, arrival_file
from tests.spans import LENGTHS, PLAIN, SCENARIOS, SIGNALLED, TABLES, assert_same, ran
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import TailError

SHORT = synthetic_trace(0.5, requests=5, tokens=30, max_gamma=3, concentration=3.0, seed=3)
RECORDED = {
    "signalled": SIGNALLED,
    "plain": PLAIN,
    "takes verified": replace(SIGNALLED, meta={**SIGNALLED.meta, "takes_verified": True}),
    "drafts end": replace(SHORT, meta={**SHORT.meta, "drafts_end": True}),
    "eos": replace(PLAIN, requests=[replace(r, ended="eos") for r in PLAIN.requests]),
}


@pytest.mark.invariant(3)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SCENARIOS, st.sampled_from(LENGTHS), st.sampled_from([*TABLES]), st.sampled_from([*RECORDED])
)
def test_lengths_by_number_of_requests_are_served_by_spans(scenario, policy, cells, recorded):
    engine = assert_same(RECORDED[recorded], TABLES[cells], policy, scenario)
    assert isinstance(engine, PlannedEngine)


def test_drafts_are_as_many_as_requests_of_the_iteration_that_makes_them_ask_for(tmp_path):
    class Drawn(Timeline):
        def round(self, index, start_s, seconds, outcome, wasted):
            drafted[index].append(outcome.drafted)

    file = tmp_path / "two.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,20,5\n0,20,40\n")
    drafted: dict[int, list[int]] = {0: [], 1: []}
    scenario = Scenario(ArrivalFile(file), Limits(2))
    simulate(PLAIN, GRID, BatchTable([[1, 1, 3], [2, 2, 0]]), scenario, timeline=Drawn("unopened"))
    assert drafted[0] == [0] * 4
    # The fifth round's were made, or not, as the other request left.
    assert drafted[1][:6] == [0] * 5 + [3]


def test_no_draft_crosses_the_seam_of_a_recording_that_ended_before_its_limit(tmp_path):
    ended = [replace(r, ended="eos", max_new_tokens=r.tokens + 20) for r in PLAIN.requests]
    lines = [f"{second},20,90" for second in range(6)]
    file = arrival_file(tmp_path / "long.csv", *lines)
    trace = replace(PLAIN, requests=ended)
    engine = assert_same(trace, GRID, BatchTable([[1, 9, 5]]), Scenario(ArrivalFile(file)))
    assert isinstance(engine, PlannedEngine)


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
