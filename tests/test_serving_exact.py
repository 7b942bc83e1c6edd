"""The serving simulator's shortcuts give what the long way gives."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.batch.base import Policy
from policies.core import speculate
from policies.lengths.basic import Fixed, Oracle
from policies.registry import parse_serving_policy
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.arrivals import Job
from simulator.serving.cost import PassReader
from simulator.serving.outcome.metrics import Series
from simulator.serving.sequence import EngineState, ServedSequence
from simulator.serving.source import SimulatedClock
from tests.serving import GRID, arrival_file, bernoulli, table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import SignalError, TailError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED
from traces.latency.table import LatencyTable

SIGNALLED = synthetic_trace(0.7, requests=6, tokens=40, max_gamma=24, concentration=3.0, seed=1)
PLAIN = bernoulli(0.75, 12, 40, seed=2)

RAGGED = table_of(
    [
        (m, "forward", b, n, c, s * (0.01 + 1e-4 * b * n + 2e-6 * b * c + 3e-8 * b * n * c))
        for m, s in (("target", 1.0), ("draft", 0.15))
        for b, widths, contexts in (
            (1, (1, 2, 5), (0, 40, 300, 900)),
            (3, (1, 4), (10, 300)),
            (8, (1, 2, 9), (0, 100)),
        )
        for n in widths
        for c in contexts
    ]
)
"""Lines that begin and end at different contexts, widths that differ from batch to batch."""


# --- the clock --------------------------------------------------------------------------


def everything(policy: Policy, trace: Trace, scenario: Scenario) -> tuple:
    run = simulate(trace, GRID, policy, scenario)
    row = run.row()
    del row["elapsed_s"]
    series = [s.means(run.simulated_s) for s in (run.recorder.batch, run.recorder.kv_blocks)]
    return run, row, run.requests, series, run.coverage


@pytest.mark.invariant(3)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(["fixed:gamma=3", "gammatune", "cm-asd", "goodput", "turbospec"]),
    mode=st.sampled_from(["continuous", "static"]),
    arrivals=st.one_of(
        st.floats(0.05, 40).map(Poisson),
        st.builds(ClosedLoop, st.integers(1, 5), st.sampled_from([0.0, 0.003, 0.2])),
    ),
    max_batch=st.integers(1, 6),
    blocks=st.one_of(st.none(), st.integers(8, 30)),
    max_time_s=st.one_of(st.none(), st.floats(0.01, 20)),
    seed=st.integers(0, 1000),
)
def test_skipping_events_changes_nothing(
    policy, mode, arrivals, max_batch, blocks, max_time_s, seed
):
    trace = SIGNALLED
    chosen = parse_serving_policy(policy, max_gamma=trace.max_gamma)
    scenario = Scenario(
        arrivals, Limits(max_batch, kv_blocks=blocks), requests=15, mode=mode, seed=seed,
        max_time_s=max_time_s,
    )  # fmt: skip
    skipped = everything(chosen, trace, scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedClock, "skip", lambda self, seconds: False)
        by_event = everything(chosen, trace, scenario)
    # To the last bit: NaN where there is nothing, equal otherwise.
    np.testing.assert_equal(skipped[1], by_event[1])
    pd.testing.assert_frame_equal(skipped[2], by_event[2], check_exact=True)
    np.testing.assert_equal(skipped[3], by_event[3])
    assert skipped[4] == by_event[4]


def test_most_iterations_at_light_load_take_no_event(monkeypatch):
    taken = []
    skip = SimulatedClock.skip
    monkeypatch.setattr(
        SimulatedClock, "skip", lambda self, seconds: taken.append(skip(self, seconds)) or taken[-1]
    )
    run = simulate(PLAIN, GRID, Fixed(3), Scenario(Poisson(0.1), requests=12), by_iteration=True)
    assert len(taken) == run.recorder.iterations
    assert taken.count(False) <= 12, "an arrival falls into one iteration at most"


def test_the_clock_lets_others_go_first():
    seen = []
    clock = SimulatedClock()

    def other():
        yield clock.timeout(2.0)
        seen.append(("other", clock.now))

    def engine():
        yield clock.timeout(0.5)
        assert clock.skip(1.0)
        seen.append(("engine", clock.now))
        assert not clock.skip(0.5), "at the same moment, the other was there first"
        assert not clock.skip(9.0)
        assert clock.now == 1.5
        yield clock.timeout(9.0)
        assert clock.skip(1.0)
        seen.append(("engine", clock.now))

    clock.process(other())
    clock.run(until=clock.process(engine()))
    assert seen == [("engine", 1.5), ("other", 2.0), ("engine", 11.5)]


# --- a sequence's own rounds ----------------------------------------------------------------


def test_rounds_of_a_sequence_end_where_the_recording_does():
    short = synthetic_trace(0.3, requests=2, tokens=30, max_gamma=2, concentration=2.0, seed=3)
    sequence = ServedSequence(short, Job(0.0, 0, 10, 30), 9, EngineState())
    with pytest.raises(TailError, match="past the recorded tail"):
        list(speculate(sequence, Fixed(9)))
    columns = {**PLAIN.columns, "match": PLAIN.columns["match"].copy()}
    columns["match"][:] = -1
    unknown = Trace(columns, PLAIN.requests)
    sequence = ServedSequence(unknown, Job(0.0, 0, 10, 30), 9, EngineState())
    with pytest.raises(SignalError, match="not observed"):
        list(speculate(sequence, Fixed(2)))
    with pytest.raises(ValueError, match="run of accepted drafts"):
        list(speculate(sequence, Oracle()))


# --- reading latencies ----------------------------------------------------------------------


@pytest.mark.invariant(5)
@pytest.mark.parametrize("cells", [RAGGED, GRID])
@settings(max_examples=250, deadline=None)
@given(
    batch=st.one_of(st.integers(1, 10), st.floats(0.5, 12)),
    width=st.one_of(st.integers(1, 10), st.floats(0.5, 12)),
    contexts=st.lists(st.one_of(st.integers(0, 1200), st.floats(0, 2000)), min_size=1, max_size=4),
)
def test_readings_equal_the_table_s_on_ragged_grids_too(cells, batch, width, contexts):
    reader = PassReader(cells, "target")
    origins = []
    asked = [*contexts, 0, 40, 100, 300, 900, *contexts]
    wanted = cells.estimate("target", "forward", batch=batch, new_tokens=width, context=asked)
    # One reader for all: what it keeps of one context must not spoil the next.
    for context, seconds, origin in zip(asked, *wanted, strict=True):
        assert reader(batch, width, context) == pytest.approx(float(seconds), rel=1e-12)
        origins.append(int(origin))
    names = {MEASURED: "measured", INTERPOLATED: "interpolated", EXTRAPOLATED: "extrapolated"}
    seen = {entry.origin: entry for entry in reader.coverage}
    assert {n: e.passes for n, e in seen.items()} == {
        names[o]: origins.count(o) for o in sorted(set(origins))
    }
    for entry in seen.values():
        assert (entry.batch, entry.new_tokens) == ((batch, batch), (width, width))
    assert reader.coverage == list(seen.values()), "asking does not count"


@pytest.mark.invariant(3)
@pytest.mark.parametrize("cells", [RAGGED, GRID, LatencyTable.constant(0.02, 0.002, 0.03)])
@settings(max_examples=200, deadline=None)
@given(
    batch=st.one_of(st.integers(1, 12), st.floats(0.5, 12)),
    context=st.one_of(st.integers(0, 1200), st.floats(0, 1200)),
    count=st.integers(0, 9),
    again=st.integers(0, 3),
)
def test_passes_in_a_row_are_single_passes(cells, batch, context, count, again):
    together, alone = PassReader(cells, "draft"), PassReader(cells, "draft")
    for start in (context, context + again, context):
        total = together.run(batch, start, count)
        assert total == pytest.approx(sum(alone(batch, 1.0, start + i) for i in range(count)))
    assert together.coverage == alone.coverage


def test_coverage_outlives_the_readings_kept(monkeypatch):
    monkeypatch.setattr("simulator.serving.cost.PLANS", 4)
    reader = PassReader(GRID, "target")
    for batch in range(1, 9):
        for context in (0, 20, 400):
            reader(batch, 1, context)
    found = {entry.origin: entry for entry in reader.coverage}
    assert sum(entry.passes for entry in found.values()) == 24
    assert found["extrapolated"].passes == 8
    assert found["extrapolated"].batch == (1, 8)
    assert found["interpolated"].context == (0, 20)
    assert found["measured"].context == (0, 0)


# --- what is kept of a run --------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(1e-4, 5), st.integers(0, 2), st.booleans()), max_size=60))
def test_a_series_does_not_depend_on_how_time_is_cut(steps):
    whole, cut, now = Series(points=16), Series(points=16), 0.0
    for seconds, value, gap in steps:
        now += 0.5 if gap else 0.0
        whole.add(now, now + seconds, value)
        for part in range(4):
            cut.add(now + seconds * part / 4, now + seconds * (part + 1) / 4, value)
        now += seconds
    assert cut.integral == pytest.approx(whole.integral)
    np.testing.assert_allclose(cut.means(now)[1], whole.means(now)[1], atol=1e-9)


@pytest.mark.invariant(6)
def test_a_file_served_twice_is_served_alike(tmp_path):
    path = arrival_file(tmp_path / "a.csv", *(f"{i / 3},{20 + i},{1 + i % 50}" for i in range(40)))
    scenario = Scenario(ArrivalFile(path), Limits(4, kv_blocks=12), requests=None)
    first, again = (simulate(PLAIN, GRID, Fixed(4), scenario) for _ in range(2))
    pd.testing.assert_frame_equal(first.requests, again.requests, check_exact=True)
    for name in ("start_s", "end_s", "start_tokens", "end_tokens"):
        assert getattr(first.recorder, name) == getattr(again.recorder, name)


def test_engines_of_one_table_read_the_same_lines_and_count_for_themselves():
    first, second = PassReader(GRID, "target"), PassReader(GRID, "target")
    alone = PassReader(LatencyTable(GRID.cells, GRID.meta), "target")
    sizes = [(b, w, c) for b in (1, 2.5, 9) for w in (1, 3, 40) for c in (0, 77, 5000)]
    for size in sizes:
        assert first(*size) == second(*size) == alone(*size)
    second(1, 1, 0)
    grid = GRID.grid("target", "forward")
    assert grid.line(2.5, 3) is grid.line(2.5, 3)
    assert first.coverage == alone.coverage != second.coverage
