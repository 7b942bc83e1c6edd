"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from commands.common import progress
from commands.common.progress import progress_bar, working
from simulator.executors import results_of
from tests.conftest import ROOT, Run
from tests.logs import row, write_rows
from traces.importers.base import Options
from traces.importers.registry import import_log

pytestmark = pytest.mark.usefixtures("short_chains")

RESULTS = ROOT / "docs" / "examples" / "server" / "results"
LEFT = r"about \d+:\d\d:\d\d left"
CLOCK = r"\d+:\d\d:\d\d"


class Lines(list[str]):
    """The lines that are printed, and a wait for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = threading.Condition()

    def append(self, line: str) -> None:
        with self.printed:
            super().append(line)
            self.printed.notify_all()

    def wait(self, count: int) -> None:
        with self.printed:
            assert self.printed.wait_for(lambda: len(self) >= count, timeout=30)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Return what is printed where there is no terminal, without waiting for it."""
    found = Lines()
    monkeypatch.setattr(progress, "_print", found.append)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(progress, "KEPT_S", 0.0)
    return found


@pytest.fixture
def clock(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list with the time, and let no line come by itself."""
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(progress, "FIRST_S", 3600.0)
    return now_s


def test_lines_come_by_themselves_however_long_a_step_takes(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    with progress_bar() as bar:
        task = bar.add_task("recording trace", total=1200, completed=200)
        lines.wait(1)
        bar.advance(task, 500)
        lines.wait(len(lines) + 2)
    assert re.fullmatch(rf"recording trace: 200 of 1,200, {CLOCK} so far", lines[0])
    assert re.fullmatch(rf"recording trace: 700 of 1,200, {LEFT}", lines[-2])
    assert re.fullmatch(rf"recording trace: 700 of 1,200, {CLOCK} in all", lines[-1])


def test_the_time_left_falls_while_a_long_part_is_under_way(
    lines: Lines, clock: list[float]
) -> None:
    with progress_bar() as bar:
        task = bar.add_task("sweeps", total=3)
        for clock[0], done in ((600.0, 1), (840.0, 1), (1200.0, 2), (1500.0, 2), (2700.0, 2)):
            bar.update(task, completed=done)
            bar._line()
        told = [line.split("about ")[1] for line in lines]
    assert told == [
        "0:20:00 left", "0:16:00 left", "0:10:00 left", "0:05:00 left", "0:00:00 left"
    ]  # fmt: skip


def test_parts_kept_from_an_earlier_run_tell_nothing_of_the_pace(
    lines: Lines, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "KEPT_S", 0.2)
    with progress_bar() as bar:
        task = bar.add_task("sweeps", total=10)
        for clock[0] in (0.05, 0.1, 0.15):
            bar.advance(task)
        clock[0] = 60.0
        bar._line()
        clock[0] = 120.0
        bar.advance(task)
        bar._line()
    assert list(lines)[:2] == [
        "sweeps: 3 of 10, 0:01:00 so far", "sweeps: 4 of 10, about 0:12:00 left"
    ]  # fmt: skip


def test_what_is_quick_is_not_told(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 3600.0)
    for alone in (False, True):
        with progress_bar(alone) as bar:
            bar.advance(bar.add_task("quick", total=2))
        with working("quick too", alone) as say:
            say("quick too", 1, 2)
    assert not lines


def test_a_bar_without_a_thread_tells_when_it_is_told(lines: Lines) -> None:
    before = threading.active_count()
    with working("first", alone=True) as say:
        assert threading.active_count() == before
        say("second", 3, 7)
        say("third\x1b]0;title\x07")
    assert re.fullmatch(rf"second: 3 of 7, {LEFT}", lines[0])
    assert lines[1].startswith("third")
    assert lines[-1].endswith("in all")


def test_lines_between_the_first_and_the_next_are_apart(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 3600.0)
    with progress_bar(alone=True) as bar:
        task = bar.add_task("many", total=100)
        for _ in range(100):
            bar.advance(task)
    assert len(lines) == 2
    assert lines[0].startswith("many: 1 of 100, ")
    assert lines[1].startswith("many: 100 of 100, ")


def test_names_do_not_reach_the_terminal_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    progress._print("replaying \x1b]0;title\x07")
    assert capsys.readouterr().err == "replaying \\x1b]0;title\\x07\n"


@pytest.mark.parametrize("alone", [False, True])
def test_a_terminal_has_a_bar_and_no_lines(
    alone: bool, lines: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    before = threading.active_count()
    with progress_bar(alone) as bar:
        assert (threading.active_count() == before) == alone
        bar.advance(bar.add_task("of [names]", total=2))
    with working("first", alone) as say:
        say("second", 1, 2)
    said = capsys.readouterr().err
    assert "of [names]" in said
    assert "1/2" in said
    assert "second" in said
    assert not lines


def test_every_command_tells_through_it() -> None:
    own = ROOT / "commands" / "common" / "progress.py"
    for path in sorted((ROOT / "commands").rglob("*.py")):
        assert ("rich.progress" in path.read_text()) == (path == own), path


def test_simulate_tells_how_far_it_is(lines: Lines, synthetic_run: Path, run: Run) -> None:
    assert run("simulate", "--trace", synthetic_run, "--resamples", 2).code == 0
    assert any(re.fullmatch(rf"replaying policies: [1-9] of \d, {LEFT}", line) for line in lines)
    assert any(line.startswith("pricing their rounds: ") for line in lines)


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("check", "--tokens", 1000), "simulating the closed forms"),
        (("papers", "measured", "--table", "MiniCPM"), "predicting public measurements"),
        (("calibrate", RESULTS), "fitting the server's costs"),
        (("recommend", "--bench", RESULTS), "comparing draft lengths"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_long_commands_tell_what_they_do(
    command: tuple[object, ...], what: str, lines: Lines, run: Run
) -> None:
    assert run(*command).code == 0
    assert any(line.startswith(what) for line in lines), lines


def test_papers_counts_the_tables(lines: Lines, synthetic_run: Path, run: Run) -> None:
    assert run("papers", "--trace", synthetic_run).code == 0
    assert any(line.startswith("comparing tables: 0 of ") for line in lines), lines


@pytest.mark.parametrize("tokens", [0, 10**9])
def test_parts_of_an_answer_are_counted(tokens: int) -> None:
    """In this process alone, and with others in parallel."""

    def square(n: int) -> Callable[[], int]:
        return lambda: n * n

    told: list[tuple[int, int]] = []
    parts = [square(n) for n in range(5)]
    assert results_of(parts, tokens, progress=lambda *now: told.append(now)) == [0, 1, 4, 9, 16]
    assert told
    assert told == sorted(told)
    assert all(0 <= done <= of == 5 for done, of in told)


def test_the_search_for_draft_lengths_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    log = write_rows(tmp_path / "log.jsonl", [row(81 + q, [3, 1, 2, 4]) for q in range(4)])
    import_log("specbench", [log], Options(progress=lambda *now: told.append(now)))
    assert {what for what, _, _ in told} == {"trying schedules of draft lengths"}
    assert [done for _, done, _ in told] == list(range(told[0][2]))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_tune_tells_how_far_it_is(engine: str, lines: Lines, run: Run) -> None:
    batch = () if engine == "llamacpp" else ("--batch", 1)
    assert run("tune", "--engine", engine, *batch, "--resamples", 4).code == 0
    what = "searching settings" if engine == "llamacpp" else "serving "
    assert any(line.startswith(what) for line in lines), lines
