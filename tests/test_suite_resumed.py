"""The trained stage again: short recordings are extended, and every file is written again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from profiler.machine import NoTimeError
from profiler.suite import trained_stage
from profiler.suite.__main__ import main
from profiler.suite.checks import NAME, Checks
from profiler.suite.environment import COMPLETE, UNFINISHED, open_workplace
from tests.suite_results import results
from traces.store.files import read_trace

FILES = [
    "trained-latency.parquet", "trained-measured.parquet", "trained-sampled.parquet",
    "trained-trace.parquet", "trained.json",
]  # fmt: skip


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that ran, all but the recordings being stand-ins."""
    ran: list[str] = []

    def latency(*_: Any) -> dict[str, Any]:
        ran.append("latency")
        rows = [[f"{NAME}/eager/{m}", "forward", 1, 1, 0, 1e-3, 0.0, 1]
                for m in ("target", "draft")]  # fmt: skip
        return {"latency": {}, "cells": rows}

    def run(self: Checks, mode: str, *_: Any) -> dict[str, Any]:
        ran.append(mode)
        row = [NAME, mode, "svip", "exact", 1, False, 0, self.trace.requests[0].id, 1e-3, 3]
        return {"times": [row], "checked": {}}

    monkeypatch.setattr(trained_stage, "measure_modes", latency)
    monkeypatch.setattr(Checks, "run", run)
    return ran


def stage(out: Path, status: int = COMPLETE) -> dict[str, Any]:
    assert main(["trained", "--device", "cpu", "--quick", "--out", str(out)]) == status
    found: dict[str, Any] = results(out, "trained")
    return found


def test_a_short_recording_is_unfinished_and_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    real, most = trained_stage.record_trace, [3]

    def record(place: Any, pair: Any, prompts: Any, settings: Any, until: float) -> Any:
        return real(place, pair, prompts[: most[0]], settings, until)

    monkeypatch.setattr(trained_stage, "record_trace", record)
    found = stage(tmp_path, UNFINISHED)
    for name in ("greedy", "sampled"):
        assert found[name]["unfinished"]
        assert found[name]["requests"] == found[name]["recorded"] == 3
        assert f"{name}: 3 of 4 prompts, no time left" in found["left_out"]
    assert "goes on with them" in " ".join(capsys.readouterr().err.split())
    first = read_trace(tmp_path / "trained-trace.parquet")
    assert sorted(f.name for f in tmp_path.iterdir()) == FILES
    ran = list(done)
    # The folder is emptied before the same command, as on a machine that is lent by the command.
    shutil.rmtree(tmp_path)
    most[0] = 1000
    found = stage(tmp_path)
    assert not found["left_out"]
    for name in ("greedy", "sampled"):
        assert not found[name]["unfinished"]
        assert found[name]["recorded"] == 4
    assert done == ran  # nothing that was finished ran again
    assert sorted(f.name for f in tmp_path.iterdir()) == FILES
    trace = read_trace(tmp_path / "trained-trace.parquet")
    assert list(trace.requests[:3]) == list(first.requests)
    assert not open_workplace("cpu", tmp_path, seconds=1, quick=True).work.exists()


def test_a_finished_recording_keeps_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    monkeypatch.setattr(trained_stage, "ENOUGH", 2)
    real, most = trained_stage.record_trace, [3]

    def record(place: Any, pair: Any, prompts: Any, settings: Any, until: float) -> Any:
        return real(place, pair, prompts[: most[0]], settings, until)

    def late(*_: Any) -> Any:
        raise NoTimeError("no time left")

    monkeypatch.setattr(trained_stage, "record_trace", record)
    with monkeypatch.context() as patch:
        patch.setattr(trained_stage, "measure_modes", late)
        assert stage(tmp_path, UNFINISHED)["left_out"] == ["latency: no time left"]
    most[0] = 1000
    found = stage(tmp_path)
    assert found["greedy"]["recorded"] == found["sampled"]["recorded"] == 3


def test_a_recording_cut_to_its_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    monkeypatch.setattr(trained_stage, "write_within", lambda trace, path: 3)
    found = stage(tmp_path)
    assert found["left_out"][0] == "greedy: the file holds 3 of 4 prompts"
    assert not found["greedy"]["unfinished"]
    assert found["greedy"]["requests"] == 3
