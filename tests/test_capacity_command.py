"""``draftsim capacity``: what it answers, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.test_capacity import few_tried

__all__ = ["few_tried"]  # a fixture


def test_the_command_answers_in_words_and_rows(
    synthetic_run: Path, run: Run, tmp_path: Path
) -> None:
    command = [
        "capacity", "--trace", synthetic_run, "--rate", 12, "--slo", "ttft=0.5,tpot=0.05",
        "--policy", "fixed:gamma=3", "--max-batch", 4, "--replications", 2, "--jobs", 1,
        "--assume-batch-free", "--price", 3, "--requests", 100,
    ]  # fmt: skip
    rows = run(*command, "--json", "-", "--plots", tmp_path).rows
    assert [r["policy"] for r in rows] == ["autoregressive", "fixed:gamma=3"]
    assert (tmp_path / "replicas.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:
        assert row["share"] == 0.95
        assert row["cost_per_hour"] == pytest.approx(3 * row["replicas"])
    out = tmp_path / "plan.csv"
    ran = run(*command, "--out", out)
    assert f"takes {rows[1]['replicas']} replica" in ran.err
    assert "saves" in ran.out  # the heading takes several lines
    assert out.exists()
    assert not (tmp_path / "plan.csv.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slo", "ttft=0.5"), "give --rate or --arrivals"),
        (("--slo", "ttft=0.5", "--rate", 0), "rate is 0"),
        (("--slo", "latency=1", "--rate", 1), "'latency=1' is not one of ttft=TIME, tpot=TIME"),
        (("--slo", "ttft=soon", "--rate", 1), "ttft is 'soon', expected a time such as 200ms"),
        (("--slo", "p=0.9", "--rate", 1), "bound nothing"),
        (("--slo", "ttft=1,ttft=2", "--rate", 1), "ttft is given twice"),
        (("--slo", "ttft=1,p=1.5", "--rate", 1), "share is 1.5"),
        (("--slo", "ttft=-1", "--rate", 1), "ttft is '-1', expected more than 0 seconds"),
        (("--slo", "ttft=1", "--rate", 1, "--gpus", 0), "gpus is 0"),
        (("--slo", "ttft=1", "--rate", 1, "--router", "best"), "router is 'best'"),
        (("--slo", "ttft=1", "--rate", 1, "--max-replicas", 0), "at least 1 replica"),
        (("--slo", "ttft=1", "--rate", 1, "--max-replicas", 10**8), "expected at most 65536"),
        (("--slo", "ttft=1", "--rate", 1, "--requests", 10**20), "expected at most 10000000"),
    ],
)
def test_bad_questions_are_one_line(
    synthetic_run: Path, run: Run, arguments: tuple[Any, ...], message: str
) -> None:
    ran = run("capacity", "--trace", synthetic_run, "--assume-batch-free", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
