"""The tool that asks whether the tests would notice: what it changes, and whom it asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutants.__main__ import Results, report
from benchmarks.mutants.places import (
    Mutant,
    binary_operators,
    files,
    guards,
    inside,
    sample,
    statement,
    unevaluated,
)
from tests.conftest import ROOT

TEXT = """\
from abc import abstractmethod

LIMIT = 3 + 4


class A:
    @abstractmethod
    def f(self, *, a: int | None = 1 | 2) -> float | None:
        if (a and
                LIMIT > 2):
            return -1 * a
        return None
"""


def test_the_core_is_in_scope() -> None:
    found = files(ROOT)
    assert len(found) > 60
    for path in ("policies/core.py", "traces/replay/decoder.py", "simulator/serving/scheduler.py"):
        assert path in found


def test_what_is_never_run_is_not_changed() -> None:
    spans = unevaluated(TEXT)
    lines = TEXT.splitlines()

    def at(line: int, what: str, after: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
        column = lines[line - 1].index(what, after)
        return (line, column), (line, column + len(what))

    assert inside(at(8, "int | None"), spans)
    assert inside(at(8, "float | None"), spans)
    assert inside((at(7, "@")[0], (8, 0)), spans)
    assert not inside(at(8, "1 | 2"), spans)
    operators = binary_operators(TEXT)
    assert inside(at(3, "+"), operators)
    assert inside(at(8, "|", lines[7].index("1 |")), operators)
    assert inside(at(11, "*"), operators)
    assert not inside(at(8, "*"), operators), "the mark of keyword arguments is no operator"


def test_guards_and_words_are_not_changed() -> None:
    lines = (
        "assert a == b",
        "for x, y in zip(a, b, strict=True): c = x < y",
        'raise ValueError(f"{a + 1} is not {b}")',
        'raise ValueError("a") if a < b else KeyError',
    )
    spans = guards("\n".join(lines))

    def at(line: int, what: str) -> tuple[tuple[int, int], tuple[int, int]]:
        column = lines[line - 1].index(what)
        return (line, column), (line, column + len(what))

    assert inside(at(1, "=="), spans)
    assert inside(at(2, "True"), spans)
    assert not inside(at(2, "<"), spans)
    assert inside(at(3, "+"), spans)
    assert not inside(at(4, "<"), spans), "whether an error is raised is no word"


def test_a_statement_is_found_by_any_of_its_lines() -> None:
    assert statement(TEXT, 3) == range(3, 4)
    assert statement(TEXT, 10) == range(9, 11), "the head of a compound one"
    assert statement(TEXT, 11) == range(11, 12)
    assert statement(TEXT, 7) == statement(TEXT, 8) == range(9, 13), "a function's head is its own"


def test_a_larger_sample_holds_the_smaller_and_the_seed_decides() -> None:
    every = [Mutant("a.py", op, 0, line, 4) for line in range(40) for op in ("x", "y")]
    small, large = sample(every, 5, 0), sample(list(reversed(every)), 20, 0)
    assert large[:5] == small
    assert len({m.line for m in large}) == 20, "of a place one mutant"
    assert sample(every, 5, 1) != small
    assert sample([], 5, 0) == []


def test_results_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mutants = [Mutant("policies/core.py", "core/AddNot", n, 9 + n, 0) for n in range(3)]
    results = Results(tmp_path / "results.jsonl")
    for mutant, outcome in zip(mutants, ("killed", "survived", "timeout"), strict=True):
        assert results.of(mutant) is None
        results.add(mutant, {"outcome": outcome, "change": ["- a", "+ b"]})
    again = Results(tmp_path / "results.jsonl")
    rows = [row for m in mutants if (row := again.of(m))]
    assert report(rows, 3) == 1
    assert "of the other 3, 2 (66.7%) are noticed" in capsys.readouterr().out
    assert report([rows[0]], 1) == 0
