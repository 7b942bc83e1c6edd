"""Drafters on the target's features in the GPU suite: recorded, timed, run for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from profiler import smollm2
from profiler.features import Eagle, Eagle3, Mtp, layer_config, write_drafter
from profiler.recording.run import BUNDLED
from profiler.suite.__main__ import main
from profiler.suite.environment import COMPLETE, FAILED, REFUSED, open_workplace
from profiler.suite.runs import checks, trained_stage, training
from profiler.suite.runs.checks import Checks
from profiler.suite.runs.training import QUICK_PROMPTS
from simulator.hardware import check_recording
from tests.pretend_gpu import pretended
from traces.sources.starts.features import Eagle as EagleSource
from traces.store.files import read_latency, read_trace
from traces.store.measured import read_measured

PAIRS = tuple(f"{training.RANDOM}+{name}" for name in ("eagle", "eagle3"))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DRAFTSIM_CACHE", str(tmp_path / "none"))
    yield tmp_path / "out"
    place = open_workplace("cpu", tmp_path / "out", seconds=1, quick=True)
    shutil.rmtree(place.work, ignore_errors=True)


@pytest.fixture
def drafters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the stage's other work, which is tested elsewhere."""
    cells = [
        [f"{training.RANDOM}/eager/{model}", phase, 1, 1, 16, 1e-3, 0.0, 3]
        for model, phase in (("target", "forward"), ("draft", "forward"), ("draft", "catch_up"))
    ]
    monkeypatch.setattr(trained_stage, "measure_modes", lambda *_: {"latency": {}, "cells": cells})
    monkeypatch.setattr(Checks, "run", lambda *_: {"times": [], "checked": {}})
    monkeypatch.setattr(Checks, "against_assisted", lambda *_: {})
    monkeypatch.setattr(trained_stage, "sampled_rounds", lambda *_: {})
    monkeypatch.setattr(trained_stage, "record_early_exits", lambda *_: {})


def stage(out: Path, *more: str, target: str = "smollm2", device: str = "cpu") -> int:
    options = ["--quick", "--seconds", "400", "--out", str(out), "--target", target, *more]
    return main(["trained", "--device", device, *options])


def results(out: Path) -> Any:
    return json.loads((out / "trained.json").read_text())


def test_smollm2s_drafters_are_recorded_timed_and_decode_as_they_replay(out: Path) -> None:
    assert stage(out) == COMPLETE
    assert len(list(out.iterdir())) == 8  # as many as some lent machines hand back
    found = results(out)
    assert tuple(found["drafters"]) == PAIRS
    whole = read_trace(out / "trained-trace.parquet")
    runs = read_measured(out / "trained-measured.parquet").times
    table = read_latency(out / "trained-latency.parquet")
    for pair, kept in found["drafters"].items():
        trace = read_trace(out / kept["trace"])
        assert trace.by_start
        assert trace.requests == whole.requests
        assert kept["requests"] == len(whole.requests)
        # float32 on one thread: the same rounds.
        assert [n for n, _ in kept["checked"]["rounds_differ_of"].values()] == [0, 0, 0]
        own = runs[runs["pair"] == pair]
        assert set(own["policy"]) == set(checks.QUICK_ARMS)
        assert set(own["mode"]) == {"eager"}
        assert (own["wall_s"] > 0).all()
        key = EagleSource(pair.rpartition("+")[2]).key
        for model in (key, "draft"):
            assert table.has(f"{pair}/eager/{model}", "forward")
        assert table.has(f"{pair}/eager/target", "host_round")
        assert not table.has(f"{pair}/eager/draft", "catch_up")  # the draft model's
    into = out.parent / "recorded"
    assert main(["unpack", "--out", str(out), "--into", str(into)]) == 0
    for pair in PAIRS:
        [folder] = into.glob(f"*-{pair}-eager")
        assert read_trace(folder / "trace.parquet").by_start
        rows = check_recording(folder)
        assert (rows["rounds_differ"] == 0).all()
        assert np.isfinite(rows["error"]).all()


def test_drafters_run_on_a_gpu(out: Path, drafters_alone: None) -> None:
    """A pretended one, in bfloat16: nothing is left out, and every difference has a cause."""
    with pretended() as gpu:
        assert stage(out, device="cuda") == COMPLETE
    assert {*PAIRS, *(f"{pair}, runs" for pair in PAIRS)} <= set(gpu.ranges)
    found = results(out)
    assert not found["left_out"]
    for pair in PAIRS:
        kept = found["drafters"][pair]
        assert kept["requests"] == QUICK_PROMPTS
        assert "unexplained" not in kept["checked"]["causes"]
        assert all(total > 0 for _, total in kept["checked"]["rounds_differ_of"].values())


def test_a_drafter_that_fails_leaves_the_others_and_is_tried_again(
    out: Path, drafters_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checks.measure_drafters

    def broken(target: Any, some: Any, *more: Any) -> Any:
        if "eagle.eagle" in some:
            raise RuntimeError("CUDA error: misaligned address")
        return real(target, some, *more)

    monkeypatch.setattr(checks, "measure_drafters", broken)
    assert stage(out) == FAILED
    found = results(out)
    assert found["failed"] == {PAIRS[0]: "CUDA error: misaligned address"}
    assert found["drafters"][PAIRS[1]]["requests"] == QUICK_PROMPTS
    assert set(read_measured(out / "trained-measured.parquet").times["pair"]) == {PAIRS[1]}
    monkeypatch.setattr(checks, "measure_drafters", real)
    assert stage(out) == COMPLETE
    assert set(read_measured(out / "trained-measured.parquet").times["pair"]) == set(PAIRS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random drafters for the bundled target."""
    made = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    layer = layer_config(AutoConfig.from_pretrained(BUNDLED / "target"))
    write_drafter(Eagle(layer), made / "one")
    write_drafter(Eagle3(layer, range(0, 2000, 2), (2, 4, 5)), made / "deep" / "one")
    write_drafter(Mtp(layer, 2), made / "turns", layout="speculators", target="t")
    return made


def test_drafters_of_the_users_pair(
    out: Path, folder: Path, drafters_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--draft", "bundled", "--prompts", str(BUNDLED / "prompts.jsonl"))
    for names, message in (
        (("one", "deep/one"), "--drafters: two are called one: rename a folder"),
        (("turns",), "its modules run in turn, which no trace of a pair holds"),
        (("none",), "none"),
    ):
        asked = [str(folder / name) for name in names]
        assert stage(out, *own, "--drafters", *asked, target="bundled") == REFUSED
        assert message in " ".join(capsys.readouterr().err.split())
    arguments = ["trained", "--device", "cpu", "--quick", "--out", str(out)]
    assert main([*arguments, "--drafters", str(folder / "one")]) == REFUSED
    assert "name it with --target" in capsys.readouterr().err
    assert stage(out, *own, "--drafters", str(folder / "one"), target="bundled") == COMPLETE
    assert list(results(out)["drafters"]) == ["bundled+bundled+one"]


def test_the_stand_in_gets_the_projects_own_drafters(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of SmolLM2's width has the trained weights, another one random ones."""
    place = open_workplace("cpu", out, seconds=9, quick=True)
    config = LlamaConfig(**{**training.CONFIG, "num_hidden_layers": 28})
    with torch.device("meta"):
        target = LlamaForCausalLM(config)
    target.to_empty(device="cpu")
    found = checks.smollm2_drafters(place, target)
    assert tuple(found) == ("eagle", "eagle3")
    for name, drafter in found.items():
        _, weights = checks.read_stored(smollm2.STORED / f"{name}.safetensors")
        assert torch.equal(drafter.state_dict()["fc.weight"], weights["fc.weight"].float())
        assert drafter.dtype is torch.float32
