"""Points that a device's memory or a model's context forbids are named; the rest is measured."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.models.architectures import PAIRS, DecoderShape
from profiler.suite import forced_stage, latency_stage
from profiler.suite import pair as pair_latency
from profiler.suite.__main__ import main
from profiler.suite.environment import Units, Workplace, open_workplace
from profiler.suite.pair import FULL, QUICK, PairMeasurement
from tests.suite_results import SMALL
from traces.errors import DraftsimError


def test_what_memory_or_the_model_forbids_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workplace, "free_bytes", lambda self: 40 << 10)
    assert main(
        ["latency", "--device", "cpu", "--quick", "--out", str(tmp_path), "--pairs", SMALL]
    ) == 2  # fmt: skip
    place = open_workplace("cpu", tmp_path, seconds=9, quick=True)
    why = place.lacks_memory(PAIRS["qwen2.5-32b+0.5b"])
    assert why is not None
    assert "GiB for its weights" in why
    assert "no pair of the suite fits: free the device's memory" in why
    monkeypatch.setattr(Workplace, "free_bytes", lambda self: 40 << 30)
    why = place.lacks_memory(PAIRS["qwen2.5-32b+0.5b"])
    assert why is not None
    assert "--pairs vicuna-7b+68m fits" in why
    pair = PAIRS["vicuna-7b+68m"]
    monkeypatch.setattr(Workplace, "free_bytes", lambda self: 4 << 30)
    measured = PairMeasurement(place, pair, "eager", (None, None), FULL, 0.0)
    assert measured._contexts(1) == [128, 1024, 2023]
    assert measured._contexts(4) == [128]
    assert "batch 1, context 4096: the model's context is 2048" in measured.limits
    assert "batch 4, context 1024: the memory does not hold its cache" in measured.limits
    with pytest.raises(DraftsimError, match="no context of"):
        measured._contexts(64)


def test_running_out_of_memory_ends_a_piece_not_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_workplace("cpu", tmp_path, seconds=60, quick=True)
    pair = PAIRS[SMALL].miniature()
    models = latency_stage.build_pair(place, pair)
    measured = PairMeasurement(place, pair, "eager", models, QUICK, float("inf"))

    real = pair_latency.host_beyond

    def full(*args: Any, batch: int, **kwargs: Any) -> Any:
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, batch=batch, **kwargs)

    monkeypatch.setattr(pair_latency, "host_beyond", full)
    measured.run()
    assert measured.limits == ["the host at batch 4: out of memory"]
    assert not measured.unfinished
    assert any(row[1] == "host_round" for row in measured.cells)


def test_a_pair_that_does_not_fit_is_freed_and_a_smaller_one_named(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    real = DecoderShape.build

    def build(self: DecoderShape, device: Any, dtype: Any) -> Any:
        if built:
            raise torch.OutOfMemoryError("CUDA out of memory")
        model = real(self, device, dtype)
        built.append(weakref.ref(model))
        return model

    def release(self: Workplace) -> None:
        gc.collect()
        freed.append(built[0]() is None)

    freed: list[bool] = []
    monkeypatch.setattr(DecoderShape, "build", build)
    monkeypatch.setattr(Workplace, "release", release)
    units = Units(place, "latency")
    assert latency_stage.build_or_none(units, PAIRS[SMALL].miniature()) is None
    assert freed == [True]  # before memory is handed back, not after
    assert units.notes == [f"{SMALL}: out of memory while it was built; --pairs {SMALL} fits"]
    for run in (latency_stage.run_latency, forced_stage.run_forced):
        built[:] = [lambda: None]
        with pytest.raises(DraftsimError, match=r"nothing was .*: .*out of memory while it was"):
            run(place, [SMALL])
