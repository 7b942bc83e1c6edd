"""The compiled loop is the engine by events: every metric of a run, whichever way it is served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from policies.batch.tables import BatchTable, DisableByBatchSize
from policies.core import DraftPolicy, Load
from policies.lengths.basic import Fixed, Oracle
from policies.registry import parse_policy, policy_names
from policies.rules.registry import parse_rule
from simulator.machine_code import FOLDER
from simulator.serving import (
    ArrivalFile,
    ClosedLoop,
    LeastRequests,
    Limits,
    Poisson,
    RandomSplit,
    RoundRobin,
    Scenario,
    Timeline,
    simulate,
)
from simulator.serving.arrivals import Deterministic, Job
from simulator.serving.compiled import arrays, engine, loop
from simulator.serving.cost import TARGET, EngineCost
from simulator.serving.sequence import clock_free
from simulator.serving.study import InOrder
from tests.compiled import LENGTHS, PLAIN, PROMPTED, SCENARIOS, SIGNALLED, assert_same, ran
from tests.random_traces import trace_by_start
from tests.serving import GRID, SMALL, arrival_file, bernoulli, table_of
from tests.test_serving_exact import RAGGED
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED
from traces.latency.table import ANY_CONTEXT, LatencyTable
from traces.store.recordings import find_trace


def around() -> LatencyTable:
    """With several prompts measured in one pass, and what a server puts around its engine."""
    rows = [
        (m, "prefill", b, n, 0, 1e-4 * n * b**0.8)
        for m in ("target", "draft") for b in (2, 4) for n in (8, 40)
    ]  # fmt: skip
    rows += [("server", "iteration", 1, 1, 0, 2e-4), ("server", "request", 1, 1, 0, 3e-3)]
    rows += [("server", "apart", 3, 1, 0, 4e-3)]
    cells = [PROMPTED["mixed"].cells, table_of(rows).cells]
    return LatencyTable(pd.concat(cells, ignore_index=True))


def in_graphs() -> LatencyTable:
    """In an engine whose widest steps alone are full CUDA graphs, and take half as long."""
    cells = GRID.cells.copy()
    verifying = (cells["model"] == "target") & (cells["phase"] == "forward")
    cells.loc[verifying & (cells["new_tokens"] == cells["new_tokens"].max()), "median_s"] /= 2
    return LatencyTable(cells, {"engine": {"cudagraph_mode": "FULL_AND_PIECEWISE"}})


CELLS = {**PROMPTED, "around": around(), "graphs": in_graphs()}
SHORT = synthetic_trace(0.5, requests=5, tokens=30, max_gamma=3, concentration=3.0, seed=3)
RECORDED = {
    "signalled": SIGNALLED,
    "plain": PLAIN,
    "takes verified": replace(SIGNALLED, meta={**SIGNALLED.meta, "takes_verified": True}),
    "drafts end": replace(SHORT, meta={**SHORT.meta, "drafts_end": True}),
    "finds nothing": trace_by_start(5, 0.6, 4, False, True),
    "eos": replace(PLAIN, requests=[replace(r, ended="eos") for r in PLAIN.requests]),
}
POLICIES = st.sampled_from(
    ["fixed:gamma=3", "autoregressive", "gammatune", "oracle:gamma_max=6", "svip:gamma_max=6"]
)


@dataclass(frozen=True)
class AnyLength(ClosedLoop):
    """Prompts and outputs of any length: cut recordings and repeated ones, and single tokens."""

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        for job in super().jobs(trace, rng, requests):
            prompt, output = rng.integers(1, (60, 90)).tolist()
            yield job._replace(prompt_tokens=prompt, output_tokens=rng.choice([1, 2, output]))


# --- equality with the events ---------------------------------------------------------------


@pytest.mark.invariant(3)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCENARIOS, POLICIES, st.sampled_from([*CELLS]), st.sampled_from([0.0, 0.1, 0.5]))
@example(
    # Nothing takes any time: the series over time still cover the run.
    Scenario(Poisson(0.2), Limits(1, 30, None, 4), requests=1, max_time_s=0.7, seed=2),
    "fixed:gamma=3", "free prompts", 0.0,
)  # fmt: skip
@example(
    # Both requests are refused: nothing runs at all.
    Scenario(Poisson(200.0), Limits(6, 200, 14, 4, False), requests=2), "svip:gamma_max=6",
    "narrow", 0.1,
)  # fmt: skip
def test_compiled_iterations_are_the_iterations(scenario, policy, cells, warmup):
    scenario = replace(scenario, warmup=warmup)
    assert_same(SIGNALLED, CELLS[cells], parse_policy(policy, max_gamma=24), scenario)


@pytest.mark.invariant(3)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCENARIOS, st.sampled_from([Fixed(3), parse_policy("gammatune:gamma=2,gamma_max=4")]),
       st.sampled_from([*CELLS]))  # fmt: skip
def test_searches_that_find_nothing_are_the_iterations(scenario, policy, cells):
    assert_same(RECORDED["finds nothing"], CELLS[cells], policy, scenario)


@pytest.mark.invariant(3)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCENARIOS, st.sampled_from(LENGTHS), st.sampled_from([*CELLS]), st.sampled_from([*RECORDED]))
def test_lengths_by_number_of_requests_are_the_iterations(scenario, policy, cells, recorded):
    assert_same(RECORDED[recorded], CELLS[cells], policy, scenario)


@pytest.mark.invariant(3)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SCENARIOS, st.integers(1, 9), st.one_of(POLICIES.map(parse_policy), st.sampled_from(LENGTHS))
)
def test_a_closed_loop_of_any_lengths_is_its_iterations(scenario, clients, policy):
    assert_same(
        SIGNALLED, GRID, policy, replace(scenario, arrivals=AnyLength(clients), requests=60)
    )


def test_some_requests_lose_their_place():
    scenario = Scenario(Poisson(200.0), Limits(9, kv_blocks=20), requests=25)
    run, _ = assert_same(SIGNALLED, GRID, Fixed(3), scenario)
    assert run.requests["preemptions"].sum() > 5


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


def test_no_draft_crosses_the_seam_of_a_recording_that_ended_before_its_limit(tmp_path):
    ended = [replace(r, ended="eos", max_new_tokens=r.tokens + 20) for r in PLAIN.requests]
    file = arrival_file(tmp_path / "long.csv", *(f"{second},20,90" for second in range(6)))
    trace = replace(PLAIN, requests=ended)
    for policy in (BatchTable([[1, 9, 5]]), Fixed(5)):
        assert_same(trace, GRID, policy, Scenario(ArrivalFile(file)))


def test_lossy_rules_that_learn_nothing_are_served_too():
    for arrivals in (Poisson(30.0), ClosedLoop(4)):
        scenario = Scenario(arrivals, Limits(4), requests=20)
        assert_same(find_trace("bundled"), GRID, Fixed(4), scenario, rule=parse_rule("typical"))


def test_the_last_to_think_ends_a_static_batch_that_waits_for_company():
    scenario = Scenario(ClosedLoop(3, 0.2), Limits(2), requests=15, mode="static")
    assert_same(SIGNALLED, GRID, Fixed(3), scenario)


@pytest.mark.invariant(3)
def test_long_requests_at_every_size_of_batch():
    long = bernoulli(0.6, 5, 700, seed=4)
    for batch in (1, 2, 5):
        assert_same(long, GRID, Fixed(3), Scenario(ClosedLoop(batch), Limits(batch), requests=9))


def test_requests_that_could_never_finish_bring_the_next_of_a_closed_loop():
    scenario = Scenario(AnyLength(4), Limits(3, kv_blocks=5, block_size=16), requests=60)
    for think in (0.0, 0.3):
        changed = replace(scenario, arrivals=AnyLength(4, think))
        run, _ = assert_same(PLAIN, GRID, Fixed(3), changed)
        assert run.recorder.rejected > 5


@pytest.mark.invariant(3)
@pytest.mark.parametrize("router", [RoundRobin(), RandomSplit()])
@pytest.mark.parametrize("rate", [5.0, 90.0])
def test_replicas_share_one_window(router, rate):
    scenario = Scenario(Poisson(rate), Limits(4), requests=40, replicas=3, router=router)
    run, reference = assert_same(SMALL, GRID, Fixed(3), scenario)
    assert run.recorder.end_s == reference.recorder.end_s
    only = replace(scenario, warmup=0.5)
    assert_same(SMALL, GRID, Fixed(3), only, only=[1])


def test_a_window_may_end_when_a_replica_has_long_finished():
    # Dealt in turn, the last arrives at the other: this one has nothing left to do by then.
    scenario = Scenario(Deterministic(0.01), requests=4, replicas=2, warmup=0.5)
    assert_same(SMALL, GRID, Fixed(3), scenario, only=[0])
    assert_same(SMALL, GRID, Fixed(3), scenario, only=[1])


# --- pauses of the loop ------------------------------------------------------------------------


@pytest.mark.parametrize("router", [RoundRobin(), LeastRequests()])
@pytest.mark.parametrize("arrivals", [Poisson(30.0), ClosedLoop(7), ClosedLoop(7, 0.1)])
def test_a_run_of_many_calls_is_a_run_of_one(arrivals, router):
    left: list[int] = []
    scenario = Scenario(
        arrivals, Limits(4), requests=30, max_time_s=1e6, replicas=2, router=router
    )  # fmt: skip
    with patch.object(engine, "LISTED", 2):
        assert_same(SMALL, GRID, Fixed(3), scenario)
        assert_same(SMALL, GRID, parse_policy("gammatune"), scenario)
        simulate(SMALL, GRID, Fixed(3), scenario, advance=left.append)
    assert sum(left) == 30


def test_requests_that_all_come_at_once_are_known_before_the_first_iteration():
    scenario = Scenario(InOrder(), Limits(12), requests=12, max_time_s=1e6)
    with patch.object(engine, "LISTED", 5):
        assert_same(PLAIN, GRID, Fixed(3), scenario)


def test_what_is_compiled_says_so_where_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE_S", 0.0)
    real, loop_run = loop.run, loop.run

    def slow(arrays):
        time.sleep(0.05)
        return loop_run(arrays)

    monkeypatch.setattr(loop, "run", slow)
    simulate(SMALL, GRID, Fixed(3), Scenario(ClosedLoop(1), requests=1))
    assert "compiles its serving loop" in capsys.readouterr().err
    monkeypatch.setattr(loop, "run", real)
    simulate(SMALL, GRID, Fixed(3), Scenario(ClosedLoop(1), requests=1))
    assert not capsys.readouterr().err


# --- refusals ------------------------------------------------------------------------------


def test_a_length_past_the_recorded_tail_is_refused_alike():
    trace = synthetic_trace(0.5, requests=3, tokens=40, max_gamma=3, concentration=3.0, seed=2)
    scenario = Scenario(ClosedLoop(2), Limits(2), requests=6)
    for policy in (BatchTable([[1, 9, 8]]), Fixed(8), parse_policy("confidence:gamma=9")):
        said = []
        for by_iteration in (False, True):
            with pytest.raises(TailError, match="past the recorded tail") as refused:
                simulate(trace, GRID, policy, scenario, by_iteration=by_iteration)
            said.append(str(refused.value))
        assert isinstance(policy, DraftPolicy) or said[0] == said[1]


class GrowsBold(DraftPolicy):
    """Drafts a token in each of the first rounds of a request, and later more than was recorded."""

    def __init__(self) -> None:
        self.rounds, self.gamma = 0, 9

    def observe(self, outcome, draft):
        self.rounds += 1

    def keep_drafting(self, draft):
        return len(draft) < (1 if self.rounds < 10 else self.gamma)


def test_what_a_replay_refuses_later_does_not_spoil_shorter_requests(tmp_path):
    trace = synthetic_trace(0.5, requests=1, tokens=40, max_gamma=3, concentration=3.0, seed=2)

    def of_tokens(output: int) -> Scenario:
        file = arrival_file(tmp_path / f"{output}.csv", f"0,20,{output}")
        return Scenario(ArrivalFile(file), warmup=0.0)

    for output in (6, 9):  # in doubling steps, the replay would go on to where it is refused
        assert_same(trace, GRID, GrowsBold(), of_tokens(output))
    for _ in range(2):
        with pytest.raises(TailError, match="past the recorded tail"):
            simulate(trace, GRID, GrowsBold(), of_tokens(40))
        # What was replayed before that is kept, and shared by all runs.
        assert_same(trace, GRID, GrowsBold(), of_tokens(10))


def test_sizes_never_varied_are_refused():
    alone = table_of([
        (m, "forward", 1, n, c, 0.01) for m in ("target", "draft") for n in (1, 4) for c in (0, 99)
    ])  # fmt: skip
    narrow = table_of([(m, "forward", b, 1, 0, 0.01) for m in ("target", "draft") for b in (1, 4)])
    scenario = Scenario(ClosedLoop(3), requests=9)
    for by_iteration in (False, True):
        with pytest.raises(DraftsimError, match="at batch 1 alone"):
            simulate(SMALL, alone, Fixed(3), scenario, by_iteration=by_iteration)
        with pytest.raises(DraftsimError, match=r"over 1 token\(s\) alone"):
            simulate(SMALL, narrow, Fixed(3), scenario, by_iteration=by_iteration)
    assert_same(SMALL, alone, Fixed(3), Scenario(ClosedLoop(1), requests=9))


# --- what it leaves to events ------------------------------------------------------------------


ONE_BATCH = GRID.cells[GRID.cells["batch"] == 1]


@pytest.mark.parametrize("budget", [9, 12, 25, 45])
@pytest.mark.parametrize("table", [GRID, LatencyTable(ONE_BATCH).assumed_batch_free()])
def test_prompts_in_chunks_are_the_iterations(budget, table):
    scenario = Scenario(ClosedLoop(4), Limits(4, token_budget=budget), requests=9)
    assert_same(SMALL, table, Fixed(1), scenario)


class LooksAtTheBatch(DraftPolicy):
    def __init__(self) -> None:
        self.length, self.gamma = 1, 4

    def begin_round(self, load: Load) -> None:
        self.length = 1 if load.batch > 2 else 4

    def keep_drafting(self, draft):
        return len(draft) < self.length


def test_policies_that_look_at_the_load_or_learn_need_events():
    scenario = Scenario(ClosedLoop(4), Limits(4), requests=8)
    by_context = BatchTable([[1, 9, 0, 40, 3], [1, 9, 41, 999, 1]])
    assert by_context.planned_at(1) is None
    assert DisableByBatchSize(4, threshold=3).planned_at(1) is None
    for policy in (LooksAtTheBatch(), by_context, parse_policy("exp3")):
        assert not ran(SIGNALLED, GRID, policy, scenario)[1]
    assert not clock_free(parse_policy("hf-heuristic:persist=persistent"), None)
    assert not clock_free(parse_policy("exp3"), None)
    assert clock_free(Oracle(), None)
    free = {name for name in policy_names("single") if clock_free(parse_policy(name), None)}
    assert {"fixed", "gammatune", "svip", "cm-asd", "adaedl", "autoregressive"} <= free


@pytest.mark.parametrize(
    "changed",
    [{"mode": "static-minimum"}, {"mode": "static-mean"}, {"passes": "padded"}],
)
def test_synchronised_batches_and_costs_of_single_sequences_need_events(changed):
    scenario = replace(Scenario(ClosedLoop(3), Limits(3), requests=6), **changed)
    assert not ran(SMALL, GRID, Fixed(3), scenario)[1]


def test_drafts_are_as_many_as_requests_of_the_iteration_that_makes_them_ask_for(tmp_path):
    class Drawn(Timeline):
        def round(self, index, start_s, seconds, outcome, wasted):
            drafted[index].append(outcome.drafted)

    file = tmp_path / "two.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,20,5\n0,20,40\n")
    drafted: dict[int, list[int]] = {0: [], 1: []}
    scenario = Scenario(ArrivalFile(file), Limits(2))
    policy = BatchTable([[1, 1, 3], [2, 2, 0]])
    simulate(PLAIN, GRID, policy, scenario, timeline=Drawn("unopened"))
    assert drafted[0] == [0] * 4
    # The fifth round's were made, or not, as the other request left.
    assert drafted[1][:6] == [0] * 5 + [3]
    assert_same(PLAIN, GRID, policy, scenario)


# --- its parts ------------------------------------------------------------------------------


def test_runs_of_equal_policies_share_their_replay(monkeypatch):
    asked = []
    policy = parse_policy("confidence:gamma=4")
    keep = type(policy).keep_drafting
    monkeypatch.setattr(
        type(policy), "keep_drafting", lambda self, draft: asked.append(1) or keep(self, draft)
    )
    trace = synthetic_trace(0.7, requests=4, tokens=30, max_gamma=6, concentration=3.0, seed=9)
    scenario = Scenario(ClosedLoop(2), Limits(2), requests=12)
    simulate(trace, GRID, policy, scenario)
    first = len(asked)
    simulate(trace, GRID, policy, scenario)
    assert 0 < first == len(asked)
    simulate(trace, GRID, parse_policy("confidence:gamma=3"), scenario)
    assert len(asked) > first


ONE_CONTEXT = LatencyTable(
    GRID.cells.sort_values("context").groupby(["model", "phase", "batch", "new_tokens"]).head(1),
    {**GRID.meta, ANY_CONTEXT: True},
)
"""Cells of one context, which hold at every other."""


@pytest.mark.invariant(5)
@pytest.mark.parametrize("cells", [RAGGED, GRID, ONE_CONTEXT])
@settings(max_examples=150, deadline=None)
@given(
    batch=st.one_of(st.integers(1, 10), st.floats(0.5, 12)),
    width=st.one_of(st.integers(1, 10), st.floats(0.5, 12)),
    context=st.one_of(st.integers(0, 1200), st.floats(0, 2000), st.sampled_from([40, 100, 900])),
)
def test_its_readings_are_the_tables(cells, batch, width, context):
    prices = arrays.prices_of(EngineCost(cells), 2)
    seen = arrays.nothing_seen(1)[0]
    found = loop.read(prices, seen, TARGET, float(batch), float(width), float(context))
    wanted, origin = cells.estimate(
        "target", "forward", batch=batch, new_tokens=width, context=context
    )
    assert found == pytest.approx(float(wanted), rel=1e-12)
    places = {MEASURED: 0, INTERPOLATED: 1, EXTRAPOLATED: 2}
    assert seen.passes[TARGET].nonzero()[0].tolist() == [places[int(origin)]]


def test_every_numba_keeps_its_machine_code_apart() -> None:
    """In one folder, each would drop what the other compiled: some 20 s whenever it changes."""
    assert numba.__version__ in loop.run.stats.cache_path  # type: ignore[attr-defined]
    config: Any = numba.config
    assert FOLDER.name not in config.CACHE_DIR  # that of other libraries is as it was


def test_machine_code_older_than_its_sources_is_deleted(tmp_path: Path) -> None:
    old, new, another = (tmp_path / f"{name}.py311.nbi" for name in ("loop.a", "loop.b", "other.c"))
    for path in (old, new, another):
        path.write_bytes(b"")
    for path in (old, another):
        os.utime(path, (0, 0))
    loop.drop_stale(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [new, another]
