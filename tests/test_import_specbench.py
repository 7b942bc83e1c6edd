"""Spec-Bench logs: what they tell, what they cannot tell, and logs that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import parse_policy
from policies.core import DraftPolicy, speculate
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import HFHeuristic
from tests.conftest import Run
from tests.logs import import_specbench, row, write_rows
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import MATCH, MISMATCH, UNKNOWN, Request, Trace
from traces.errors import DraftsimError, FileError, SignalError
from traces.replay.decoder import ReplayDecoder
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.lookups.sources import PLD
from traces.sources.replay import replay_source
from traces.store.files import write_trace

LIMIT = 40


def log_file(path: Path, log: RoundLog, turns: int = 2) -> Path:
    """The file a run with these rounds would have left, `turns` requests to a question."""
    emitted = [
        log.rounds["emitted"][log.rounds["request"] == i].tolist() for i in range(len(log.requests))
    ]
    groups = [emitted[i : i + turns] for i in range(0, len(emitted), turns)]
    return write_rows(path, (row(81 + q, *g) for q, g in enumerate(groups)))


def recorded(seed: int, alpha: float) -> Trace:
    """Turns that end at the limit, and turns whose EOS the draft model did not foresee."""
    trace = synthetic_trace(alpha, requests=10, tokens=LIMIT, seed=seed, eos_fraction=0.5)
    match = np.array(trace.columns["match"])
    last = trace.request_starts[1:] - 1
    match[last[[r.ended == "eos" for r in trace.requests]]] = MISMATCH
    return Trace({**trace.columns, "match": match}, trace.requests, None, trace.meta)


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("hf-heuristic:5", HFHeuristic(5)),
        ("hf-heuristic:gamma=2,persist=persistent", HFHeuristic(2, persist="persistent")),
        (
            "hf-heuristic:gamma=5,full_accept_means=budget,persist=persistent",
            HFHeuristic(5, "budget", persist="persistent"),
        ),
        ("fixed:3", Fixed(3)),
    ],
)
def test_replaying_the_policy_gives_its_rounds_back(
    tmp_path: Path, text: str, policy: DraftPolicy, alpha: float
) -> None:
    for seed in range(4):
        log = replay(recorded(seed, alpha), policy, first=0)
        file = log_file(tmp_path / "log.jsonl", log)
        trace = import_specbench(file, draft_lengths=text, max_new_tokens=LIMIT)
        again = replay(trace, policy)
        assert again.first == 0
        assert again.rounds.tolist() == log.rounds.tolist()
        assert [r.tokens for r in trace.requests] == [r.tokens for r in log.requests]
        assert [r.ended for r in trace.requests] == [
            "length" if r.tokens == LIMIT else "eos" for r in log.requests
        ]


def test_what_is_known_is_true(tmp_path: Path) -> None:
    true = recorded(3, 0.7)
    log = replay(true, HFHeuristic(5), first=0)
    file = log_file(tmp_path / "log.jsonl", log)
    known = {}
    for text in ("none", "at-least:1", "hf-heuristic:5"):
        trace = import_specbench(file, draft_lengths=text, max_new_tokens=LIMIT)
        match = trace.columns["match"]
        seen = match != UNKNOWN
        assert np.array_equal(match[seen], true.columns["match"][seen])
        known[text] = int(seen.sum())
    assert known["none"] == log.rounds["accepted"].sum()
    assert known["none"] < known["at-least:1"] < known["hf-heuristic:5"]
    rejected = (log.rounds["accepted"] < log.rounds["drafted"]).sum()
    assert known["hf-heuristic:5"] == known["none"] + rejected


def test_an_eos_that_was_drafted_emits_the_same_tokens(tmp_path: Path) -> None:
    trace = synthetic_trace(0.9, requests=10, tokens=LIMIT, seed=1, eos_fraction=1.0)
    policy = HFHeuristic(5, "budget")
    log = replay(trace, policy, first=0)
    file = log_file(tmp_path / "log.jsonl", log)
    again = replay(import_specbench(
        file, draft_lengths="hf-heuristic:gamma=5,full_accept_means=budget", max_new_tokens=LIMIT,
    ), policy)  # fmt: skip
    for name in ("request", "position", "emitted"):
        assert again.rounds[name].tolist() == log.rounds[name].tolist()


def test_positions_by_hand(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "log", [row(7, [3, 1, 2], [2])])
    match = [MATCH, MATCH, UNKNOWN, UNKNOWN, MATCH, UNKNOWN]
    trace = import_specbench(file)
    assert trace.columns["match"].tolist() == [*match, MATCH, UNKNOWN]
    assert [(r.id, r.category) for r in trace.requests] == [("7/1", "c7"), ("7/2", "c7")]
    match[3] = MISMATCH
    trace = import_specbench(file, draft_lengths="at-least:1")
    assert trace.columns["match"].tolist() == [*match, MATCH, UNKNOWN]
    trace = import_specbench(file, draft_lengths="fixed:2")
    match[5] = MISMATCH
    assert trace.columns["match"].tolist() == [*match, MATCH, MISMATCH]
    # At the limit of six the last round may draft one token alone, which was accepted.
    trace = import_specbench(file, draft_lengths="fixed:2", max_new_tokens=6)
    assert trace.columns["match"].tolist()[:6] == [*match[:5], UNKNOWN]


def test_a_last_round_that_was_cut_and_a_first_token_from_prefill(tmp_path: Path) -> None:
    cut = row(1, [2, 4])
    cut["choices"][0]["new_tokens"] = [4]
    trace = import_specbench(write_rows(tmp_path / "cut", [cut]))
    assert trace.meta["first"] == 0
    assert trace.columns["match"].tolist() == [MATCH, UNKNOWN, MATCH, MATCH]
    early = row(1, [2, 2])
    early["choices"][0]["new_tokens"] = [5]
    trace = import_specbench(write_rows(tmp_path / "early", [early]))
    assert trace.meta["first"] == 1
    assert trace.columns["match"].tolist() == [UNKNOWN, MATCH, UNKNOWN, MATCH, UNKNOWN]


def test_a_contradicting_log_names_row_turn_and_round(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "log", [row(1, [2, 2]), row(9, [1], [1, 6])])
    where = "line 2, question 9, turn 2, round 2"
    with pytest.raises(FileError, match=rf"{where}: 5 drafts .* drafts 4"):
        import_specbench(file, draft_lengths="hf-heuristic:5")
    with pytest.raises(FileError, match=r"question 1, turn 1, round 1: 1 drafts .* Fixed drafts 0"):
        import_specbench(file, draft_lengths="fixed:0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("maybe", "expected infer, none, at-least:N, fixed:N, hf-heuristic:N or another policy"),
        ("none:3", "expected infer"),
        ("fixed", "expected infer"),
        ("at-least:0", "N is 0, expected >= 1"),
        ("fixed:x", "not of the form key=value"),
        ("hf-heuristic:0", "gamma is 0"),
        ("hf-heuristic:gama=5", "did you mean 'gamma'"),
        ("hf-heuristic:gamma=5,confidence_threshold=0.4", "signals that the log does not hold"),
    ],
)
def test_impossible_draft_lengths(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        import_specbench(write_rows(tmp_path / "log", [row(1, [2])]), draft_lengths=text)


def edited(**changes: Any) -> dict[str, Any]:
    good = row(5, [2, 1], [3])
    good["choices"][0].update(changes)
    return good


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question_id": 5}, "line 2, question 5: has no choices"),
        (edited(accept_lengths=[2, 1]), "2 rounds, decoding_steps says 3"),
        (edited(accept_lengths=[2, 0, 3]), "accept_lengths is no list of whole numbers"),
        (edited(new_tokens="x"), "new_tokens is no list"),
        (edited(wall_time=[1.0]), "2, 2 and 1 turns"),
        (edited(wall_time=[1.0, float("nan")]), "wall_time is no list of positive seconds"),
        (edited(new_tokens=[9, 3]), "turn 1: accept_lengths sum to 3 for new_tokens=9"),
        (edited(new_tokens=[2, 3]), "turn 1: accept_lengths sum to 3 for new_tokens=2"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        import_specbench(write_rows(tmp_path / "log", [row(1, [2]), bad]))


def test_files_that_are_no_logs(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        import_specbench(tmp_path / "none")
    with pytest.raises(FileError, match="is a directory"):
        import_specbench(tmp_path)
    for content, message in (
        (b"", "holds no rows"), (b"\xff\xfe", "is not text"), (b"[1]", "is no JSON object"),
        (json.dumps(row(1, [2])).encode() + b'\n{"question', "line 2: is not JSON"),
    ):  # fmt: skip
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(FileError, match=message):
            import_specbench(tmp_path / "f")


def test_baseline_prices_each_turn(tmp_path: Path) -> None:
    log = write_rows(tmp_path / "log", [row(1, [3, 3], [4]), row(2, [2])])
    ones = [row(1, [1] * 6, [1] * 8), row(2, [1] * 2)]
    for one, walls in zip(ones, ([0.3, 0.32], [0.12]), strict=True):
        one["choices"][0]["wall_time"] = walls
    trace = import_specbench(log, baseline=write_rows(tmp_path / "plain", ones))
    assert [r.wall_s for r in trace.requests] == pytest.approx([0.05 * 6, 0.04 * 4, 0.06 * 2])
    about = trace.meta["baseline"]
    assert about["target_s"] == pytest.approx(0.05)
    assert about["spread_s"] == pytest.approx(0.005)
    assert about["per_token_s"] == pytest.approx(0.74 / 16)
    assert about["speedup"] == pytest.approx((12 / 0.12) * (0.74 / 16))
    # Other questions of the baseline are not compared.
    other = row(3, [1] * 9)
    other["choices"][0]["wall_time"] = [9.0]
    more = import_specbench(log, baseline=write_rows(tmp_path / "plain", [*ones, other]))
    assert more.meta["baseline"] == about
    with pytest.raises(FileError, match="no question 2, turn 1"):
        import_specbench(log, baseline=write_rows(tmp_path / "plain", ones[:1]))


SPS = "vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl"
VANILLA = "vicuna-7b-v1.3-vanilla-float16-temp-0.0.jsonl"


def test_public_logs_give_their_printed_figures(shared_data: Path) -> None:
    folder = shared_data / "specbench_logs"
    trace = import_specbench(folder / SPS, baseline=folder / VANILLA)
    measured, plain = trace.meta["measured"], trace.meta["baseline"]
    assert measured["rounds"] == 36581
    assert f"{measured['per_round']:.3f}" == "2.502"
    assert f"{plain['per_token_s'] * 1e3:.2f}" == "19.46"
    assert f"{plain['speedup']:.3f}" == "1.632"
    assert len({r.id.split("/")[0] for r in trace.requests}) == 480
    # The rounds emit every token: decoding began with the prompt, at position 0.
    assert trace.meta["first"] == 0
    assert trace.tokens == measured["tokens"]
    assert (trace.columns["match"] == MATCH).sum() == trace.tokens - measured["rounds"]


def test_public_log_was_not_made_by_the_heuristic(shared_data: Path) -> None:
    file = shared_data / "specbench_logs" / SPS
    with pytest.raises(FileError, match=r"line 1, question 81, turn 1, round \d+: .* HFHeuristic"):
        import_specbench(file, draft_lengths="hf-heuristic:5")
    with pytest.raises(FileError, match="Fixed drafts 19"):
        import_specbench(file, draft_lengths="fixed:19")
    assert len(import_specbench(file, draft_lengths="fixed:20").requests) == 560
    with pytest.raises(SignalError, match="not observed"):
        replay(import_specbench(file), Fixed(3))


def test_plain_decoding_is_a_log_of_empty_drafts(shared_data: Path) -> None:
    file = shared_data / "specbench_logs" / VANILLA
    trace = import_specbench(file, baseline=file, draft_lengths="fixed:0")
    assert (trace.columns["match"] == UNKNOWN).all()
    assert trace.meta["baseline"]["speedup"] == pytest.approx(1.0)
    assert len(replay(trace, Fixed(0))) == trace.tokens


LATENCY = ("--latency", "const:target=0.0195,draft=0.002")


def rows_of(run: Run, file: Path) -> list[dict[str, Any]]:
    return run("simulate", "--trace", file, *LATENCY, "--resamples", 20, "--json", "-").rows


@pytest.mark.parametrize("lengths", ["hf-heuristic:5", "none"])
def test_every_row_of_an_imported_log_has_the_logs_tokens(
    run: Any, tmp_path: Path, lengths: str
) -> None:
    log = replay(recorded(3, 0.7), parse_policy("hf-heuristic:gamma=5"), first=0)
    file = log_file(tmp_path / "log.jsonl", log)
    trace = import_specbench(file, draft_lengths=lengths, max_new_tokens=LIMIT)
    write_trace(trace, tmp_path / "t.parquet")
    rows = rows_of(run, tmp_path / "t.parquet")
    assert len(rows) > 5
    assert {row["policy"]: row["tokens"] for row in rows} == {
        row["policy"]: trace.tokens for row in rows
    }


def test_every_row_of_the_public_log_has_its_tokens(
    run: Any, tmp_path: Path, shared_data: Path
) -> None:
    folder = shared_data / "specbench_logs"
    trace = import_specbench(folder / SPS, baseline=folder / VANILLA, draft_lengths="fixed:20")
    write_trace(trace, tmp_path / "t.parquet")
    rows = rows_of(run, tmp_path / "t.parquet")
    assert {row["tokens"] for row in rows} == {trace.tokens}
    assert trace.tokens == trace.meta["measured"]["tokens"]


def test_every_round_of_the_public_logs_replays(shared_data: Path) -> None:
    """Under the policies that made them: 20 tokens at most, and none at all."""
    folder = shared_data / "specbench_logs"
    for name, text in ((SPS, "fixed:gamma=20"), (VANILLA, "fixed:gamma=0")):
        trace = import_specbench(folder / name, draft_lengths=text.replace("gamma=", ""))
        log = replay(trace, parse_policy(text))
        with (folder / name).open() as file:
            logged = [v for line in file for v in json.loads(line)["choices"][0]["accept_lengths"]]
        assert log.rounds["emitted"].tolist() == logged
        assert len(log) == trace.meta["measured"]["rounds"]


def test_everything_that_replays_begins_where_the_trace_does() -> None:
    requests = [Request("a", "", 2, 5, 9, "eos", prompt_ids=(1, 2))]
    made = Trace.without_tails(requests, None, {}, match=np.ones(5, np.int8))
    tokens = np.array([2, 1, 2, 1, 2], np.int32)
    for first in (0, 1):
        trace = Trace({**made.columns, "token": tokens}, requests, None, {"first": first})
        policy = parse_policy("fixed:gamma=1")
        assert trace.first == first
        decoder = ReplayDecoder(trace, 0)
        rounds = list(speculate(decoder, policy))
        for log in (replay(trace, policy), replay_source(trace, PLD(), policy)):
            assert log.first == first
            assert log.rounds["position"][0] == first
            assert log.rounds["emitted"].sum() == trace.tokens - first
        assert rounds[0].position == first
