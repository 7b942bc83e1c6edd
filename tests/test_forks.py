"""Parts of one answer in forked processes: the same results, errors and words as without."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from commands.common import progress
from simulator import executors
from simulator.executors import results_of
from tests.conftest import ROOT, Run
from tests.scored import write_scored
from traces.errors import DraftsimError
from traces.store.files import write_trace
from traces.store.recordings import BUNDLED, find_trace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks nowhere else")

MANY = 10**9
"""Tokens that are worth a fork."""
SHARED = object()


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, also in a worker of the tests, which has threads."""
    monkeypatch.setattr(executors, "cores", lambda: 2)
    monkeypatch.setattr(executors.threading, "active_count", lambda: 1)
    monkeypatch.setattr(executors, "parent_process", lambda: None)


def waiting(folder: Path, place: int) -> int:
    """The process of a part that ends when another one has begun."""
    (folder / str(place)).touch()
    end_s = monotonic() + 60
    while len(list(folder.iterdir())) < 2 and monotonic() < end_s:
        pass
    return os.getpid()


def with_shared(place: int) -> tuple[int, object]:
    return place, SHARED


def says(text: str) -> str:
    """`text`, said on both streams and by a warning."""
    print(text)
    print(text, file=sys.stderr)
    warnings.warn("said once", stacklevel=1)
    return text


def fails(text: str) -> str:
    raise DraftsimError(text)


@pytest.mark.usefixtures("two_cores")
def test_parts_run_at_the_same_time_in_two_processes(tmp_path: Path) -> None:
    found = results_of([partial(waiting, tmp_path, i) for i in range(2)], MANY)
    assert os.getpid() in found
    assert len(set(found)) == 2


@pytest.mark.usefixtures("two_cores")
def test_results_are_in_order_and_shared_objects_stay_themselves() -> None:
    found = results_of([partial(with_shared, i) for i in range(20)], MANY, shared=[SHARED])
    assert [i for i, _ in found] == list(range(20))
    assert all(shared is SHARED for _, shared in found)


@pytest.mark.parametrize("alone", ["one core", "little to do", "threads", "a worker", "a part"])
@pytest.mark.usefixtures("two_cores")
def test_nothing_is_forked_where_it_is_unsafe_or_a_waste(
    alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone == "one core":
        monkeypatch.setattr(executors, "cores", lambda: 1)
    elif alone == "threads":
        monkeypatch.setattr(executors.threading, "active_count", lambda: 2)
    elif alone == "a worker":
        monkeypatch.setattr(executors, "parent_process", object)
    tokens = 0 if alone == "little to do" else MANY
    parts: list[Callable[[], int]] = [os.getpid] * 4
    if alone == "a part":
        apart = results_of([lambda: [os.getpid(), *results_of(parts, MANY)]] * 2, MANY)
        assert [len(set(each)) for each in apart] == [1, 1]
        return
    assert results_of(parts, tokens) == [os.getpid()] * 4


@pytest.mark.usefixtures("two_cores")
def test_what_parts_say_comes_out_once_and_in_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(UserWarning, match="said once"):
        found = results_of([partial(says, text) for text in "abcd"], MANY)
    assert found == list("abcd")
    said = capsys.readouterr()
    assert said.out == said.err == "a\nb\nc\nd\n"


@pytest.mark.usefixtures("two_cores")
def test_the_first_error_is_raised_after_what_was_said_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts: list[Callable[[], object]] = [partial(print, "before")]
    parts += [partial(fails, text) for text in "bcd"]
    parts.append(partial(print, "after"))
    with pytest.raises(DraftsimError, match=r"^b$"):
        results_of(parts, MANY)
    assert capsys.readouterr().out == "before\n"


@pytest.mark.usefixtures("two_cores")
def test_the_parts_of_a_killed_process_are_done_again() -> None:
    own = os.getpid()

    def part() -> str:
        if os.getpid() != own:
            os._exit(1)
        return "done"

    assert results_of([part] * 6, MANY) == ["done"] * 6


@pytest.mark.parametrize("lacking", ["file", "process"])
@pytest.mark.usefixtures("two_cores")
def test_all_is_done_here_where_there_is_no_room_for_another_process(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.memfd_create

    def refused(name: str = "results") -> int:
        if name == "results":
            raise OSError(errno.EMFILE, "Too many open files")
        return create(name)

    monkeypatch.setattr(os, "memfd_create" if lacking == "file" else "fork", refused)
    assert results_of([os.getpid] * 4, MANY) == [os.getpid()] * 4


ANSWERS = {
    "simulate": ("simulate", "--by-category"),
    "papers": ("papers", "--table", "CSD", "--no-missing"),
    "tune": ("tune", "--engine", "vllm", "--batch", "1,4"),
    "sglang": ("tune", "--engine", "sglang", "--batch", "1,4", "--resamples", "4"),
}
"""Commands, with which an answer is not long in coming."""


@pytest.fixture
def few_prompts(tmp_path: Path) -> Path:
    """A run folder with some of the bundled recording's prompts, two a category."""
    trace, folder = find_trace("bundled"), tmp_path / "few"
    folder.mkdir()
    some = [i for i, r in enumerate(trace.requests) if r.id.endswith(("00", "01"))]
    write_trace(trace.select(some), folder / "trace.parquet")
    shutil.copy(BUNDLED / "bundled" / "latency.parquet", folder)
    return folder


@pytest.mark.parametrize("args", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.invariant(6)
@pytest.mark.usefixtures("two_cores")
def test_two_cores_give_the_same_answer(
    args: tuple[str, ...], few_prompts: Path, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Tables of papers need target scores, and systems of the recording the drafts of all prompts.
    trace = write_scored(tmp_path) if "papers" in args else few_prompts
    args = (*args, "--trace", str(trace))
    monkeypatch.setattr(executors, "FEWEST_TOKENS", 0)
    monkeypatch.setattr(progress, "FIRST_S", 3600.0)  # a busy machine would say how far it is
    both = run(*args, "--json", "-")
    monkeypatch.setattr(executors, "cores", lambda: 1)
    assert both == run(*args, "--json", "-")
    assert both.rows


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_part_is_one_line_said_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "FEWEST_TOKENS", 0)
    folder = tmp_path / "run"
    shutil.copytree(ROOT / "traces" / "recorded" / "bundled", folder)
    damaged = folder / "starts-medusa.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    ended = run("simulate", "--trace", folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"draftsim: {damaged}: truncated")
    assert ended.err.count("\n") == 1
