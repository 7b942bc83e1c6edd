"""The stages of the suite on a pretended GPU, and what the suite asks of a device."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.suite import MODES, forced_stage, latency_stage
from profiler.suite.__main__ import main
from profiler.suite.environment import COMPLETE, FAILED, Workplace, open_workplace
from tests.pretend_gpu import pretended
from tests.suite_results import SMALL, check_files, results
from traces.errors import DraftsimError


@pytest.mark.parametrize(
    "arguments",
    [("latency", "--pairs", SMALL, "codellama-7b"), ("forced", "--pairs", SMALL), ("trained",)],
    ids=lambda arguments: arguments[0],
)
def test_a_stage_runs_on_a_gpu(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """A pretended one: nothing is left out, and the files are those of a CPU run."""
    with pretended() as gpu:
        options = ["--device", "cuda", "--quick", "--out", str(tmp_path)]
        assert main([*arguments, *options]) == 0
    check_files(tmp_path)
    assert not gpu.masked_prompts
    found = results(tmp_path, arguments[0])
    assert found["meta"]["device"] == "Pretended GPU"
    assert found["meta"]["dtype"] == "bfloat16"
    assert found["complete"]
    assert not found["left_out"]
    for unit in found.get("units", {}).values():
        assert not unit.get("skipped")
    for mode in MODES:
        assert "unexplained" not in found.get(f"rounds_{mode}", {}).get("causes", {})


def test_a_gpu_without_bfloat16_measures_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        place = open_workplace("cuda", tmp_path, seconds=1)
        assert place.dtype is torch.float16
        with pytest.raises(DraftsimError, match="no bfloat16: use --dtype float16 or float32"):
            open_workplace("cuda", tmp_path, seconds=1, dtype="bfloat16")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_broken_driver_ends_the_stage_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Workplace, pair: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be")

    monkeypatch.setattr(Workplace, "lacks_memory", broken)
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--pairs", SMALL]
    for stage in ("latency", "forced"):
        assert main([stage, *arguments]) == FAILED
        error = capsys.readouterr().err.strip()
        assert error.endswith("illegal memory access: the same command goes on with what is left")
        found = results(tmp_path, stage)
        assert found["stopped"] == "CUDA error: an illegal memory access"
    shutil.rmtree(open_workplace("cpu", tmp_path, seconds=1, quick=True).work)


def test_models_are_out_of_the_collectors_sight_while_they_run(
    collector: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cells and in full runs alike: a collection does not walk through what was built."""
    seen: list[bool] = []

    def watched(models: Any) -> None:
        tracked = {id(one) for one in gc.get_objects()}
        seen.append(any(id(model) in tracked for model in models if model is not None))

    def cells(place: Any, pair: Any, models: Any, share: Any, units: Any, how: Any) -> None:
        watched(models)
        for mode in how:
            units.put(f"{pair.name}.{mode}", {"cells": [], "held_out": []})

    def runs(place: Any, unit: Any, models: Any, trace: Any, share: float) -> Any:
        watched(models)
        return {"rows": [], "repeats": 2, "groups": 1, "unfinished": False}

    monkeypatch.setattr(latency_stage, "_measure_pair", cells)
    monkeypatch.setattr(forced_stage, "_unit", runs)
    modes = ("--modes", "eager", "graph")
    with pretended():
        for stage, *pairs in (("latency", SMALL, "vicuna-7b+68m"), ("forced", SMALL)):
            out = str(tmp_path / stage)
            arguments = ["--device", "cuda", "--quick", "--out", out, *modes, "--pairs", *pairs]
            assert main([stage, *arguments]) == COMPLETE
    # Two pairs' cells; then one alone in two modes, and in batches.
    assert seen == [False] * (2 + 2 * 2)
    assert gc.get_freeze_count() == 0
