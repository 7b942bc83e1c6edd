"""Remarks on standard error: wrapped to the terminal, commands to copy on one line."""

from __future__ import annotations

from contextlib import suppress

import pytest

from commands.common import output
from commands.common.output import answering, emit, note, remark, waiting_remarks, wrapped
from commands.common.printed import print_table
from traces.errors import DraftsimError

WORDS = "predicted from `draftsim profile --engine vllm --batch 1,2,4,8` of this machine " * 4


def test_remarks_take_a_hundred_columns_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WIDEST", 100)
    note(WORDS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 100
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(WORDS.split())


def test_a_command_to_copy_is_not_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WIDEST", 40)
    note(WORDS, whole=True)
    assert capsys.readouterr().err.count("\n") == 1
    assert all(line.count("`") % 2 == 0 for line in wrapped(WORDS, 40).splitlines())


def test_an_indented_remark_stays_indented() -> None:
    lines = wrapped("  " + WORDS, 60).splitlines()
    assert lines[0].startswith("  predicted")
    assert all(line.startswith("    ") for line in lines[1:])


def test_remarks_wait_for_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with answering():
        remark("how")
        note("answer")
        emit("command", [{"K": 1}], None)
        note("file")
        remark("late")
    remark("outside")
    assert capsys.readouterr().err.split() == ["answer", "how", "file", "late", "outside"]
    with suppress(DraftsimError), answering():
        remark("kept")
        raise DraftsimError("refused")
    assert capsys.readouterr().err.split() == ["kept"]


def test_a_page_has_whole_remarks_without_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with answering():
        remark("approximate")
        remark("  by a model")
        remark("optimistic: `draftsim calibrate` fits a server")
        assert waiting_remarks() == ["approximate; by a model", "optimistic"]
    assert "`draftsim calibrate`" in capsys.readouterr().err


def test_what_is_the_same_in_every_row_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"policy": p, "pair": "a + b", "K": k, "forced": True} for p, k in (("x", 1), ("y", 3))]
    print_table(rows)
    table, said = capsys.readouterr().out.split("the same in every row: ")
    assert said.strip() == "pair a + b; forced yes"
    assert "pair" not in table
    # What is asked for stays.
    print_table([{**row, "deploy": "on"} for row in rows])
    assert capsys.readouterr().out.count(" on") == 2
    print_table(rows[:1])
    alone = capsys.readouterr().out
    assert "pair" in alone
    assert "every row" not in alone


def test_the_figures_of_a_column_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"c": c, "context": n, "ms": n / 1} for c, n in ((0.05, 128), (0.1, 16384))])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["0.0500", "128", "128"], ["0.100", "16,384", "16,384"],
    ]  # fmt: skip


def test_figures_in_words_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "study": "a study of a model on a GPU with a name", "given": f"the others of row {i}",
            **{f"in interval {j}": f"{i}{j}6 of 1{i}8" for j in range(8)},
        }
        for i in range(2)
    ]  # fmt: skip
    print_table(rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert all(f"{i}{j}6 of 1{i}8" in out for i in range(2) for j in range(8))
