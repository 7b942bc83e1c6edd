"""The coding prompts of our own: what they hold, and that their tests tell right from wrong."""

from __future__ import annotations

import ast
import json
from collections import Counter
from typing import Any

import pytest

from profiler.prompts import read_prompts
from tests.conftest import ROOT

CODING_PROMPTS = ROOT / "profiler" / "qwen_coder" / "coding_prompts.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in CODING_PROMPTS.read_text().splitlines()]
TESTED = [row for row in ROWS if "entry" in row]


def passes(code: str, tests: str) -> bool:
    """Return True if the code, which is our own, passes the tests."""
    try:
        exec(f"{code}\n{tests}", {"__name__": "answer"})
    except Exception:
        return False
    return True


def asserts_of(row: dict[str, Any]) -> str:
    return str(row.get("unit_tests") or row["example_tests"])


def test_there_are_91_in_five_categories() -> None:
    assert Counter(row["category"] for row in ROWS) == {
        "code-write": 19, "code-fix": 18, "code-complete": 18, "code-explain": 18, "code-tests": 18,
    }  # fmt: skip
    for field in ("id", "prompt"):
        assert len({row[field] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["id"].rpartition("-")[0] == row["category"]


def test_prompts_are_read_with_their_tests() -> None:
    read = {prompt.id: prompt for prompt in read_prompts(CODING_PROMPTS)}
    assert {id: p.text for id, p in read.items()} == {row["id"]: row["prompt"] for row in ROWS}
    for row in ROWS:
        code = read[row["id"]].code
        if row["category"] == "code-explain":
            assert code is None
            continue
        assert code is not None
        assert code.entry == row["entry"]
        assert bool(code.unit_tests) == (row["category"] != "code-tests")
        assert (code.solution, code.mutant) == (
            (row["solution"], row["mutant"]) if row["category"] == "code-tests" else ("", "")
        )


@pytest.mark.parametrize("row", TESTED, ids=lambda row: str(row["id"]))
def test_the_solution_passes_and_the_mutant_fails(row: dict[str, Any]) -> None:
    tests = asserts_of(row)
    assert 3 <= sum(isinstance(n, ast.Assert) for n in ast.walk(ast.parse(tests))) <= 8
    assert row["entry"] in row["prompt"]
    assert passes(row["solution"], tests)
    wrong = row.get("mutant", f"def {row['entry']}(*given, **named):\n    return None")
    assert not passes(wrong, tests)
    if "mutant" in row:
        shown = "mutant" if row["category"] == "code-fix" else "solution"
        assert row[shown] in row["prompt"]
