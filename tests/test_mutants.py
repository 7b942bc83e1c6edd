"""The tool that asks whether the tests would notice: what it changes, and whom it asks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.mutants.__main__ import Results, report
from benchmarks.mutants.forked import run_tests
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
from benchmarks.mutants.reach import Reach
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


def reached(folder: Path) -> Reach:
    """A core of one function with a constant, and two test files that reach it."""
    (folder / "core.py").write_text("LIMIT = 3\n\n\ndef f(x):\n    y = x\n    return y < LIMIT\n")
    (folder / "test_a.py").write_text("from core import f\n\n\ndef test_a():\n    assert f(1)\n")
    (folder / "test_b.py").write_text("def test_b():\n    assert True\n")
    return Reach(folder, folder / "known")


def test_tests_are_measured_once_and_again_when_they_or_what_they_ran_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = reached(tmp_path)
    ran: list[str] = []

    def run(command: list[str], **given: object) -> None:
        test = command[-1]
        ran.append(test)
        lines = {"core.py": {"5": ["test_a.py::test_a"]}} if test == "test_a.py" else {}
        said = {"seconds": {f"{test}::{test[:-3]}": 0.5}, "failed": [], "lines": lines}
        Path(command[command.index("--lines") + 1]).write_text(json.dumps(said))

    monkeypatch.setattr("benchmarks.mutants.reach.subprocess.run", run)
    tests, far = ["test_a.py", "test_b.py"], time.monotonic() + 100
    assert not reach.measure(tests, 9.0, time.monotonic()), "no time at all"
    assert reach.measure(tests, 9.0, far)
    assert reach.measure(tests, 9.0, far)
    assert ran == tests
    (tmp_path / "core.py").write_text("LIMIT = 4\n\n\ndef f(x):\n    y = x\n    return y < LIMIT\n")
    reach.measure(tests, 9.0, far)
    assert ran == [*tests, "test_a.py"]
    reach.load(tests)
    assert reach.tests_of("core.py", 5) == ["test_a.py::test_a"]
    assert reach.tests_of("core.py", 6) == []
    assert reach.tests_of("core.py", 1) == ["test_a.py::test_a"], (
        "the test that calls into the file"
    )
    assert reach.files_of(["test_a.py::test_a"], "core.py") == ["test_a.py"]
    both = ["test_a.py::test_a", "test_b.py::test_b"]
    assert reach.files_of(both, "a/core.py") == ["test_a.py", "test_b.py"]
    assert reach.files_of(both, "b/core.py") == ["test_b.py", "test_a.py"], "by its name"
    assert reach.within(["test_a.py::test_a", "test_b.py::test_b"], 0.6) == ["test_a.py::test_a"]


@pytest.mark.parametrize(
    ("body", "code"), [("assert True", 0), ("assert False", 1), ("while True: pass", None)]
)
def test_tests_run_in_a_fork_and_are_ended_with_it(
    tmp_path: Path, body: str, code: int | None
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "pytest.ini").write_text("[pytest]\n")
    (tree / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    ended, output = run_tests(["-q", "-p", "no:cacheprovider"], tree, 1.5 if code is None else 60.0)
    assert ended == code
    assert ("1 failed" in output, "1 passed" in output) == (code == 1, code == 0)


def test_results_are_kept_and_survivors_are_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = [Mutant("policies/core.py", "core/AddNot", n, 9 + n, 0) for n in range(3)]
    results = Results(tmp_path / "results.jsonl")
    assert all(results.wanted(m, again=False) for m in mutants)
    for mutant, outcome in zip(mutants, ("killed", "survived", "timeout"), strict=True):
        results.add(mutant, {"outcome": outcome, "change": ["- a", "+ b"]})
    again = Results(tmp_path / "results.jsonl")
    assert not any(again.wanted(m, again=False) for m in mutants)
    assert [again.wanted(m, again=True) for m in mutants] == [False, True, False]
    rows = [row for m in mutants if (row := again.of(m))]
    assert report(rows, 3) == 1
    said = capsys.readouterr().out
    assert "policies: 1 files, 3 mutants, 0 the same program, 2 of 3 noticed" in said
    assert "of the other 3, 2 (66.7%) are noticed" in said
    assert "traces" not in said
    assert report([rows[0]], 1) == 0
