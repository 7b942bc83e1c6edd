"""``profile --run-code``: outputs' code is run when asked for, kept, and shown with the speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler.checks import sandbox
from profiler.prompts import CodeTask, read_prompts
from profiler.recording.run import BUNDLED
from tests import bundled
from tests.conftest import Run
from tests.logs import write_rows
from traces.errors import DraftsimError
from traces.store.outputs import Output, find_runs, quality_of_code, read_run, write_outputs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

RULE = ("--verify", "lossy-global:tau=0.01", "--policy", "fixed:gamma=4")
RIGHT, WRONG = "```python\ndef f():\n    return 1\n```", "```python\ndef f():\n    return 2\n```"
CODE = {"entry": "f", "unit_tests": "assert f() == 1"}
TESTS = {"entry": "f", "solution": "def f(): return 1", "mutant": "def f(): return 2"}


def test_prompts_say_how_their_code_is_judged(tmp_path: Path) -> None:
    rows = [{"prompt": "a", **CODE}, {"prompt": "b", **TESTS}, {"prompt": "c", "solution": "x"}]
    found = read_prompts(write_rows(tmp_path / "p.jsonl", rows))
    assert [p.code for p in found] == [CodeTask(**CODE), CodeTask(**TESTS), None]


@pytest.mark.parametrize("wrong", [{"unit_tests": "x"}, {**CODE, "unit_tests": ["assert f()"]}])
def test_tests_of_another_type_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", **wrong}])
    with pytest.raises(DraftsimError, match=r"p\.jsonl line 2: '\w+' must be a text"):
        read_prompts(path)


def test_code_is_run_when_asked_for_and_shown(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [json.loads(line) for line in (BUNDLED / "prompts.jsonl").read_text().splitlines()]
    rows = [{**row, **more} for row, more in zip(every, (CODE, TESTS, {}), strict=False)]
    prompts, folder = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "run"
    options = (
        "profile", *bundled.named(), "--prompts", prompts, "--out", folder, "--max-new-tokens", 8,
        "--max-gamma", 4, "--repeats", 3,
    )  # fmt: skip
    asked: list[str] = []
    judge = sandbox.judge_code

    def counted(task: CodeTask, text: str) -> sandbox.CodeVerdict:
        asked.append(text)
        return judge(task, text)

    monkeypatch.setattr("commands.profile.recording.judge_code", counted)
    assert run(*options, *RULE).code == 0
    [file] = find_runs(folder)
    recorded = read_run(file)
    assert asked == []
    assert {(o.passed, o.greedy_passed) for o in recorded.outputs} == {(None, None)}
    rounds = ("simulate", "rounds", folder, "--resamples", 5)
    assert "/greedy" not in run(*rounds).out

    texts = [(WRONG, RIGHT), ("assert f() == 1</s>", RIGHT), (RIGHT, RIGHT)]
    outputs = [
        replace(output, text=own, reference=greedy)
        for output, (own, greedy) in zip(recorded.outputs, texts, strict=True)
    ]
    write_outputs(replace(recorded, outputs=outputs), file)
    ran = run(*options, *RULE, "--run-code").ok()
    said = ran.said
    assert "is finished and kept:" in said
    assert "code passes for 1 of 2 prompts (greedy 1)" in said
    scored = [(o.passed, o.greedy_passed) for o in read_run(file).outputs]
    assert scored == [(False, True), (True, False), (None, None)]
    assert len(asked) == 4
    # Without a rule the folder's own outputs are run again, and nothing is decoded or recorded.
    ran = run(*options, "--run-code").ok()
    assert [(o.passed, o.greedy_passed) for o in read_run(file).outputs] == scored

    plain, row = run(*rounds, "--json", "-").rows
    assert (row["tested"], row["passed"], row["passed_greedy"]) == (2, 1, 1)
    assert plain["tested"] is None
    printed = run(*rounds).out
    assert "50/50" in printed
    assert "/greedy" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_there_must_be_outputs_and_tests(run: Run, tmp_path: Path) -> None:
    row = {"prompt": "The cat"}
    bare = write_rows(tmp_path / "bare.jsonl", [row])
    tested = write_rows(tmp_path / "tested.jsonl", [{**row, **CODE}])
    options = ("profile", *bundled.named(), "--out", tmp_path / "run", "--run-code")
    ran = run(*options, "--prompts", tested)
    assert ran.code == 2
    assert "has no outputs decoded under a rule" in ran.said
    ran = run(*options, "--prompts", bare, *RULE)
    assert (ran.code, "bare.jsonl has tests: give unit_tests" in ran.err) == (2, True)
    assert not (tmp_path / "run").exists()


def test_the_score_in_words_has_both() -> None:
    def output(passed: bool | None) -> Output:
        return Output("1", [1], "", "", 0.0, passed=passed, greedy_passed=passed)

    assert quality_of_code([output(True), output(False), output(None)]) == (2, 1, 1)
