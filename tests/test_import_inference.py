"""Draft lengths that a log does not hold: found where one schedule fits it, and only there."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from policies.core import DraftPolicy
from policies.registry import parse_policy
from simulator.pricing import price
from tests.conftest import Run
from tests.logs import import_specbench, row, write_rows
from traces.acceptance.trace import KEYS, MISMATCH, Trace
from traces.importers.schedules import ALIKE, FEWEST_TURNS
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.recordings import find_latency, find_trace

REMEDY = "name it with --draft-lengths fixed:gamma=3, or log more requests"
CONST = "const:target=0.0143,draft=0.00176,verify=0.0150"


@cache
def recording() -> Trace:
    return find_trace("bundled")


@cache
def bare() -> Trace:
    """The same without signals; no EOS is foreseen by the draft, as a log cannot tell if it was."""
    trace = recording()
    match = np.array(trace.columns["match"][trace.on_path])
    match[trace.request_starts[1:] - 1] = MISMATCH
    columns = {name: trace.columns[name][trace.on_path] for name in KEYS}
    return Trace({**columns, "match": match}, trace.requests, None, trace.meta)


def logged(trace: Trace, policy: DraftPolicy, folder: Path) -> tuple[RoundLog, Path]:
    """A run under `policy`, and the file Spec-Bench would have left."""
    log = replay(trace, policy, first=0)
    seconds = price(log, find_latency("bundled")).decode_s
    rows = []
    for i, wall in enumerate(seconds):
        emitted = log.rounds["emitted"][log.rounds["request"] == i].tolist()
        rows.append(row(i, emitted, wall_time=[float(wall)]))
    return log, write_rows(folder / "log.jsonl", rows)


@pytest.mark.parametrize(
    "text",
    [
        "fixed:gamma=3", "fixed:gamma=6", "hf-heuristic", "hf-heuristic:gamma=8",
        "hf-heuristic:persist=persistent", "gammatune",
    ],
)  # fmt: skip
def test_the_schedule_of_a_log_is_found(text: str, tmp_path: Path) -> None:
    log, file = logged(bare(), parse_policy(text), tmp_path)
    limit = max(r.max_new_tokens for r in log.requests)
    trace = import_specbench(file, max_new_tokens=limit)
    assert trace.meta["draft_lengths_known"], trace.meta["draft_lengths_found"]
    found = parse_policy(trace.meta["draft_lengths"])
    assert not text.startswith("fixed:") or trace.meta["draft_lengths"] == text
    again = replay(trace, found)
    for name in ("request", "position", "accepted"):
        assert again.rounds[name].tolist() == log.rounds[name].tolist()
    # The initial length of one that persists is soon forgotten.
    assert np.mean(again.rounds["drafted"] != log.rounds["drafted"]) < ALIKE


@pytest.mark.parametrize("text", ["confidence", "svip", "gammatune-plus", "confidence:gamma=4"])
def test_signals_leave_a_log_that_no_schedule_fits(text: str, tmp_path: Path) -> None:
    _, file = logged(recording(), parse_policy(text, max_gamma=24), tmp_path)
    trace = import_specbench(file)
    assert not trace.meta["draft_lengths_known"]
    assert trace.meta["draft_lengths"] == "none"
    assert trace.meta["draft_lengths_fit"] == []


def test_a_fixed_length_is_not_taken_on_trust(tmp_path: Path) -> None:
    # Some turns alone tell nothing by their seconds, and any rule with a cap of 3 looks so.
    turns = [row(i, [4, 1, 4, 2, 4, 1, 4, 3] * 4) for i in range(FEWEST_TURNS - 1)]
    meta = import_specbench(write_rows(tmp_path / "few", turns)).meta
    assert not meta["draft_lengths_known"]
    found = meta["draft_lengths_found"]
    assert (
        f"fixed:gamma=3 is not contradicted, but with fewer than {FEWEST_TURNS} requests" in found
    )
    assert found.endswith(REMEDY)
    meta = import_specbench(tmp_path / "few", draft_lengths="fixed:gamma=3").meta
    assert meta["draft_lengths_known"]


def test_times_that_scatter_tell_no_schedule(tmp_path: Path) -> None:
    """Requests of which each ran at its own speed: a dependence of 5% could not be seen in them."""
    _, file = logged(bare(), parse_policy("fixed:gamma=3"), tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    speeds = np.random.default_rng(0).lognormal(0, 0.3, len(rows))
    for one, speed in zip(rows, speeds, strict=True):
        one["choices"][0]["wall_time"][0] *= speed
    meta = import_specbench(write_rows(file, rows)).meta
    assert not meta["draft_lengths_known"]
    said = "fixed:gamma=3 is not contradicted, but the times of these"
    assert said in meta["draft_lengths_found"]
    assert meta["draft_lengths_found"].endswith(REMEDY)


def test_no_ranking_across_unknown_lengths(tmp_path: Path, run: Run) -> None:
    _, file = logged(recording(), parse_policy("confidence"), tmp_path)
    out = tmp_path / "log.parquet"
    ran = run("import", "specbench", file, "--out", out)
    assert "the draft lengths are not known" in ran.err
    ran = run("simulate", "--trace", out, "--latency", CONST, "--json", "-")
    assert "lower bound" in ran.err
    drafting = [r for r in ran.rows if r["policy"] != "autoregressive"]
    assert drafting
    assert {r["note"] for r in drafting} == {"lower bound"} == {r["fidelity"] for r in drafting}
    assert "are not ranked" in ran.document["headline"]
    # Neither the sentence nor the order says which is best.
    ran = run("simulate", "--trace", out, "--latency", CONST)
    assert "fastest" not in ran.out
    assert ran.out.count("\u2265 ") == len(drafting) + 1
    assert re.findall(r"^([\w-]+)\S* .*\u2265 \d", ran.out, re.MULTILINE) == [
        r["policy"].partition(":")[0] for r in drafting
    ]
    asked = ["--trace", out, "--latency", CONST]
    [row] = run("serve", *asked, "--batch", "1", "--policy", "gammatune", "--json", "-").rows[1:]
    assert row["fidelity"] == "lower bound"
    for command in (
        ["sweep", "--c", "0.1"], ["capacity", "--rate", "1", "--slo", "tpot=1,p=0.9"],
        ["simulate", "--against", "gammatune"],
    ):  # fmt: skip
        refused = run(*command, *asked)
        assert refused.code == 2
        assert "lower bound" in refused.err.splitlines()[-1]
    refused = run("tune", "--engine", "vllm", "--trace", out, "--latency", CONST)
    assert "lower bound" in refused.refusal
    # With the lengths said, everything is ranked as ever.
    ran = run("import", "specbench", file, "--out", out, "--draft-lengths", "fixed:20").ok()
    ran = run("simulate", "--trace", out, "--latency", CONST, "--json", "-")
    assert "best fixed" in {r["note"] for r in ran.rows}


def test_the_public_log_follows_no_schedule(shared_data: Path) -> None:
    folder = shared_data / "specbench_logs"
    file = folder / "vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl"
    found = import_specbench(file).meta["draft_lengths_found"]
    assert "fixed:gamma=20 is not contradicted round by round" in found
    assert "followed the draft's own signals" in found


def test_every_round_of_a_public_log_replays(shared_data: Path) -> None:
    file = shared_data / "specbench_logs" / "vicuna-7b-v1.3-sps-68m-float16-temp-0.0.jsonl"
    trace = import_specbench(file, draft_lengths="fixed:20")
    log = replay(trace, parse_policy("fixed:gamma=20"))
    assert len(log) == trace.meta["measured"]["rounds"] == 36581
    assert int(log.rounds["emitted"].sum()) == trace.tokens
    plain = import_specbench(
        shared_data / "specbench_logs" / "vicuna-7b-v1.3-vanilla-float16-temp-0.0.jsonl",
        draft_lengths="fixed:0",
    )
    assert len(replay(plain, parse_policy("autoregressive"))) == plain.tokens
