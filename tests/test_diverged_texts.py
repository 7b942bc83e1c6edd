"""A text that diverged in a real run is told from a round that the simulator got wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import pandas as pd
import torch

from policies import parse_policy
from profiler.checks import spot_check
from profiler.checks.differences import (
    Texts,
    comparable,
    divergence,
    draft_ties,
    first_difference,
    output_of,
    rounds_differ,
)
from profiler.checks.spot_check import Measured
from profiler.models.loading import Pair
from profiler.recording.run import BUNDLED, RunInfo
from tests import bundled
from tests.conftest import Run
from tests.shared import made_once
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog, before
from traces.replay.run import replay
from traces.store.engine_runs import read_measured
from traces.store.files import read_trace

REQUEST, POSITION = 1, 4
"""Where passes over several tokens decide otherwise than passes over one."""
LEARNER = "hf-heuristic:persist=persistent"


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """A run folder of three prompts, in which batches of two are measured too."""

    def make(folder: Path) -> None:
        prompts = ("--prompts", BUNDLED / "prompts.jsonl", "--limit", 3, "--max-new-tokens", 12)
        more = ("--max-gamma", 4, "--batch", "1,2")
        run("profile", *bundled.named(), *prompts, *more, "--out", folder).ok()

    return Path(shutil.copytree(made_once("three-short-outputs", make), tmp_path / "run"))


def fork(model: Any, trace: Trace) -> None:
    """Let the model decide otherwise at `POSITION`, in passes over several tokens."""
    info, text = trace.requests[REQUEST], output_of(trace, REQUEST)
    assert info.prompt_length > 0
    at, fed = info.prompt_length + POSITION - 1, text[POSITION - 1]

    def decide(module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        ids, places = given["input_ids"], given["position_ids"]
        if ids.shape[1] == 1:
            return
        first = ids.shape[1] - output.logits.shape[1]
        for row, column in ((places == at) & (ids == fed)).nonzero().tolist():
            if column >= first and ids.shape[1] <= 8:  # no prompt
                logits = output.logits[row, column - first]
                best, second = logits.topk(2).indices.tolist()
                logits[[best, second]] = logits[[second, best]]

    model.register_forward_hook(decide, with_kwargs=True)


@pytest.fixture
def forked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder, whose target decides otherwise from now on."""
    load = RunInfo.load

    def loaded(info: RunInfo) -> Pair:
        pair = load(info)
        fork(pair.target, read_trace(folder / "trace.parquet"))
        return pair

    monkeypatch.setattr(RunInfo, "load", loaded)
    return folder


POLICIES = ("--policy", "fixed:gamma=2", "--policy", LEARNER, "--policy", "oracle")


def test_a_text_that_diverged_is_not_a_round_that_differs(run: Run, forked: Path) -> None:
    ran = run("validate", "--run", forked, *POLICIES, "--repeats", 1, "--json", "-")
    trace = read_trace(forked / "trace.parquet")
    plain, *drafting, assisted, _ = ran.rows
    assert plain["texts_diverged"] == plain["rounds_differ"] == 0
    assert len(drafting) == 3
    for row in (*drafting, assisted):
        assert (row["texts_diverged"], row["rounds_differ"]) == (1, 0), row
        assert not row["drafts_diverged"]
        [one] = row["diverged"]
        assert (one["request"], one["position"]) == (trace.requests[REQUEST].id, POSITION)
        at = trace.on_path[int(trace.request_starts[REQUEST]) + POSITION]
        assert one["expected"] == output_of(trace, REQUEST)[POSITION] != one["token"]
        for name in ("target_top1", "target_top2"):
            assert one[name] == pytest.approx(trace.columns[name][at])
    # No seconds of that request, under any policy; the report holds the file against predictions.
    assert {row["requests_left_out"] for row in (plain, *drafting)} == {1}
    times = read_measured(forked / "measured.parquet").times
    others = [r.id for i, r in enumerate(trace.requests) if i != REQUEST]
    assert sorted(times["request"].unique()) == sorted(others)
    wall_s = times.loc[times["policy"] == "autoregressive", "wall_s"].sum()
    assert 0 < plain["measured_s"] <= wall_s + 1e-9


def test_divergences_are_named_and_doubted_where_nothing_is_a_tie(run: Run, forked: Path) -> None:
    ran = run("validate", "--run", forked, *POLICIES, "--repeats", 1, "--no-assisted")
    said = ran.said
    name = read_trace(forked / "trace.parquet").requests[REQUEST].id
    assert f"3 texts diverged: {name} at position {POSITION} (logits " in said
    assert "1 request is left out of all seconds" in said
    assert "warning: 3 of them diverged where the recorded logits are no near-tie" in said
    assert "0 differing rounds" in said


def test_the_median_error_of_speedups_leaves_plain_decoding_out(run: Run, forked: Path) -> None:
    rows = forked / "rows.csv"
    asked = ("--run", forked, *POLICIES, "--repeats", 1, "--no-assisted", "--out", rows)
    ran = run("validate", *asked).ok()
    drafting = pd.read_csv(rows).query("policy != 'autoregressive'")
    errors = drafting["speedup_error"].abs()
    assert len(errors) == 3
    assert f"of the speedups {np.median(errors):.1%};" in ran.said


def test_groups_whose_texts_diverged_are_left_out(run: Run, forked: Path) -> None:
    policies = ("--policy", "fixed:gamma=2", "--policy", "confidence-freeze:gamma=4")
    rows = run(
        "validate", "--run", forked, "--batch", "1,2", *policies, "--repeats", 1, "--json", "-"
    ).rows
    assert len(rows) == 6
    for row in rows:
        drafts = row["policy"] != "autoregressive"
        assert (row["texts_diverged"], row["rounds_differ"]) == (int(drafts), 0), row
        assert row["requests_left_out"] == row["batch"]
    kept = read_measured(forked / "measured_batches.parquet").times
    assert sorted(kept.groupby("batch")["request"].nunique()) == [1, 2]


@pytest.mark.parametrize("request_of", [0, REQUEST])
def test_a_source_s_text_that_diverged_is_not_a_round_that_differs(
    request_of: int, run: Run, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are in the order of the policies, even if another ran the first request left."""
    own = spot_check.run_requests

    def diverged(*given: Any, **named: Any) -> Measured:
        """Return real runs, with another text and other rounds from a position on."""
        measured = own(*given, **named)
        measured.outputs["pld"][request_of][POSITION] += 1
        log = measured.logs["pld"]
        end = int(np.flatnonzero(log.rounds["request"] == request_of)[-1]) + 1
        another = log.rounds[end - 1 : end].copy()
        another["position"] = POSITION + 1
        rounds = np.concatenate([log.rounds[:end], another, log.rounds[end:]])
        measured.logs["pld"] = replace(log, rounds=rounds)
        return measured

    monkeypatch.setattr(spot_check, "run_requests", diverged)
    options = ("--policy", "pld", "--repeats", 1, "--json", "-")
    plain, row = run("validate", "--run", small_run, *options).rows
    assert (plain["policy"], row["policy"]) == ("autoregressive", "pld")
    assert (plain["texts_diverged"], plain["rounds_differ"]) == (0, 0)
    assert (row["texts_diverged"], row["rounds_differ"]) == (1, 0)
    assert row["diverged"][0]["position"] == POSITION
    assert plain["requests_left_out"] == row["requests_left_out"] == 1


def test_rounds_that_differ_before_a_divergence_still_count() -> None:
    trace = bundled.record(3)
    log = replay(trace, parse_policy("fixed:gamma=3"))
    own = log.rounds[log.rounds["request"] == 0]
    at = int(own["position"][3])
    for changed, expected in ((1, 1), (2, 1), (3, 0)):
        rounds = log.rounds.copy()
        rounds["accepted"][changed] ^= 1
        real = RoundLog(rounds, log.requests, log.policy, first=log.first)
        assert rounds_differ(real, log) == 1
        # The round at the divergence counts with its draft, and what was accepted before it.
        assert rounds_differ(real, log, {0: at}) == expected
    rounds = log.rounds.copy()
    rounds["drafted"][3] += 1
    real = RoundLog(rounds, log.requests, log.policy, first=log.first)
    assert rounds_differ(real, log, {0: at}) == 1
    assert len(before(log.of_request(0), at)) == 4


def test_a_draft_that_diverged_at_a_near_tie_is_told_from_a_wrong_round() -> None:
    trace = bundled.record(3)
    log = replay(trace, parse_policy("fixed:gamma=3"))
    k = next(i for i, r in enumerate(log.rounds) if r["request"] == 0 and r["accepted"] == 3)
    rounds = log.rounds.copy()
    rounds["accepted"][k] = 1  # the second drafted token was another
    real = RoundLog(rounds, log.requests, log.policy, first=log.first)
    begin = int(rounds["position"][k])
    row = trace.on_path[int(trace.request_starts[0]) + begin + 1]
    columns = dict(trace.columns)
    columns["draft_top2"] = columns["draft_top2"].copy()
    for margin, expected in ((0.0, {0: begin}), (1.0, {})):
        columns["draft_top2"][row] = columns["draft_top1"][row] - margin
        tied = Trace(columns, trace.requests, trace.max_gamma, trace.meta)
        assert draft_ties(real, log, tied, torch.float32, {}) == expected
    # After a text that diverged nothing is looked for.
    assert draft_ties(real, log, tied, torch.float32, {0: begin - 1}) == {}
    columns["draft_top2"][row] = columns["draft_top1"][row]
    outputs = {log.policy: [output_of(trace, i) for i in range(3)]}
    texts = Texts(tied, outputs, "float32")
    table = pd.DataFrame({"policy": [log.policy], "rounds_differ": [-1]})
    both = {log.policy: real}, {log.policy: log}
    [found] = texts.compared(table, *both, draft_model=True).to_dict("records")
    assert (found["drafts_diverged"], found["rounds_differ"], found["texts_diverged"]) == (1, 0, 0)
    [strict] = texts.compared(table, *both).to_dict("records")
    assert strict["rounds_differ"] == 1


def test_what_a_policy_learnt_from_another_text_is_not_compared() -> None:
    found = {1: 2}
    assert comparable(found, 3, learns=False) == {1: 2}
    assert comparable(found, 3, learns=True) == {1: 2, 2: -1}
    assert comparable({}, 3, learns=True) == {}


def test_a_near_tie_is_within_a_few_units_in_the_last_place() -> None:
    trace = bundled.record(3)
    row = trace.on_path[int(trace.request_starts[0]) + 5]
    columns = dict(trace.columns)
    columns["target_top1"], columns["target_top2"] = (
        columns[name].copy() for name in ("target_top1", "target_top2")
    )
    columns["target_top1"][row], columns["target_top2"][row] = 20.0, 19.75
    tied = Trace(columns, trace.requests, trace.max_gamma, trace.meta)
    text = [*output_of(tied, 0)]
    text[5] += 1
    for dtype, units, near in ((torch.bfloat16, 2.0, True), (torch.float32, 131072.0, False)):
        one = divergence(tied, 0, text, dtype)
        assert one is not None
        assert one.target_units == units
        assert one.near_tie is near
        assert str(one).endswith("at position 5 (logits 20 and 19.75)")
    # Of another text than the recorded one the recording knows no logits.
    other, third = ([token + n for token in text] for n in (1, 2))
    one = divergence(tied, 0, third, torch.bfloat16, expected=other)
    assert one is not None
    assert (one.position, one.target_units, one.near_tie) == (0, None, None)


def test_outputs_are_compared_to_the_end_of_the_longer_one() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2
    trace = bundled.record(3)
    text = output_of(trace, 0)
    one = divergence(trace, 0, [*text, 5], torch.float32)
    assert one is not None
    assert (one.position, one.token, one.expected) == (len(text), 5, None)
    assert one.target_top1 is None
