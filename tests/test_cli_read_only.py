"""A place that may only be read is one line, from every command that writes."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL_PROFILE, Run

PAIR = ("--policy", "fixed:gamma=2", "--resamples", 10)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system that is mounted read-only, as far as Python's calls go."""
    folder = tmp_path / "read-only"
    folder.mkdir(exist_ok=True)

    def guarded(call: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def opened(path: Any, *rest: Any, **named: Any) -> Any:
            inside = isinstance(path, str | os.PathLike) and str(path).startswith(str(folder))
            if inside and writes(*rest, **named):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *rest, **named)

        return opened

    def to_write(mode: str = "r", *_: Any, **__: Any) -> bool:
        return mode[0] in "wax" or "+" in mode

    def flagged(flags: int, *_: Any, **__: Any) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    monkeypatch.setattr(os, "open", guarded(os.open, flagged))
    monkeypatch.setattr(os, "mkdir", guarded(os.mkdir, lambda *_, **__: True))
    monkeypatch.setattr(io, "open", guarded(io.open, to_write))
    monkeypatch.setattr(builtins, "open", guarded(builtins.open, to_write))
    return folder


COMMANDS: dict[str, tuple[object, ...]] = {
    "simulate out": ("simulate", *PAIR, "--out", "t.csv"),
    "simulate json": ("simulate", *PAIR, "--json", "t.json"),
    "simulate plots": ("simulate", *PAIR, "--plots", "plots"),
    "list": ("list", "rules", "--out", "t.parquet"),
    "check": ("check", "--tokens", 1000, "--out", "t.tex"),
    "serve out": ("serve", *PAIR[:2], "--batch", 1, "--requests", 4, "--out", "t.csv"),
    "serve lines": ("serve", *PAIR[:2], "--batch", 1, "--requests", 4, "--out", "t.jsonl"),
    "serve timeline": ("serve", *PAIR[:2], "--batch", 1, "--requests", 4, "--timeline", "t.json"),
    "serve plots": ("serve", *PAIR[:2], "--batch", "1,2", "--requests", 4, "--plots", "plots"),
    "sweep": ("sweep", *PAIR, "--c", "0.1", "--jobs", 1, "--out", "t.parquet"),
    "sweep csv": ("sweep", *PAIR, "--c", "0.1", "--jobs", 1, "--out", "t.csv"),
    "sweep plots": (
        "sweep",
        *PAIR,
        "--c",
        "0.1,0.2",
        "--alpha",
        "0.6,0.7",
        "--jobs",
        1,
        "--plots",
        "plots",
    ),
    "tune": ("tune", "--engine", "hf", "--resamples", 4, "--out", "t.json"),
    "report": ("report", "--no-serve", *PAIR, "--out", "t.html"),
    "calibrate-memory": ("calibrate-memory", "--out", "t.npz"),
    "profile": (*SMALL_PROFILE, "--out", "run"),
    "demo": ("demo", "--out", "run"),
}
OF_A_TRACE = {"simulate", "check", "serve", "sweep", "tune"}


@pytest.mark.invariant(15)
@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_one_line(name: str, read_only: Path, synthetic_run: Path, run: Run) -> None:
    *command, place = COMMANDS[name]
    if name in ("profile", "demo"):
        pytest.importorskip("torch")
    if command[0] in OF_A_TRACE:
        command += ["--trace", synthetic_run]
    elif command[0] == "report":
        command += ["--run", synthetic_run]
    # The option that names the place comes last of its own.
    at = len(COMMANDS[name]) - 1
    ran = run(*command[:at], read_only / str(place), *command[at:])
    assert ran.code == 2, ran.err
    last = ran.err.splitlines()[-1]
    assert last.startswith("draftsim: ")
    assert "Read-only file system" in last
    assert str(read_only) in last
    assert "Traceback" not in ran.err
    assert not list(read_only.iterdir())


@pytest.fixture
def kept(small_run: Path, tmp_path: Path) -> Path:
    """A complete run of somebody else's, on what is to become `read_only`."""
    return Path(shutil.copytree(small_run, tmp_path / "read-only" / "run"))


def test_a_run_that_may_only_be_read_is_refused_before_anything_is_decoded(
    kept: Path, read_only: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("models were loaded")

    monkeypatch.setattr("profiler.recording.run.RunInfo.load", never)
    before = sorted(read_only.rglob("*"))
    for more in ((), ("--batch", 1), ("--verify", "csd"), ("--source", "pld")):
        ran = run("validate", "--run", kept, *more)
        assert ran.code == 2
        [line] = ran.err.splitlines()
        assert line.startswith(f"draftsim: {kept}: cannot be written to (Read-only file system)")
        assert "copy it and name the copy" in line
    assert sorted(read_only.rglob("*")) == before


@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [("nowhere/t.json", "is no folder"), ("folder.json", "it is a folder"), ("t.json", "be read")],
)
def test_a_place_for_rows_is_refused_before_any_work(
    option: str, place: str, reason: str, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "folder.json").mkdir()
    # Tests may run as a user for whom nothing is read-only.
    access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p != tmp_path and access(p, mode))
    ran = run("validate", "--run", tmp_path / "no-such-run", option, tmp_path / place)
    assert ran.code == 2
    [line] = ran.err.splitlines()
    assert reason in line
    assert str(tmp_path / place) in line
