"""Drafters on the target's features in the GPU suite: recorded, timed, run for real."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from profiler.features.checkpoint import write_drafter
from profiler.features.drafters import Eagle3, EagleDrafter, Mtp, layer_config
from profiler.recording.run import BUNDLED
from profiler.suite import checks, trained_stage
from profiler.suite.__main__ import main
from profiler.suite.checks import QUICK_POLICIES, Checks
from profiler.suite.environment import COMPLETE, FAILED, REFUSED
from profiler.suite.trained_stage import QUICK_PROMPTS
from simulator.validation import check_recording
from tests.pretend_gpu import pretended
from tests.suite_results import results
from traces.sources.starts.parallel import Eagle as EagleSource
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace

BASE = "bundled+bundled"
PAIRS = (f"{BASE}+one", f"{BASE}+deep")
PROMPTS = BUNDLED / "prompts.jsonl"
OWN = ("--draft", "bundled", "--prompts", str(PROMPTS))


@pytest.fixture
def drafters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the stage's other work, which is tested elsewhere."""
    cells = [
        [f"{BASE}/eager/{model}", phase, 1, 1, 16, 1e-3, 0.0, 3]
        for model, phase in (("target", "forward"), ("draft", "forward"), ("draft", "catch_up"))
    ]
    monkeypatch.setattr(trained_stage, "measure_modes", lambda *_: {"latency": {}, "cells": cells})
    monkeypatch.setattr(Checks, "run", lambda *_: {"times": [], "checked": {}})


def stage(out: Path, *drafters: Path, device: str = "cpu") -> int:
    options = ["--quick", "--seconds", "400", "--out", str(out), "--target", "bundled", *OWN]
    given = ["--drafters", *map(str, drafters)] if drafters else []
    return main(["trained", "--device", device, *options, *given])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random drafters for the bundled target."""
    made = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    layer = layer_config(AutoConfig.from_pretrained(BUNDLED / "target"))
    write_drafter(EagleDrafter(layer), made / "one")
    deep = Eagle3(layer, range(0, 2000, 2), (2, 4, 5))
    for name in ("deep", "other/one"):
        write_drafter(deep, made / name)
    write_drafter(Mtp(layer, 2), made / "turns", layout="speculators", target="t")
    return made


def test_drafters_are_recorded_timed_and_decode_as_they_replay(out: Path, folder: Path) -> None:
    assert stage(out, folder / "one", folder / "deep") == COMPLETE
    assert len(list(out.iterdir())) <= 8  # as many as some lent machines hand back
    found = results(out, "trained")
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
        assert set(own["policy"]) == set(QUICK_POLICIES)
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
        [where] = into.glob(f"*-{pair}-eager")
        assert read_trace(where / "trace.parquet").by_start
        rows = check_recording(where)
        assert (rows["rounds_differ"] == 0).all()
        assert np.isfinite(rows["error"]).all()


def test_drafters_run_on_a_gpu(out: Path, folder: Path, drafters_alone: None) -> None:
    """A pretended one, in bfloat16: nothing is left out, and every difference has a cause."""
    with pretended():
        assert stage(out, folder / "one", folder / "deep", device="cuda") == COMPLETE
    found = results(out, "trained")
    assert not found["left_out"]
    for pair in PAIRS:
        kept = found["drafters"][pair]
        assert kept["requests"] == QUICK_PROMPTS
        assert "unexplained" not in kept["checked"]["causes"]
        assert all(total > 0 for _, total in kept["checked"]["rounds_differ_of"].values())


def test_a_drafter_that_fails_leaves_the_others_and_is_tried_again(
    out: Path, folder: Path, drafters_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checks.measure_drafters

    def broken(target: Any, some: Any, *more: Any) -> Any:
        if "eagle.one" in some:
            raise RuntimeError("CUDA error: misaligned address")
        return real(target, some, *more)

    monkeypatch.setattr(checks, "measure_drafters", broken)
    assert stage(out, folder / "one", folder / "deep") == FAILED
    found = results(out, "trained")
    assert found["failed"] == {PAIRS[0]: "CUDA error: misaligned address"}
    assert found["drafters"][PAIRS[1]]["requests"] == QUICK_PROMPTS
    assert set(read_measured(out / "trained-measured.parquet").times["pair"]) == {PAIRS[1]}
    monkeypatch.setattr(checks, "measure_drafters", real)
    assert stage(out, folder / "one", folder / "deep") == COMPLETE
    assert set(read_measured(out / "trained-measured.parquet").times["pair"]) == set(PAIRS)


def test_a_stopped_run_with_other_models_or_prompts_is_not_taken_over(
    out: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    # Other weights, and other prompts under the same ids.
    other = AutoModelForCausalLM.from_pretrained(BUNDLED / "draft")
    with torch.no_grad():
        other.get_output_embeddings().weight[:] *= 2
    draft = out.parent / "other" / "bundled"
    shutil.copytree(BUNDLED / "draft", draft)
    other.save_pretrained(draft)
    texts = out.parent / "prompts.jsonl"
    texts.write_text(PROMPTS.read_text().replace("return", "yield"))

    same = ["trained", "--device", "cpu", "--quick", "--out", str(out), "--target", "bundled"]
    first = [*same, *OWN, "--drafters", str(folder / "one")]
    monkeypatch.setattr(trained_stage._Stage, "run", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            main(first)
    for options in (
        ["--drafters", str(folder / "other" / "one")], ["--draft", str(draft)],
        ["--prompts", str(texts)],
    ):  # fmt: skip
        assert main([*first, *options]) == REFUSED
        assert "holds a stopped run with other settings" in capsys.readouterr().err


def test_drafters_that_cannot_be_used_are_refused(
    out: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for names, message in (
        (("one", "other/one"), "--drafters: two are called one: rename a folder"),
        (("turns",), "its modules run in turn, which no trace of a pair holds"),
        (("none",), "none"),
    ):
        assert stage(out, *(folder / name for name in names)) == REFUSED
        assert message in " ".join(capsys.readouterr().err.split())
    arguments = ["trained", "--device", "cpu", "--quick", "--out", str(out)]
    assert main([*arguments, "--drafters", str(folder / "one")]) == REFUSED
    assert "name it with --target" in capsys.readouterr().err
