"""Acceptance by start: imported, kept, and replayed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed, Oracle
from tests.conftest import Run
from tests.logs import write_rows
from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError, FileError, TailError
from traces.importers.base import Options
from traces.importers.registry import find_importer, import_log
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.store.files import read_trace, write_trace

LONGEST = 6


def _rows() -> list[dict[str, Any]]:
    """Lengths that contradict a single match per position, as those of feature drafters do."""
    random = np.random.default_rng(0)
    rows = []
    for i, n in enumerate((40, 73, 9)):
        left = np.arange(n, 0, -1)  # a draft is right up to the last token at most
        lengths = 1 + np.minimum(random.geometric(0.35, n) - 1, np.minimum(left, LONGEST))
        rows.append(
            {
                "id": f"q{i}", "prompt_token_ids": [1, 2, 3 + i],
                "generated_token_ids": random.integers(9, size=n).tolist(),
                "acc_eagle": {"acc_len": lengths.tolist()},
                "acc_ngram": {"acc_len": [1] * n},
            }
        )  # fmt: skip
    return rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "combined_gsm8k.jsonl", _rows())


def _read(file: Path, drafter: str | None = "eagle") -> Trace:
    found = import_log("by-start", [file], Options(drafter=drafter))
    assert isinstance(found, Trace)
    return found


def _walked(lengths: list[int], gamma: int | None) -> list[int]:
    """Positions of the rounds, walked from position 1 as their simulator walks."""
    at, positions = 1, []
    while at < len(lengths):
        positions.append(at)
        at += lengths[at] if gamma is None else min(lengths[at], gamma + 1)
    return positions


@pytest.mark.parametrize("gamma", [1, 3, 5, None])
def test_rounds_are_those_of_the_lengths(file: Path, gamma: int | None) -> None:
    trace = _read(file)
    policy: DraftPolicy = Oracle() if gamma is None else Fixed(gamma)
    log = replay(trace, policy)
    want = [p for row in _rows() for p in _walked(row["acc_eagle"]["acc_len"], gamma)]
    assert log.rounds["position"].tolist() == want
    assert log.fidelity == "exact"
    [vectorised] = replay_many(trace, {"": policy})
    np.testing.assert_array_equal(vectorised.rounds, log.rounds)
    if gamma is None:
        np.testing.assert_array_equal(log.rounds["drafted"], log.rounds["accepted"])
    matches = replay(Trace({k: v for k, v in trace.columns.items() if k != "accepted"},
                           trace.requests), policy)  # fmt: skip
    # A single draft is a single match; of longer drafts these tell another story.
    assert (len(matches) == len(log)) == (gamma == 1)


def test_what_was_read_survives_its_file(file: Path, tmp_path: Path) -> None:
    trace = _read(file)
    assert (trace.max_gamma, trace.by_start, trace.tokens) == (LONGEST, True, 122)
    assert [r.id for r in trace.requests] == ["q0", "q1", "q2"]
    assert trace.requests[0].category == "combined_gsm8k"
    write_trace(trace, tmp_path / "t.parquet")
    again = read_trace(tmp_path / "t.parquet")
    np.testing.assert_array_equal(again.run_lengths, trace.run_lengths)
    some = again.select([2, 0])
    np.testing.assert_array_equal(some.run_lengths[:9], trace.run_lengths[-9:])


def test_drafts_that_nobody_tried_are_refused(file: Path) -> None:
    trace = _read(file)
    assert trace.open_ended.any()
    with pytest.raises(TailError, match=f"all {LONGEST} drafts accepted .* lower the policy"):
        replay(trace, Fixed(LONGEST + 1))
    with pytest.raises(TailError, match="lower the policy"):
        list(replay_many(trace, {"": Fixed(LONGEST + 1)}))


def test_simulate_takes_it(run: Run, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    assert run("import", "by-start", file, "--drafter", "eagle", "--out", out).code == 0
    rows = run(
        "simulate", "--trace", out, "--latency", "const:target=0.02,draft=0.002", "--policy",
        "fixed:gamma=3", "--policy", "oracle", "--json", "-",
    ).rows  # fmt: skip
    want = sum(len(_walked(row["acc_eagle"]["acc_len"], 3)) for row in _rows())
    assert rows[1]["rounds"] == want
    assert find_importer("auto", [file]).name == "by-start"


def test_bad_files_are_named(file: Path) -> None:
    for change, message in (
        ({}, "holds accepted lengths of eagle, ngram: name one with --drafter"),
        ({"acc_eagle": {"acc_len": [0]}}, "acc_eagle is no list of whole numbers >= 1"),
        ({"generated_token_ids": [1]}, "40 accepted lengths and 1 output tokens"),
        ({"prompt_token_ids": None}, "has no prompt_token_ids"),
    ):
        rows = _rows()
        rows[0] |= change
        file.write_text(json.dumps(rows[0]) + "\n")
        with pytest.raises(FileError, match=message):
            _read(file, "eagle" if change else None)
    file.write_text(json.dumps(_rows()[0]) + "\n")
    with pytest.raises(FileError, match=r"'medusa' \(there are: eagle, ngram"):
        _read(file, "medusa")
    with pytest.raises(FileError, match="no draft of ngram was ever accepted"):
        _read(file, "ngram")


def test_lengths_past_the_last_token_are_left_out(file: Path, tmp_path: Path, run: Run) -> None:
    """Published files hold accepted lengths of starts, and in them of tokens, past the end."""
    rows = _rows()
    rows[0]["acc_eagle"]["acc_len"][-1] = 3
    rows[0]["acc_eagle"]["acc_len"] += [1, 4]
    write_rows(file, rows)
    long = _read(file)
    assert [r.tokens for r in long.requests] == [40, 73, 9]
    assert long.run_lengths[39] == 1
    assert long.meta["left_out"] == ["2 accepted lengths of starts after the last token"]
    ran = run("import", "by-start", file, "--drafter", "eagle", "--out", tmp_path / "t.parquet")
    assert "left out: 2 accepted lengths" in ran.err


def test_contradictions_are_refused() -> None:
    requests = [Request("0", "all", 1, 3, 3, "length")]
    columns: dict[str, Any] = {
        "request": np.zeros(3, int), "position": np.arange(3), "offset": np.zeros(3, int),
        "match": np.array([1, 0, 1]), "accepted": np.array([2, 0, 1]),
    }  # fmt: skip
    assert Trace(columns, requests, 2).run_lengths.tolist() == [2, 0, 1]
    for change, gamma, message in (
        ({}, None, "no max_gamma"), ({}, 1, "beyond 0 to 1"),
        ({"match": np.array([1, 1, 1])}, 2, "disagree on a first draft"),
    ):  # fmt: skip
        with pytest.raises(DraftsimError, match=message):
            Trace({**columns, **change}, requests, gamma)
    # A start's own draft follows it, and its acceptance is kept with its first token alone.
    own = {**columns, "position": np.array([0, 0, 1]), "offset": np.array([0, 1, 0])}
    shorter = [Request("0", "all", 1, 2, 2, "length")]
    assert Trace({**own, "accepted": np.array([2, 0, 1])}, shorter, 2).run_lengths.tolist() == [
        2,
        1,
    ]
    with pytest.raises(DraftsimError, match="off the path"):
        Trace({**own, "accepted": np.array([2, 1, 1])}, shorter, 2)
