"""Sources recorded by start, used as a draft model: the same rounds, at the same cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed
from policies.registry import describe, parse_policy, parse_serving_policy, policy_names
from policies.rules.registry import parse_rule
from simulator.pricing import autoregressive, price
from simulator.serving import ArrivalFile, ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.tune.vllm import tune_vllm
from simulator.whatif.cells import Prices
from simulator.whatif.ladder import ladder
from simulator.whatif.rate import drafts_of_rounds, ends_draft, judged_rows
from simulator.whatif.sweep import Sweep
from tests.compiled import ALONG, assert_same, ran
from tests.serving import GRID, arrival_file
from tests.test_sources_eagle import OFFSETS, Case
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError, TailError
from traces.latency.table import LatencyTable
from traces.replay.run import can_replay, replay
from traces.replay.vectorised import replay_many
from traces.sources.as_draft import drafted_latency, drafted_trace
from traces.sources.base import Source
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source
from traces.store.recordings import find_trace

SOURCES = ("eagle:model=eagle", "eagle:model=eagle3", "medusa", "medusa:k=2", "hydra", "layer-skip",
           "parallel:acceptance=[0.7,0.5,0.3,0.2,0.1],k=4")  # fmt: skip
HEADS = 4
MEASURED = pd.concat(
    [
        GRID.cells,
        *(
            GRID.cells[(GRID.cells["model"] == "draft") & (GRID.cells["phase"] == "forward")]
            .assign(model=name, median_s=lambda c, s=share: c["median_s"] * s)
            for name, share in (("eagle.eagle", 0.5), ("eagle.eagle3", 0.7))
        ),
        *(
            GRID.cells[
                (GRID.cells["model"] == "draft") & (GRID.cells["phase"] == "prefill")
            ].assign(model=name)
            for name in ("eagle.eagle", "eagle.eagle3")
        ),
        pd.DataFrame(
            [("heads", "forward", 1, 1, 0, 9e-4, 0.0, 1),
             ("hydra", "forward", 1, 1, 0, 7e-4, 0.0, 1), ("target", "head", 1, 1, 0, 2e-4, 0.0, 1)]
            + [("draft", "settling", 1, place, 0, 0.01, 0.0, 1) for place in (1, 2)]
            + [("exit", "layer", 1, 1, c, 1e-3 + 1e-6 * c, 0.0, 1) for c in (0, 300)]
            + [("target", "pass", 1, n, c, 0.008 + 1e-4 * n + 1e-6 * c, 0.0, 1)
               for n in (1, 2, 9) for c in (0, 300)],
            columns=list(GRID.cells.columns),
        ),
    ],
    ignore_index=True,
)  # fmt: skip
TABLE = LatencyTable(MEASURED)


@pytest.fixture(scope="module")
def case() -> Any:
    case = Case(("eagle", "eagle3", "mtp", "mtp-several"))
    recordings = dict(case.recordings)
    # What heads or skipped layers draft matters little here: some other drafter's chains will do.
    chains = recordings["eagle.mtp"]
    cut = {n: v[:, :HEADS] for n, v in chains.arrays.items()}
    recordings["medusa"] = recordings["hydra"] = replace(chains, arrays=cut, meta={})
    recordings["layer-skip"] = replace(chains, meta={"layers": 3, "skip": [2]})
    case.recordings = parse_source(SOURCES[-1]).completed(case.trace, recordings)
    return case


def policies_of(trace: Trace) -> list[DraftPolicy]:
    found = [
        parse_policy(name, max_gamma=trace.max_gamma) for name in policy_names("single")
    ]  # fmt: skip
    return [p for p in found if can_replay(trace, p)]


def both(case: Any, text: str) -> tuple[Source, Trace]:
    source = parse_source(text)
    return source, drafted_trace(case.trace, source, case.recordings)


@pytest.mark.invariant(1)
@pytest.mark.parametrize("text", SOURCES)
def test_the_rounds_and_their_cost_are_those_of_the_source(case: Any, text: str) -> None:
    source, trace = both(case, text)
    table = drafted_latency(TABLE, source, case.recordings)
    accepted = 0
    every = policies_of(trace)
    assert len(every) > 15
    for policy in every:
        expected = replay_source(case.trace, source, policy, recordings=case.recordings)
        for log in (replay(trace, policy), *replay_many(trace, {"": policy})):
            np.testing.assert_array_equal(log.rounds, expected.rounds)
            assert (log.source, log.fidelity) == (expected.source, source.fidelity)
            ours, theirs = price(log, table), price(expected, TABLE)
            drafting = log.rounds["drafted"] > 0  # no pass of layers precedes those that do not
            # Calls of layers, and of one pass, are read at the context that their round began at.
            near = 5e-3 if text.startswith(("layer-skip", "parallel")) else 1e-9
            np.testing.assert_allclose(ours.draft_s, theirs.draft_s, rtol=near)
            np.testing.assert_allclose(ours.round_s[drafting], theirs.round_s[drafting], rtol=near)
            if "eagle" in text:
                np.testing.assert_allclose(ours.wall_s, theirs.wall_s, rtol=1e-9)
        accepted += int(expected.rounds["accepted"].sum())
    assert accepted > 0


LOOKUPS = ("pld", "ngram", "ngram-simple", "lookahead")
SEARCH_S = 7e-4
HOST_S = float(GRID.estimate("target", "host_draft").seconds)
SEARCHED = LatencyTable(
    pd.concat(
        [
            GRID.cells,
            pd.DataFrame(
                [(name, "forward", 1, 1, 0, SEARCH_S, 0.0, 1) for name in LOOKUPS],
                columns=list(GRID.cells.columns),
            ),
        ],
        ignore_index=True,
    )
)


@pytest.fixture(scope="module")
def text() -> Trace:
    return find_trace("bundled").select(range(12))


@pytest.mark.invariant(1)
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_rounds_and_their_cost_are_those_of_the_lookup(text: Trace, name: str) -> None:
    """It finds nothing at many positions; the search takes as long there."""
    source = parse_source(name)
    trace, table = drafted_trace(text, source, {}), drafted_latency(SEARCHED, source, {})
    assert 0.2 < trace.nothing_drafted.mean() < 1
    accepted = 0
    for policy in (every := policies_of(trace)):
        expected = replay_source(text, source, policy, recordings={})
        for log in (replay(trace, policy), *replay_many(trace, {describe(policy): policy})):
            np.testing.assert_array_equal(log.rounds, expected.rounds)
            assert (log.source, log.fidelity) == (expected.source, expected.fidelity)
            ours, theirs = price(log, table), price(expected, SEARCHED)
            if isinstance(policy, Autoregressive):  # searches for nothing, and pays for nothing
                np.testing.assert_allclose(ours.round_s, theirs.round_s, rtol=1e-9)
                continue
            # If nothing is found or may be drafted, one call of the drafter is paid all the same.
            found = log.rounds["drafted"] > 0
            np.testing.assert_allclose(ours.round_s[found], theirs.round_s[found], rtol=1e-9)
            more = ours.round_s[~found] - theirs.round_s[~found]
            asked = theirs.draft_s[~found] > 0
            np.testing.assert_allclose(more, np.where(asked, HOST_S, HOST_S + SEARCH_S), rtol=1e-6)
            accepted += int(log.rounds["accepted"].sum())
    assert len(every) > 5
    assert accepted > 0
    plain = autoregressive(replay(trace, Fixed(2)))
    np.testing.assert_array_equal(price(plain, table).round_s, price(plain, SEARCHED).round_s)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_batch_searches_for_each_of_its_requests(text: Trace, name: str) -> None:
    source = parse_source(name)
    trace, table = drafted_trace(text, source, {}), drafted_latency(SEARCHED, source, {})
    free = LatencyTable(
        SEARCHED.cells.assign(
            median_s=SEARCHED.cells["median_s"].mask(SEARCHED.cells["model"].isin(LOOKUPS), 0.0)
        )
    )
    at_no_cost = drafted_latency(free, source, {})
    for clients in (1, 4):
        scenario = Scenario(ClosedLoop(clients), Limits(max_batch=4), requests=12, seed=1)
        run, _ = assert_same(trace, table, Fixed(3), scenario)
        rounds = np.bincount(replay(trace, Fixed(3)).rounds["request"])[run.requests["sequence"]]
        searching_s = (
            run.recorder.busy_s - simulate(trace, at_no_cost, Fixed(3), scenario).recorder.busy_s
        )
        assert searching_s == pytest.approx(SEARCH_S * rounds.sum(), rel=1e-9)


def test_a_search_that_was_not_timed_is_not_taken_to_be_free(text: Trace) -> None:
    with pytest.raises(DraftsimError, match="no 'forward' cells of 'ngram', the time of its"):
        drafted_latency(GRID, parse_source("ngram"), {})


def test_an_engine_that_drafts_with_a_head_itself_has_its_passes(case: Any) -> None:
    source, trace = both(case, "eagle:model=eagle3")
    starts = case.recordings["eagle.eagle3"]
    starts = replace(starts, meta={**starts.meta, "model": "/models/eagle3"})
    recordings = {"eagle.eagle3": starts}
    engine = {"own_drafter": True, "max_batch": 4}
    latency = LatencyTable(ALONG.cells, {"engine": engine, "draft": "eagle3"})
    table = drafted_latency(latency, source, recordings)
    scenario = Scenario(ClosedLoop(4), Limits(max_batch=4), requests=8, seed=1)
    own, drafted = (
        simulate(trace, cells, Fixed(2), scenario).recorder.busy_s for cells in (latency, table)
    )
    assert drafted == pytest.approx(own, rel=1e-12)
    assert ALONG.has("draft", "along")
    assert table.has("eagle.eagle3", "along")  # `simulate` prices rounds by their drafter's name
    other = LatencyTable(ALONG.cells, {"engine": engine, "draft": "models/draft"})
    with pytest.raises(DraftsimError, match="those of models/draft, not of /models/eagle3"):
        drafted_latency(other, source, recordings)


@pytest.mark.parametrize("text", SOURCES)
def test_one_stream_is_served_in_the_seconds_of_its_rounds(case: Any, text: str) -> None:
    source, trace = both(case, text)
    table = drafted_latency(TABLE, source, case.recordings)
    for policy in (Fixed(HEADS // 2), parse_policy("confidence", max_gamma=trace.max_gamma)):
        run = simulate(
            trace, table, policy, Scenario(ClosedLoop(1), Limits(1), requests=12, seed=2)
        )
        own = price(replay(trace, policy), table)
        served = run.requests
        np.testing.assert_allclose(
            served["finish_s"] - served["first_s"], own.decode_s[served["sequence"]], rtol=1e-9
        )
        assert run.row()["source"] == replay(trace, policy).source
        assert "draft prefill" not in run.row()["unpriced"]  # nothing but a drafter reads prompts
        if "eagle" in text:  # and these are what `simulate` prices
            log = replay_source(case.trace, source, policy, recordings=case.recordings)
            np.testing.assert_allclose(own.wall_s, price(log, TABLE).wall_s, rtol=1e-9)
            np.testing.assert_allclose(
                served["e2e_s"], price(log, TABLE).wall_s[served["sequence"]], rtol=1e-9
            )


@pytest.mark.invariant(3)
@pytest.mark.parametrize("text", SOURCES)
@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_compiled_iterations_are_the_iterations(case: Any, text: str, mode: Any) -> None:
    source, trace = both(case, text)
    table = drafted_latency(TABLE, source, case.recordings, batch_free=True)
    longest = trace.max_gamma or 0
    for name in ("fixed:gamma=2", "confidence", "gammatune", "oracle"):
        policy = parse_policy(name, max_gamma=longest)
        for arrivals in (ClosedLoop(3), Poisson(20.0), ClosedLoop(1)):
            scenario = Scenario(arrivals, Limits(3), requests=14, mode=mode, seed=1)
            assert_same(trace, table, policy, scenario)


def test_recordings_begin_again_where_arrivals_are_longer(case: Any, tmp_path: Any) -> None:
    rng = np.random.default_rng(3)
    rows = [f"2023-11-16 18:15:{i:02d}.0,{rng.integers(1, 60)},{rng.integers(1, 90)}"
            for i in range(20)]  # fmt: skip
    file = ArrivalFile(arrival_file(tmp_path / "arrivals.csv", *rows))
    for text in SOURCES:
        source, trace = both(case, text)
        table = drafted_latency(TABLE, source, case.recordings, batch_free=True)
        policy = parse_policy("confidence", max_gamma=trace.max_gamma)
        assert_same(trace, table, policy, Scenario(file, Limits(4), requests=None))


def test_batch_policies_draft_with_it_in_lockstep(case: Any) -> None:
    for text in SOURCES:
        source, trace = both(case, text)
        table = drafted_latency(TABLE, source, case.recordings, batch_free=True)
        for name in ("batch-table", "confidence-freeze"):
            policy = parse_serving_policy(name, max_gamma=trace.max_gamma)
            scenario = Scenario(ClosedLoop(3), Limits(3), requests=9)
            run, compiled = ran(trace, table, policy, scenario)
            assert compiled == (name == "batch-table")
            assert run.recorder.accepted > 0
            if name == "batch-table":
                assert_same(trace, table, policy, scenario)
    # Alone in its batch, a table's length is a fixed length.
    source, trace = both(case, SOURCES[0])
    table = drafted_latency(TABLE, source, case.recordings)
    scenario = Scenario(ClosedLoop(1), Limits(1), requests=9)
    fixed = simulate(trace, table, Fixed(3), scenario, by_iteration=True)
    planned = simulate(trace, table, parse_serving_policy("batch-table:table=[[1,8,3]]"), scenario)
    pd.testing.assert_frame_equal(fixed.requests, planned.requests, rtol=1e-9)


def test_sweeps_ladders_and_searches_take_it(case: Any) -> None:
    source, trace = both(case, "eagle:model=eagle")
    table = drafted_latency(TABLE, source, case.recordings)
    names = {f"fixed:gamma={g}": Fixed(g) for g in (1, 3)}
    frame = Sweep(trace, names, Prices(latencies={"own": table}), resamples=0).run()
    for row in frame.to_dict("records"):
        log = replay_source(case.trace, source, names[row["policy"]], recordings=case.recordings)
        plain = price(replay(trace, Autoregressive()), table).total_s
        assert row["speedup"] == pytest.approx(plain / price(log, TABLE).total_s, rel=1e-9)
    rungs = ladder(trace, table, resamples=4)
    speedups = rungs.set_index("rung")["speedup"]
    assert speedups["oracle"] >= speedups["best-fixed"] > 0
    assert speedups["autoregressive"] == 1
    tuned = tune_vllm(trace, table, [1, 8], draws=8)
    assert {row["batch"] for row in tuned.rows} == {1, 8}
    if tuned.document is not None:
        rows = tuned.document["num_speculative_tokens_per_batch_size"]
        assert 0 <= max(row[-1] for row in rows) <= OFFSETS
    with pytest.raises(DraftsimError, match="acceptance by draft position"):
        Sweep(trace, names, Prices(latencies={"own": table}), [0.5])


def test_estimates_are_fitted_to_every_starts_own_draft(case: Any) -> None:
    trace = both(case, "eagle:model=eagle")[1]
    judged, rows = judged_rows(trace), []
    ends = np.append(trace.on_path, len(trace))
    for start, right in enumerate(trace.columns["accepted"][trace.on_path]):
        rows += range(ends[start], min(ends[start] + right + 1, ends[start + 1]))
    assert judged.tolist() == rows
    last = ends_draft(trace, judged)
    assert [r + 1 in rows and r + 1 not in trace.on_path for r in rows] == (~last).tolist()
    drafted, offset = drafts_of_rounds(trace, judged, 3)
    expected = []
    for begin, end in zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True):
        at = int(begin) + trace.first
        while at < end:
            right = int(trace.run_lengths[at])
            own = range(ends[at], min(ends[at] + min(right + 1, 3, int(end) - at), ends[at + 1]))
            expected += [(row, row - ends[at]) for row in own]
            at += min(right, 3) + 1
    assert [*zip(judged[drafted].tolist(), offset.tolist(), strict=True)] == expected


def test_what_cannot_stand_for_a_draft_model_says_why(case: Any) -> None:
    for text, why in (
        ("eagle:model=mtp-several", "run in turn"), ("space", "wider than its draft"),
        ("medusa-tree", "wider than its draft"), ("eagle2", "wider than its draft"),
        ("suffix", "not recorded by start"), ("rest", "not recorded by start"),
        ("early-exit", "not recorded by start"), ("kangaroo", "not recorded by start"),
    ):  # fmt: skip
        with pytest.raises(DraftsimError, match=rf"{why}.*simulate --source. prices one stream"):
            drafted_trace(case.trace, parse_source(text), case.recordings)
    with pytest.raises(DraftsimError, match="no recording of 'blockwise' drafts"):
        drafted_trace(case.trace, parse_source("blockwise"), case.recordings)
    with pytest.raises(DraftsimError, match="5 heads were asked for and 4 recorded"):
        drafted_trace(case.trace, parse_source("medusa:k=5"), case.recordings)
    source, trace = both(case, "eagle:model=eagle")
    with pytest.raises(TailError, match=f"and {OFFSETS} were recorded"):
        replay(trace, Fixed(OFFSETS + 1))
    with pytest.raises(DraftsimError, match="no passes of the drafter 'eagle"):
        drafted_latency(GRID, source, case.recordings)
    with pytest.raises(SignalError):
        replay(trace, Fixed(2), parse_rule("typical"))
    alone = drafted_latency(TABLE, parse_source("medusa"), case.recordings)
    with pytest.raises(DraftsimError, match="know the draft's passes at batch 1 alone"):
        simulate(
            drafted_trace(case.trace, parse_source("medusa"), case.recordings), alone, Fixed(2),
            Scenario(ClosedLoop(2), Limits(2), requests=4),
        )  # fmt: skip


def test_a_textbook_table_prices_any_drafter(case: Any) -> None:
    constant = LatencyTable.constant(0.02, 0.002, 0.025)
    for text, passes in (("eagle:model=eagle", "draft_forwards"), ("medusa", None)):
        source, trace = both(case, text)
        table = drafted_latency(constant, source, case.recordings)
        log = replay(trace, Fixed(3))
        count = log.rounds[passes] if passes else log.rounds["drafted"] > 0
        assert price(log, table).draft_s.sum() == pytest.approx(0.002 * count.sum())


def test_drafts_of_other_outputs_are_refused(case: Any) -> None:
    other = {"eagle.x": case.recordings["eagle.eagle"]}
    with pytest.raises(DraftsimError, match="of other requests"):
        drafted_trace(case.trace.select([0, 1]), parse_source("eagle"), other)
