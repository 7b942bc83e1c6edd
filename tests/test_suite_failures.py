"""A failure in a stage is said, kept as unfinished, and never costs what was measured."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from profiler.suite import MODES, forced_stage, latency_stage, trained_stage
from profiler.suite import pair as pair_latency
from profiler.suite.__main__ import main
from profiler.suite.environment import COMPLETE, FAILED, REFUSED, UNFINISHED, Workplace
from profiler.suite.trained_stage import QUICK_PROMPTS
from tests.pretend_gpu import pretended
from tests.suite_results import OTHER, SMALL, results
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace

PROMPTS = Path(__file__).parents[1] / "profiler" / "bundled" / "prompts.jsonl"
TWO = ("--pairs", SMALL, "--modes", "eager", "graph")
"""A pair in one mode that captures graphs, and in one that does not."""


def stage(name: str, out: Path, *more: str, device: str = "cpu") -> int:
    return main([name, "--device", device, "--quick", "--out", str(out), *more])


def models(out: Path) -> set[str]:
    return {m.rpartition("/")[0] for m in read_latency(out / "latency.parquet").cells["model"]}


def test_a_capture_that_fails_is_loud_and_measured_again(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it counts as done, and eager passes are kept."""
    with pretended() as gpu:
        gpu.breaks_captures = True
        assert stage("latency", out, *TWO, device="cuda") == FAILED
        said = " ".join(capsys.readouterr().err.split())
        assert f"FAILED {SMALL}.graph, passes at batch 1: CUDA error: operation failed" in said
        found = results(out, "latency")
        assert not found["complete"]
        assert set(found["units"][f"{SMALL}.graph"]["failed"]) >= {"passes at batch 1"}
        assert not found["units"][f"{SMALL}.eager"]["failed"]
        assert models(out) == {f"{SMALL}/eager"}
        gpu.breaks_captures = False
        assert stage("latency", out, *TWO, device="cuda") == COMPLETE
    assert results(out, "latency")["complete"]
    assert models(out) == {f"{SMALL}/eager", f"{SMALL}/graph"}


def test_forced_runs_that_fail_leave_those_that_do_not(out: Path) -> None:
    with pretended() as gpu:
        gpu.breaks_captures = True
        assert stage("forced", out, *TWO, device="cuda") == FAILED
        found = results(out, "forced")
        assert set(found["failed"]) == {f"{SMALL}.graph.{batch}" for batch in (1, 4)}
        runs = read_measured(out / "forced-measured.parquet").times
        assert set(runs["mode"]) == {"eager"}
        gpu.breaks_captures = False
        assert stage("forced", out, *TWO, device="cuda") == COMPLETE
    runs = read_measured(out / "forced-measured.parquet").times
    assert set(runs["mode"]) == {"eager", "graph"}


def test_a_piece_that_fails_is_undone_and_tried_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair_latency.host_beyond

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address\nmore")

    options = ("--pairs", SMALL, "--modes", "eager")
    monkeypatch.setattr(pair_latency, "host_beyond", broken)
    assert stage("latency", out, *options) == FAILED
    unit = results(out, "latency")["units"][f"{SMALL}.eager"]
    assert unit["failed"] == {
        f"the host at batch {n}": "CUDA error: misaligned address" for n in (1, 4)
    }
    assert set(unit["failed"]) <= set(unit["unfinished"])
    assert "the host at batch 1: failed: CUDA error: misaligned address" in unit["skipped"]
    monkeypatch.setattr(pair_latency, "host_beyond", real)
    assert stage("latency", out, *options) == COMPLETE
    cells = read_latency(out / "latency.parquet").cells
    assert not cells.duplicated(["model", "phase", "batch", "new_tokens", "context"]).any()
    assert "host_round" in set(cells["phase"])


def test_a_stage_told_to_end_leaves_what_it_has(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = pair_latency.host_beyond

    def told(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(pair_latency, "host_beyond", told)
    before = signal.getsignal(signal.SIGTERM)
    assert stage("latency", out, "--pairs", SMALL) == FAILED
    assert signal.getsignal(signal.SIGTERM) is before
    assert "error: stopped by SIGTERM: the same command goes on" in capsys.readouterr().err
    assert results(out, "latency")["stopped"] == "stopped by SIGTERM"
    assert not read_latency(out / "latency.parquet").cells.empty


def test_a_part_that_fails_leaves_the_trained_stage_the_others(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = trained_stage.record_trace

    def half(place: Workplace, pair: Any, prompts: Any, settings: Any, until: float) -> Any:
        if settings.sampling.greedy:
            raise RuntimeError("no room\nat all")
        return real(place, pair, prompts, settings, until)

    monkeypatch.setattr(trained_stage, "record_trace", half)
    options = ("--seconds", "200")
    assert stage("trained", out, *options) == FAILED
    found = results(out, "trained")
    needs = "the recording that it needs failed"
    assert found["failed"] == {"greedy": "no room", "graph": needs, "eager": needs}
    assert "FAILED greedy: no room" in capsys.readouterr().err
    assert found["sampled"]
    assert found["latency"]
    monkeypatch.undo()
    assert stage("trained", out, *options) == COMPLETE
    found = results(out, "trained")
    assert not found["failed"]
    assert found["rounds_graph"]
    assert found["rounds_eager"]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that are measured at once."""

    def latency(place: Any, pair: Any, models: Any, share: Any, units: Any, how: list[str]) -> None:
        for mode in how:
            cells = [["target", "forward", 1, 1, 16, 1e-3, 0.0, 3]]
            units.put(f"{pair.name}.{mode}", {"cells": cells, "held_out": []})

    def forced(place: Any, unit: Any, models: Any, trace: Any, share: float) -> Any:
        request = trace.requests[0].id
        row = [unit.pair.name, unit.mode, "svip", "exact", unit.batch, True, 0, request, 1e-3, 3]
        return {"rows": [row], "repeats": 2, "groups": 1, "unfinished": False}

    monkeypatch.setattr(latency_stage, "_measure_pair", latency)
    monkeypatch.setattr(forced_stage, "_unit", forced)


def test_a_pair_without_a_draft_is_named_where_it_is_left_out(stand_ins: None, out: Path) -> None:
    pairs = ("--pairs", SMALL, "codellama-7b", "--modes", "eager")
    assert stage("forced", out, *pairs) == COMPLETE
    assert stage("latency", out, "--pairs", *pairs[2:], "--profile") == COMPLETE
    for name in ("forced", "latency"):
        [why] = results(out, name)["left_out"]
        assert why.startswith("codellama-7b has no draft model")


def test_other_pairs_join_those_of_the_folder(stand_ins: None, out: Path) -> None:
    for name in ("latency", "forced"):
        assert stage(name, out, "--pairs", SMALL, "--modes", "eager") == COMPLETE
        assert stage(name, out, "--pairs", OTHER) == COMPLETE
        assert stage(name, out, "--pairs", OTHER, "--modes", "eager") == COMPLETE
        units = {unit.rsplit(".1", 1)[0] for unit in results(out, name)["units"]
                 if not unit.endswith(".4")}  # fmt: skip
        assert units == {f"{SMALL}.eager", *(f"{OTHER}.{mode}" for mode in MODES)}
    assert models(out) == {f"{SMALL}/eager", *(f"{OTHER}/{mode}" for mode in MODES)}
    runs = read_measured(out / "forced-measured.parquet").times
    assert len(runs) == 8
    assert set(runs["pair"]) == {SMALL, OTHER}


@pytest.mark.parametrize("name", ["latency", "forced"])
def test_results_stay_until_new_ones_replace_them(
    name: str, stand_ins: None, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, measure = {
        "latency": (latency_stage, "_measure_pair"), "forced": (forced_stage, "_unit")
    }[name]  # fmt: skip
    unit = {"cells": [], "rows": [], "repeats": 0, "groups": 0, "unfinished": ["all"]}

    def late(*some: Any) -> Any:
        if name == "latency":
            some[4].put(f"{SMALL}.eager", unit)
        return unit

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    def held() -> Any:
        [table] = out.glob("*latency.parquet" if name == "latency" else "*measured.parquet")
        return results(out, name)["units"], table.read_bytes()

    pair = ("--pairs", SMALL, "--modes", "eager")
    assert stage(name, out, *pair) == COMPLETE
    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(module, measure, late)
        assert stage(name, out, *pair) == UNFINISHED
        assert held() == before
        patch.setattr(module, measure, stopped)
        with pytest.raises(KeyboardInterrupt):
            stage(name, out, *pair)
        assert held() == before
    assert stage(name, out, *pair) == COMPLETE


def test_a_folder_is_of_one_device(
    stand_ins: None, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage("latency", out, "--pairs", SMALL) == COMPLETE
    options = ("--dtype", "bfloat16")
    assert stage("latency", out, "--pairs", OTHER, *options) == REFUSED
    assert "measured with another dtype: one --out holds one" in capsys.readouterr().err
    # Where nothing of it would stay, it is measured again.
    assert stage("latency", out, "--pairs", SMALL, *options) == COMPLETE


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_of_some_rounds_are_kept(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cells(place: Any, pair: Any, models: Any, share: Any, units: Any, how: Any) -> None:
        for mode in how:
            units.put(f"{pair.name}.{mode}", {"cells": [], "held_out": []})

    monkeypatch.setattr(latency_stage, "_measure_pair", cells)
    with pretended():
        assert stage("latency", tmp_path, "--pairs", SMALL, "--profile", device=device) == 0
    for mode in MODES:
        document = json.loads((tmp_path / f"profile-{SMALL}-{mode}.json").read_text())
        names = {event.get("name") for event in document["traceEvents"]}
        assert {"rounds", "target, 5 wide", "draft, 1 wide"} <= names


def test_a_pair_of_the_users_is_recorded(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work after the recordings is the trained pair's, and tested with it."""
    pair = ("--target", "bundled", "--draft", "bundled")
    assert stage("trained", out, *pair) == REFUSED
    assert "--target also takes --draft and --prompts" in capsys.readouterr().err
    monkeypatch.setattr(trained_stage._Stage, "part", lambda *_, **__: {})
    prompts = str(PROMPTS)
    assert stage("trained", out, *pair, "--prompts", prompts, "--seconds", "900") == COMPLETE
    trace = read_trace(out / "trained-trace.parquet")
    assert len(trace.requests) == QUICK_PROMPTS
    assert read_trace(out / "trained-sampled.parquet").temperature == 1.0
    assert results(out, "trained")["greedy"]["requests"] == QUICK_PROMPTS


def test_smollm2_that_was_not_fetched_is_refused_with_the_remedy(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSIM_CACHE", str(out / "none"))
    assert stage("trained", out, "--target", "smollm2") == REFUSED
    error = capsys.readouterr().err.strip()
    assert error.endswith("bring it with `draftsim fetch smollm2`")
    assert "\n" not in error
