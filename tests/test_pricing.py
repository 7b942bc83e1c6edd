"""Pricing: against a naive loop over passes, constant tables, and plain decoding."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy, Round
from policies.lengths.basic import Autoregressive, Fixed
from simulator.pricing import NO_PASSES, PassCount, autoregressive, price, seconds
from tests.break_even import priced_at
from tests.compiled import ALONG
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Request
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED
from traces.latency.table import LatencyTable
from traces.replay.calls import CALL_DTYPE, CALL_KINDS, HEAD, LAYER, OWN, PASS
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.replay.vectorised import replay_many

CELLS = {
    (model, phase, 1, width, context): base * (1 + 0.07 * width + context / 900)
    for model, base in (("target", 0.01), ("draft", 0.002))
    for phase, widths, contexts in (
        ("forward", (1, 2, 4, 9), (0, 16, 64, 256)),
        ("prefill", (1, 16, 64, 128), (0,)),
    )
    for width in widths
    for context in contexts
}
LOOKUP = CALL_KINDS.index(("pld", "forward"))
HOST = {
    ("target", "host_round", 1, 1, 0): 3e-4,
    ("draft", "host_draft", 1, 1, 0): 1e-4,
    ("draft", "signal", 1, 1, 0): 5e-5,
    ("target", "rollback", 1, 1, 0): 2e-4,
    ("draft", "rollback", 1, 1, 0): 7e-5,
}


def table(cells: dict[tuple[str, str, int, int, int], float]) -> LatencyTable:
    rows = [(*key, value, 0.0, 3) for key, value in cells.items()]
    return table_of(rows)


def random_log(seed: int, first: int = 1, reads: tuple[str, ...] = ()) -> RoundLog:
    rng = np.random.default_rng(seed)
    rounds, requests = [], []
    for i in range(4):
        position, catch_up, mine = first, 1, []
        for _ in range(6):
            forwards = int(rng.integers(0, 8))
            drafted = int(rng.integers(0, forwards + 1))
            accepted = int(rng.integers(0, drafted + 1))
            mine.append(Round(position, drafted, accepted, accepted + 1, forwards, catch_up))
            position += accepted + 1
            catch_up = int(rng.integers(1, 3))
        rounds.append(mine)
        requests.append(Request(f"r{i}", "c", int(rng.integers(20, 90)), position, 500, "length"))
    return RoundLog(RoundLog.pack(rounds), requests, "random", reads=reads, first=first)


def summed(log: RoundLog, latency: LatencyTable, *, verify: bool) -> tuple[np.ndarray, PassCount]:
    """Seconds of the drafting or verification calls of each round, and their count as passes."""
    total_s, passes = np.zeros(len(log)), NO_PASSES
    for calls in log.calls:
        if calls.verify == verify:
            own = calls._replace(model="draft") if calls.model == OWN else calls
            each_s, count = seconds(own, latency, 1)
            total_s, passes = total_s + np.bincount(calls.round, each_s, len(log)), passes + count
    return total_s, passes


def naive(log: RoundLog, latency: LatencyTable) -> np.ndarray:
    """Seconds per round, pass by pass, straight from the definition."""
    out = []
    for row in log.rounds:
        prompt = log.requests[row["request"]].prompt_length
        context = prompt + int(row["position"])
        n, f, a = (int(row[k]) for k in ("drafted", "draft_forwards", "accepted"))
        u = int(row["catch_up"])
        seconds = HOST["target", "host_round", 1, 1, 0] + f * HOST["draft", "host_draft", 1, 1, 0]
        if log.reads:
            seconds += f * HOST["draft", "signal", 1, 1, 0]
        if a < n:
            seconds += HOST["target", "rollback", 1, 1, 0]
        if a < f - 1:
            seconds += HOST["draft", "rollback", 1, 1, 0]
        for i in range(f):
            width, cached = (u, context - u) if i == 0 else (1, context + i - 1)
            if i > 0 or row["position"] > 0:
                seconds += float(
                    latency.seconds("draft", "forward", new_tokens=width, context=cached)
                )
        if row["position"] > 0:
            seconds += float(
                latency.seconds("target", "forward", new_tokens=n + 1, context=context - 1)
            )
        else:
            seconds += float(latency.seconds("target", "prefill", new_tokens=prompt + n))
            seconds -= float(latency.seconds("target", "prefill", new_tokens=prompt))
        out.append(seconds)
    return np.array(out)


@pytest.mark.invariant(10)
@pytest.mark.parametrize("reads", [(), ("prob",)])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_price_equals_a_loop_over_passes(seed: int, first: int, reads: tuple[str, ...]) -> None:
    log, latency = random_log(seed, first, reads), table(CELLS | HOST)
    priced = price(log, latency)
    np.testing.assert_allclose(priced.round_s, naive(log, latency), rtol=1e-11)
    np.testing.assert_allclose(priced.decode_s.sum(), priced.total_s, rtol=1e-12)
    prompts = [r.prompt_length for r in log.requests]
    both = sum(latency.seconds(m, "prefill", new_tokens=prompts) for m in ("target", "draft"))
    np.testing.assert_allclose(priced.wall_s - priced.decode_s, both, rtol=1e-9)


def test_drafts_of_no_model_leave_the_targets_cache_alone() -> None:
    log = random_log(3)
    drafted = replace(log, source="pld", recorded_calls=np.zeros(0, CALL_DTYPE))
    taken_out = price(drafted, table(CELLS | HOST))
    kept = price(drafted, table(CELLS | {k: s for k, s in HOST.items() if k[1] != "rollback"}))
    rejected = log.rounds["accepted"] < log.rounds["drafted"]
    assert 0 < rejected.sum() < len(log)
    np.testing.assert_allclose(taken_out.host_s - kept.host_s, 2e-4 * rejected, atol=1e-15)
    assert not taken_out.draft_s.any()
    assert taken_out.passes.passes == len(log) + len(log.requests), "verifications and prompts"
    assert taken_out.prefill_passes.passes == len(log.requests)


def test_only_what_attends_to_the_context_is_read_at_it() -> None:
    """Heads and lookups cost what they cost where they were measured, layers and passes do not."""
    sizes = (60, 90)
    cells = {
        (*CALL_KINDS[kind], 1, 1, context): 1e-3 * context
        for kind in (LAYER, HEAD, PASS, LOOKUP) for context in sizes
    }  # fmt: skip
    log = replace(random_log(3), source="pld")
    contexts = np.maximum(log.context - 1, 0)
    assert contexts.min() < min(sizes)
    assert contexts.max() > max(sizes)
    for kind, attends in ((LAYER, True), (PASS, True), (HEAD, False), (LOOKUP, False)):
        calls = np.zeros(len(log), CALL_DTYPE)
        calls["round"], calls["kind"] = np.arange(len(log)), kind
        calls["new_tokens"] = calls["count"] = 1
        found, passes = summed(replace(log, recorded_calls=calls), table(cells), verify=False)
        inside = (contexts >= min(sizes)) & (contexts <= max(sizes))
        np.testing.assert_allclose(found[inside], 1e-3 * contexts[inside])
        assert passes.passes == len(log)
        assert passes.extrapolated == ((~inside).sum() if attends else 0)
        if not attends:
            np.testing.assert_allclose(found, 1e-3 * contexts.clip(*sizes))


def test_plain_decoding_pays_no_draft() -> None:
    log, latency = random_log(1), table(CELLS | HOST)
    plain = price(autoregressive(log), latency)
    assert not plain.draft_s.any()
    assert not plain.signal_s.any()
    prompts = [r.prompt_length for r in log.requests]
    np.testing.assert_allclose(
        plain.prefill_s, latency.seconds("target", "prefill", new_tokens=prompts)
    )


@pytest.mark.invariant(10)
@pytest.mark.parametrize("first", [0, 1])
def test_autoregressive_is_the_replay_of_a_policy_that_never_drafts(first: int) -> None:
    trace = synthetic_trace(0.6, tokens=20, requests=3)
    replayed = replay(trace, Autoregressive(), first=first)
    built = autoregressive(replay(trace, Fixed(4), first=first))
    np.testing.assert_array_equal(built.rounds, replayed.rounds)


@pytest.mark.parametrize("name", ["autoregressive", "transformer-base", ""])
@pytest.mark.parametrize("policy", [Autoregressive(), Fixed(0)])
def test_plain_decoding_has_no_drafter_under_any_name(name: str, policy: DraftPolicy) -> None:
    trace = synthetic_trace(0.6, tokens=20, requests=10)
    built = price(autoregressive(replay(trace, Fixed(4))), ALONG)
    [many] = replay_many(trace, [(name, policy)])
    for log in (many, replay(trace, policy, name=name)):
        assert price(log, ALONG).total_s == built.total_s


@pytest.mark.invariant(5)
def test_origin_of_every_pass_is_counted() -> None:
    request = Request("r", "c", 16, 400, 400, "length")
    rounds = [
        Round(1, 1, 1, 2, 1, 1),  # target width 2 and draft width 1 at 16: on the grid
        Round(4, 2, 0, 1, 2, 2),  # target width 3, draft 2 at 18 and 1 at 20: between
        Round(300, 1, 0, 1, 1, 1),  # context 315: outside
    ]
    log = RoundLog(RoundLog.pack([rounds]), [request], "p")
    cells = {k: v for k, v in CELLS.items() if k[1] == "forward"}
    latency = table(cells)
    passes = price(log, latency).passes
    origins = np.concatenate(
        [
            latency.estimate(m, "forward", new_tokens=w, context=c).origin
            for m, w, c in (
                ("target", [2, 3, 2], [16, 19, 315]),
                ("draft", [1, 2, 1, 1], [16, 18, 20, 315]),
            )
        ]
    )
    assert passes.passes == len(origins) == 7
    assert passes.interpolated == (origins == INTERPOLATED).sum() == 3
    assert passes.extrapolated == (origins == EXTRAPOLATED).sum() == 2
    # With a table that has prefills, the prompt is a pass of each model, and on the grid.
    whole = price(log, table(CELLS))
    assert (whole.passes.passes, whole.passes.extrapolated) == (9, 2)
    assert whole.outside == whole.outside_with(False) == 2 / 7
    assert whole.outside_with(True) == 2 / 9


@pytest.mark.invariant(10)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    verify=st.floats(0.5, 3),
    ratios=st.lists(st.floats(0, 2), min_size=1, max_size=5),
)
def test_ratios_equal_pricing_one_by_one(seed: int, verify: float, ratios: list[float]) -> None:
    log = random_log(seed)
    emitted = log.rounds["emitted"].sum()
    for c, cost, speedup in zip(ratios, *priced_at(log, ratios, verify), strict=True):
        one = price(log, LatencyTable.constant(1.0, float(c), verify)).total_s
        assert cost == pytest.approx(one, rel=1e-12)
        assert speedup == pytest.approx(emitted / one, rel=1e-12)


def test_bad_input_names_value_and_remedy() -> None:
    log = random_log(0)
    with pytest.raises(DraftsimError, match="batch is 0"):
        price(log, table(CELLS), batch=0)
    with pytest.raises(DraftsimError, match="no 'forward' cells of 'draft'"):
        price(log, table({k: v for k, v in CELLS.items() if k[0] == "target"}))
    other = RoundLog(log.rounds, log.requests, "p", source="lookup")
    with pytest.raises(DraftsimError, match="'lookup'"):
        price(other, table(CELLS))


@pytest.mark.invariant(14)
def test_simulator_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "import simulator.api, simulator.check, simulator.summary, simulator.plots.recording; "
        "assert 'profiler' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_a_rounds_first_draft_pass_has_cells_of_its_own() -> None:
    """After a target pass a draft pass costs more: `catch_up` cells price it where they exist."""
    dearer = {
        (model, "catch_up", *key): value + 1e-3
        for (model, phase, *key), value in CELLS.items()
        if (model, phase) == ("draft", "forward")
    }
    log = random_log(5)
    plain, own = (price(log, table({**CELLS, **more})) for more in ({}, dearer))
    drafting = log.rounds["draft_forwards"] > 0
    np.testing.assert_allclose(own.draft_s - plain.draft_s, 1e-3 * drafting, atol=1e-12)
