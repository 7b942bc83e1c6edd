"""An engine that is not vLLM, as one more folder would hold it: profiled and checked alike."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from profiler.engines import engine
from tests.conftest import Run
from tests.stand_in_engine import StandIn, use_for_commands
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.store.files import read_latency, write_trace


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine ``other`` be known, and no vLLM."""
    kind: Any = ModuleType("profiler.engines.other")
    kind.NAME, kind.start = "other", StandIn
    kind.settings, kind.check_installed = (lambda *_: {}), lambda: None
    use_for_commands(monkeypatch)
    monkeypatch.setitem(sys.modules, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "profiler.engines.vllm", None)  # importing it fails
    monkeypatch.setattr(engine, "engine_names", lambda: ["other"])


def test_another_engine_is_profiled_and_checked(other: None, run: Run, tmp_path: Path) -> None:
    trace = synthetic_trace(0.7, requests=4, tokens=16, prompt_length=12, seed=3)
    write_trace(trace, tmp_path / "trace.parquet")
    sizes = ("--engine-longest", 4, "--engine-batch", 2, "--engine-length", 512)
    folder = tmp_path / "run"
    ran = run("profile", "--engine", "other", "--target", "m", "--out", folder, *sizes).ok()
    assert read_latency(folder / "latency.parquet").meta["kind"] == "engine"
    asked = (
        "validate", "--engine", "other", "--run", folder, "--trace", tmp_path / "trace.parquet",
        "--requests", 5, "--repeats", 1, "--policy", "fixed:gamma=2", "--json", "-",
    )  # fmt: skip
    # Without --load, the default loads that the engine's batch of 2 has room for.
    assert [row["load"] for row in run(*asked).ok().rows] == ["closed:1"] * 2
    ran = run(*asked, "--load", "closed:1,2").ok()
    assert [row["policy"] for row in ran.rows] == ["autoregressive", "fixed:gamma=2"] * 2
    for row in ran.rows:
        assert row["rounds_differ"] == row["iterations_differ"] == row["texts_diverged"] == 0


def test_engines_are_the_folders() -> None:
    assert engine.engine_names() == ["vllm"]
    found = engine.find_engine("vllm")
    for name in ("check_installed", "settings", "start", "serve", "run_apart"):
        assert callable(getattr(found, name))
    with pytest.raises(DraftsimError, match="--engine is 'sglang', expected vllm"):
        engine.find_engine("sglang")
