"""Phases of an answer: found by markers, and rows by phase that add up to the whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from simulator.phases import ANSWER, Phase, phase_rows, phases_of
from simulator.summary import price_all
from tests.conftest import Run
from tests.outputs import trace_of
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.sources import parse_source, replay_source

TARGET = Path(__file__).parents[1] / "profiler" / "bundled" / "target"
THINK = Phase.parse("thinking=#7..#8")


def test_tokens_are_markers() -> None:
    trace = trace_of([[5, 7, 5, 8, 0], [7, 0], [5, 5, 8, 0]], 9, [[1]] * 3, [0])
    assert phases_of(trace, [THINK]).tolist() == [0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    opened = Phase.parse("thinking=..#8")  # the template holds the opening tag
    assert phases_of(trace, [opened]).tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


def test_text_is_found_across_tokens() -> None:
    pieces = {2: "ab", 3: "<th", 4: "ink>", 5: "x</th", 6: "ink>y", 9: "<tool>"}
    trace = trace_of([[2, 3, 4, 2, 5, 6, 2, 9, 2]], 9, [[1]], [])
    phases = [Phase.parse("thinking=<think>..</think>"), Phase.parse("tool=<tool>..</tool>")]
    assert phases_of(trace, phases, pieces.__getitem__).tolist() == [0, 1, 1, 1, 1, 1, 0, 2, 2]
    with pytest.raises(DraftsimError, match="--tokenizer"):
        phases_of(trace, phases)


def test_the_phases_make_up_the_whole() -> None:
    rng = np.random.default_rng(1)
    outputs = [[7, *rng.integers(10, 20, 40).tolist(), 8, *rng.integers(10, 20, 60).tolist()]
               for _ in range(6)]  # fmt: skip
    trace = trace_of(outputs, 102, [[1, 2]] * 6, [])
    log = replay_source(trace, parse_source("parallel:acceptance=[0.7,0.4]"), Fixed(2))
    runs = price_all([log], LatencyTable.constant(1.0, 0.2))
    rows = phase_rows(runs, trace, [THINK], phases_of(trace, [THINK]), 50)
    mine = [row for row in rows if row["policy"] == log.policy]
    assert [row["phase"] for row in mine] == [ANSWER, "thinking"]
    assert sum(row["tokens"] for row in mine) == log.rounds["emitted"].sum()
    assert sum(row["wall_s"] for row in mine) == pytest.approx(float(runs[1].decode_s.sum()))
    assert mine[1]["share"] == pytest.approx(42 / 102)


@pytest.mark.parametrize(
    ("text", "says"),
    [("thinking", "NAME=BEGIN..END"), ("a=x..", "an end"), ("answer=a..b", "name")],
)
def test_wrong_phases_are_refused(run: Run, text: str, says: str) -> None:
    made = run("simulate", "--phase", text)
    assert made.code == 2
    assert says in made.err


def test_the_command_line_prints_a_row_by_phase(run: Run) -> None:
    asked = ("simulate", "--trace", "bundled", "--policy", "fixed:gamma=3", "--phase",
             "bracketed=(..)", "--tokenizer", TARGET)  # fmt: skip
    printed = run(*asked)
    assert printed.code == 0, printed.err
    assert "bracketed" in printed.out
    told = json.loads(run(*asked, "--json", "-").out)["phases"]
    assert {row["phase"] for row in told} == {ANSWER, "bracketed"}
    assert all(row["speedup"] > 0 for row in told)
    without = run(*asked[:-2])
    assert without.code == 2
    assert "--tokenizer" in without.err
