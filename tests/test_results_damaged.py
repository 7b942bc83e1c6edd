"""Files of rows that were stopped, damaged, shared by two writers, or that hold something else."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import draftsim
from simulator.serving import ResultsFile, read_results
from tests.conftest import Run, Serve
from tests.forked import forked
from tests.serving import PAIR
from tests.stored import rows_of, small_trace
from traces.errors import DraftsimError, FileError
from traces.store.files import write_trace
from traces.store.writing import only_writer

LOADS = ("--batch", "1,2,3", "--requests", 6, *PAIR)
ROWS = 6


def stopped(out: Path) -> list[str]:
    """Make the finished results in `out` those of a run stopped before its end; its lines."""
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == ROWS + 2
    out.write_text("".join(lines[:-1]))
    return lines[:-1]


DAMAGE: dict[str, Callable[[str], str]] = {
    "a changed number": lambda line: line.replace('"requests": 6', '"requests": 7'),
    "cut": lambda line: line[: len(line) // 2] + "\n",
    "nested": lambda line: '{"row": ' + "[" * 100_000 + "\n",
    "long number": lambda line: '{"row": ' + "9" * 5000 + "}\n",
    "no checksum": lambda line: line[: line.rindex(', "sha256"')] + "}\n",
    "empty": lambda line: " \n",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_is_named_and_its_row_computed_again(
    name: str, serve: Serve, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    assert serve(*LOADS, "--out", out).code == 0
    expected, whole = rows_of(out), out.read_text()
    lines = stopped(out)
    hurt = DAMAGE[name](lines[3])
    assert hurt != lines[3]
    out.write_text("".join([*lines[:3], hurt, *lines[4:]]))
    with pytest.raises(FileError, match=r"r\.jsonl, line 4: damaged"):
        read_results(out)
    ran = serve(*LOADS, "--out", out).ok()
    assert f"{out}, line 4: damaged" in ran.err
    assert rows_of(out) == expected
    # The others are the rows that were there, and all are in their order.
    again = out.read_text().splitlines()
    kept = [i for i in range(len(again)) if i != 3]
    assert [again[i] for i in kept] == [whole.splitlines()[i] for i in kept]


@pytest.mark.invariant(13)
def test_whatever_is_damaged_the_answer_is_the_same(serve: Serve, tmp_path: Path) -> None:
    out, chosen = tmp_path / "r.jsonl", random.Random(7)
    assert serve(*LOADS, "--out", out).code == 0
    expected = rows_of(out)
    stopped(out)
    content = out.read_bytes()
    for _ in range(12):
        changed = bytearray(content)
        for _ in range(chosen.randint(1, 4)):
            changed[chosen.randrange(content.index(b"\n"), len(content))] ^= chosen.randint(1, 255)
        out.write_bytes(bytes(changed))
        assert serve(*LOADS, "--out", out).code == 0
        assert rows_of(out) == expected


def test_lines_doubled_or_in_another_order_are_one_answer(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    assert serve(*LOADS, "--out", out).code == 0
    expected = rows_of(out)
    header, *rows = stopped(out)
    out.write_text("".join([header, *reversed(rows[:4]), rows[2]]))
    assert serve(*LOADS, "--out", out).code == 0
    assert rows_of(out) == expected
    assert len(out.read_text().splitlines()) == ROWS + 2


@pytest.mark.parametrize("content", ["my notes\n", '{"a": 1}\n', "\n\n", '{"schema": 1, "comm'])
@pytest.mark.parametrize("lines", ["r.jsonl", "r.csv.jsonl"])
def test_a_file_that_holds_something_else_is_kept(
    content: str, lines: str, serve: Serve, tmp_path: Path
) -> None:
    out = tmp_path / lines.replace(".csv.jsonl", ".csv")
    (tmp_path / lines).write_text(content)
    ran = serve(*LOADS, "--out", out)
    assert f"{tmp_path / lines} holds something else" in ran.refusal
    assert (tmp_path / lines).read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == [lines]


def test_a_timeline_is_drawn_though_its_row_is_kept(serve: Serve, tmp_path: Path) -> None:
    out, drawn = tmp_path / "r.jsonl", tmp_path / "t.json"
    assert serve(*LOADS, "--out", out, "--timeline", drawn).code == 0
    expected, whole = rows_of(out), drawn.read_bytes()
    stopped(out)
    drawn.unlink()
    assert serve(*LOADS, "--out", out, "--timeline", drawn).code == 0
    assert drawn.read_bytes() == whole
    assert rows_of(out) == expected


def test_results_of_another_command_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with ResultsFile(path, command="capacity") as file:
        file.add({"a": 1})
    with pytest.raises(FileError, match="something else than results of `draftsim serve`"):
        ResultsFile(path).__enter__()
    assert read_results(path).rows == [{"a": 1}]


def test_rows_of_other_options_are_written_over_with_a_word(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    assert serve(*LOADS, "--out", out).code == 0
    stopped(out)
    ran = serve(*LOADS, "--seed", 1, "--out", out).ok()
    assert f"{out} held {ROWS} finished row(s) of a stopped run with other options or of" in ran.err


RECORDED = {
    "report": ("report", "--no-serve", "--out"),
    "sweep": ("sweep", "--c", "0.1", "--out"),
    "tune": ("tune", "--engine", "hf", "--out"),
    "rows": ("simulate", "--out"),
    "json": ("simulate", "--json"),
    "serve": ("serve", "--out"),
    "timeline": ("serve", "--timeline"),
    "memory": ("calibrate-memory", "--out"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_no_recording_is_written_over(name: str, trace_file: Path, run: Run) -> None:
    before = trace_file.read_bytes()
    ran = run(*RECORDED[name], trace_file)
    assert f"{trace_file}: holds" in ran.refusal
    assert trace_file.read_bytes() == before


def test_a_recording_is_not_written_over_one_of_another_kind(synthetic_run: Path) -> None:
    place = synthetic_run / "latency.parquet"
    before = place.read_bytes()
    with pytest.raises(FileError, match=r"latency\.parquet: holds a latency table: name another"):
        write_trace(small_trace(), place)
    assert place.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "name"),
    [(RECORDED["report"], "page.html"), (RECORDED["tune"], "s.json"), (RECORDED["json"], "r.json"),
     (RECORDED["rows"], "r.tex"), (RECORDED["sweep"], "s.parquet")],
)  # fmt: skip
def test_a_text_of_ones_own_is_kept(
    command: tuple[object, ...], name: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / name).write_text("class Mine: ...\n")
    ran = run(*command, tmp_path / name)
    assert "holds something else than this command writes" in ran.refusal
    assert (tmp_path / name).read_text() == "class Mine: ...\n"


def second(*command: object) -> tuple[int, str]:
    """How a command ends in another process, and what it says there."""
    said = Path(str(command[-1])).parent / "said"

    def work() -> None:
        sys.argv = ["draftsim", *map(str, command)]
        draftsim.main()

    with forked(work, said) as process:
        pass
    text = said.read_text()
    said.unlink()
    return process.exitcode or 0, text


WRITERS = {
    "serve": ("serve", *LOADS, "--out", "r.jsonl"),
    "serve table": ("serve", *LOADS, "--out", "r.csv"),
    "sweep": ("sweep", "--c", "0.1", "--policy", "fixed:gamma=2", "--jobs", 1, "--resamples", 2,
              "--out", "r.parquet"),
    "capacity": ("capacity", "--slo", "tpot=1", "--rate", 1, "--requests", 4, "--replications", 1,
                 "--policy", "fixed:gamma=2", "--jobs", 1, "--out", "r.csv"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_second_writer_of_results_is_told_who_writes(
    name: str, synthetic_run: Path, tmp_path: Path
) -> None:
    *command, file = WRITERS[name]
    command += ["--trace", synthetic_run, "--out", tmp_path / str(file)]
    command.remove("--out")
    with only_writer(tmp_path / str(file)):
        code, said = second(*command)
        assert code == 2, said
        assert f"{tmp_path / str(file)} is being written by process {os.getpid()} on " in said
    code, said = second(*command)
    assert code == 0, said
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_two_links_to_one_file_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("rows")
    with (
        ResultsFile(tmp_path / "rows"),
        pytest.raises(DraftsimError, match="is being written"),
        ResultsFile(tmp_path / "link"),
    ):
        pass
    with ResultsFile(tmp_path / "link") as file:
        file.add({"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "rows").read_text().splitlines()[1])["row"] == {"a": 1}
