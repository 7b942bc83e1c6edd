"""CSD on our pair: patterns of rejections, thresholds of one half shown on the other."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from policies.registry import describe
from policies.rules.memory import OnlineCorrectionMemory
from simulator.papers.csd import (
    CALIBRATED,
    CSD_ROWS,
    TRAINING_SHARE,
    Rejections,
    Rescues,
    csd_rows,
    pattern_rows,
)
from simulator.papers.ours import EXPERIMENT, Ours, Row
from tests.scored import LATENCY, scored_trace
from traces.acceptance.trace import Trace
from traces.errors import SignalError
from traces.replay.corrections import split_requests
from traces.replay.run import replay
from traces.sources.methods import METHODS, build
from traces.store.outputs import Output, RealRun

GAMMA = 6
Rejection = tuple[tuple[int, int], float]


def few_tokens(trace: Trace) -> Trace:
    """The same with six words, so that pairs come again."""
    columns = dict(trace.columns)
    draft = 2 + columns["draft_token"] % 6  # 1 would end an output
    target = np.where(columns["match"] == 1, draft, 50 + columns["target_token"] % 3)
    on_path = columns["offset"] == 0
    columns |= {
        "draft_token": draft, "target_token": target,
        "token": np.where(on_path, target, columns["token"]),
    }  # fmt: skip
    typed = {n: np.asarray(v).astype(trace.columns[n].dtype) for n, v in columns.items()}
    return Trace(typed, trace.requests, trace.max_gamma, trace.meta)


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(few_tokens(scored_trace(requests=12)), LATENCY)


@pytest.fixture(scope="module")
def rows(ours: Ours) -> dict[tuple[str, str], Row]:
    return {(r.row, r.column): r for r in csd_rows(ours)}


def walked(trace: Trace, requests: list[int]) -> list[Rejection]:
    """Pair and log ratio of every rejection of drafts of six, by walking through the outputs."""
    found = []
    c = trace.columns
    for request in requests:
        rows = np.flatnonzero((c["request"] == request) & (c["offset"] == 0)).tolist()
        limit, at = trace.requests[request].max_new_tokens, 1
        while at < len(rows):
            drafted, accepted = min(GAMMA, limit - at - 1), 0
            while accepted < drafted and at + accepted < len(rows):
                row = rows[at + accepted]
                if c["match"][row] != 1:
                    pair = int(c["draft_token"][row]), int(c["target_token"][row])
                    gap = float(c["target_draft_logit"][row]) - float(c["target_top1"][row])
                    found.append((pair, gap))
                    break
                accepted += 1
            at += accepted + 1
    return found


def halves(trace: Trace) -> tuple[list[Rejection], list[Rejection]]:
    train, rest = split_requests(trace, 0.5)
    return walked(trace, train), walked(trace, rest)


def test_the_most_frequent_fifth_of_the_patterns(
    ours: Ours, rows: dict[tuple[str, str], Row]
) -> None:
    every = [pair for half in halves(ours.trace) for pair, _ in half]
    counts = sorted(Counter(every).values(), reverse=True)
    fifth = math.ceil(len(counts) / 5)
    row = rows["most frequent 20% of (draft, target) pairs", "rejections, percent"]
    assert row.ours == pytest.approx(100 * sum(counts[:fifth]) / len(every))
    assert row.published == 69
    assert f"{len(every)} rejections of {len(counts)} patterns" in row.note


def test_rescues_are_counted_by_the_patterns_of_the_other_half() -> None:
    memory = OnlineCorrectionMemory().calibrate([(1, 2)] * 3 + [(3, 4)] * 2 + [(5, 6)])
    rule = Rescues(threshold=1, tau=0.5, memory=memory)
    rule.begin_run(None, 0.0)
    judged = [(1, 2, -0.1), (3, 4, -0.1), (1, 2, -3.0), (5, 6, -0.1), (1, 1, 0.0), (3, 4, -0.2)]
    for draft, target, gap in judged:
        score = SimpleNamespace(match=draft == target, token=target, top1=2.0, draft_logit=2 + gap)
        rule.accepts(SimpleNamespace(token_id=draft), score)
    # Not the hopeless one, nor the rare one, nor the match.
    assert rule.rescued == [(1, 2), (3, 4), (3, 4)]
    whole = Rejections([(1, 2), (3, 4)], np.array([-0.1, -0.1]))
    rows = pattern_rows(whole, {(1, 2)}, rule.rescued)
    assert [row.ours for row in rows] == [50, pytest.approx(100 / 3)]
    [_, none] = pattern_rows(whole, {(1, 2)}, [])
    assert none.ours is None
    assert "never fires" in none.mark


def test_thresholds_are_the_medians_of_the_other_half(
    ours: Ours, rows: dict[tuple[str, str], Row]
) -> None:
    fitted, shown = halves(ours.trace)
    gaps = sorted(gap for _, gap in fitted)
    middle = (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2
    [gate] = [row for row, _ in rows if row.startswith("gate") and row != "gate at tau = 0.01"]
    tau = float(gate.rpartition("= ")[2])
    assert tau == pytest.approx(math.exp(middle), rel=5e-3)
    passed = np.mean([gap >= math.log(tau) for _, gap in shown])
    assert rows[gate, "rejections passed, percent"].ours == pytest.approx(100 * passed)
    counts = Counter(pair for pair, _ in fitted)
    for lam in (1, 6):
        held = np.mean([counts[pair] > lam for pair, _ in shown])
        row = rows[f"memory at lambda = {lam}", "rejections held, percent"]
        assert row.ours == pytest.approx(100 * held)
        assert bool(row.mark) == (held == 0 or held > 0.95)
    lam = Rejections([p for p, _ in fitted], np.array([g for _, g in fitted])).median_lambda()
    again = [counts[pair] - 1 for pair, _ in fitted]
    assert np.mean([n > lam for n in again]) >= 0.5 > np.mean([n > lam + 1 for n in again])


def test_calibrated_arms_each_take_something_away(rows: dict[tuple[str, str], Row]) -> None:
    column = "mismatches accepted, percent"
    memory, gate, both = (
        rows[f"{CSD_ROWS[name]}, calibrated", column].ours or 0 for name in CALIBRATED
    )
    assert 0 < both < min(memory, gate)
    note = rows[f"{CSD_ROWS['csd']}, calibrated", column].note
    assert f"both {both / 100:.0%}: each of them takes some away" in note
    for name in CALIBRATED:
        assert not rows[f"{CSD_ROWS[name]}, calibrated", column].mark


def test_what_never_fires_and_what_coincides_is_marked(ours: Ours) -> None:
    """A pair whose wrong drafts are all hopeless to the target: the gate lets none stand."""
    columns = dict(ours.trace.columns)
    wrong = columns["match"] != 1
    columns["target_draft_logit"] = np.where(
        wrong, columns["target_top1"] - 40, columns["target_draft_logit"]
    ).astype(np.float32)
    trace = Trace(columns, ours.trace.requests, ours.trace.max_gamma, ours.trace.meta)
    rows = {(r.row, r.column): r for r in csd_rows(replace(ours, trace=trace))}
    gate = rows["gate at tau = 0.01", "rejections passed, percent"]
    assert gate.ours == 0
    assert "never fires" in gate.mark
    assert "-40.00" in gate.note
    both = rows[CSD_ROWS["csd"], "speedup"]
    assert "identical to" in both.mark
    # And one whose wrong drafts are as good as right ones: the gate lets all of them stand.
    columns["target_draft_logit"] = columns["target_top1"]
    trace = Trace(columns, ours.trace.requests, ours.trace.max_gamma, ours.trace.meta)
    rows = {(r.row, r.column): r for r in csd_rows(replace(ours, trace=trace))}
    assert "hardly a test" in rows["gate at tau = 0.01", "rejections passed, percent"].mark
    assert "hardly verifies" in rows[CSD_ROWS["csd-scg"], "speedup"].mark


def test_nothing_rejected_is_nothing_to_calibrate_on(ours: Ours) -> None:
    path = ours.trace.on_path
    columns = {name: values[path] for name, values in ours.trace.columns.items()}
    columns["match"] = np.ones_like(columns["match"])
    columns["target_token"] = columns["token"] = columns["draft_token"]
    trace = Trace(columns, ours.trace.requests, ours.trace.max_gamma, ours.trace.meta)
    with pytest.raises(SignalError, match="no draft was rejected"):
        csd_rows(replace(ours, trace=trace))


def test_accuracy_is_of_the_prompts_that_real_runs_were_scored_on(ours: Ours) -> None:
    likely = np.full(len(ours.trace), -1, np.float32)
    columns = {**ours.trace.columns, "target_path_logprob": likely}
    trace = replace(ours.trace, columns=columns)
    _, rest = split_requests(trace, TRAINING_SHARE)
    policy, rule = build(METHODS["csd-scg"], trace)
    log = replay(trace.select(rest), policy, rule, name=describe(policy))
    outputs = [
        Output(r.id, [1] * r.tokens, "a", "a", -1.0, (True, False, None)[min(i, 2)], i < 2 or None)
        for i, r in enumerate(log.requests)
    ]
    rows = csd_rows(replace(ours, trace=trace, runs=[RealRun(log, outputs, {})]))
    found = [r for r in rows if (r.column, r.kind) == ("MATH500_Acc", EXPERIMENT)]
    [row] = [r for r in found if r.ours is not None]
    assert (row.row, row.published, row.ours) == ("SD + SCG only", 43.6, 50)
    assert "solved 1 of 2 (greedy 2 of 2)" in row.note
