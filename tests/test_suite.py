"""The GPU suite in miniature on the CPU: every stage, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from profiler.latency.table import FIRST_WIDTHS
from profiler.suite import COMPILED, MODES
from profiler.suite.__main__ import main
from profiler.suite.pair import error_summary
from simulator.hardware.scaling import table_shapes
from simulator.validation import check_recording
from tests.suite_results import SMALL, results, suite
from traces.latency.interpolate import MEASURED
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two stages of one pair, side by side."""
    out = tmp_path_factory.mktemp("suite")
    suite("latency", "--pairs", SMALL, out=out / "latency")
    suite("forced", "--pairs", SMALL, out=out / "forced")
    return out


def files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_latency_stage_leaves_one_table_of_both_modes(measured: Path) -> None:
    assert files(measured / "latency") == ["latency.json", "latency.parquet"]
    table = read_latency(measured / "latency" / "latency.parquet")
    for mode in MODES:
        for model in ("target", "draft"):
            name = f"{SMALL}/{mode}/{model}"
            alone = {"layer", "head"} if mode != COMPILED else set()  # which compiles no single one
            assert {"forward", "prefill", *alone} <= {
                phase for m, phase in table._grids if m == name
            }
        for phase in ("host_round", "host_draft"):
            cells = table.cells[
                (table.cells["model"] == f"{SMALL}/{mode}/target") & (table.cells["phase"] == phase)
            ]
            assert cells["batch"].tolist() == [1, 4]
        draft = table.cells[table.cells["model"] == f"{SMALL}/{mode}/draft"]
        first = draft[draft["phase"] == "catch_up"]
        for batch in (1, 2, 4):  # after the target's pass, on one token and on more
            assert set(first[first["batch"] == batch]["new_tokens"]) == set(FIRST_WIDTHS)
        assert set(draft[draft["phase"] == "signal"]["batch"]) == {1, 2, 4}
    found = results(measured / "latency", "latency")
    unit = found["units"][f"{SMALL}.graph"]
    assert found["meta"]["quick"]
    held_out = unit["held_out"]
    assert {h["phase"] for h in held_out} <= {"forward", "catch_up"}
    assert {h["model"] for h in held_out} == {"target", "draft"}
    assert not {h["context"] for h in held_out} & set(table.cells["context"])
    assert unit["random_error"] == error_summary([h["error"] for h in held_out])
    assert unit["random_error"]["points"] > 0


def test_a_target_without_a_draft_is_measured_layer_by_layer(tmp_path: Path) -> None:
    suite("latency", "--pairs", "codellama-7b", out=tmp_path)
    table = read_latency(tmp_path / "latency.parquet")
    for mode in ("eager", "graph"):
        layers = table.estimate(f"codellama-7b/{mode}/target", "layer", new_tokens=2, context=16)
        assert layers.origin == MEASURED
        assert table.has(f"codellama-7b/{mode}/exit", "head")
        assert not table.has(f"codellama-7b/{mode}/target", "host_round")


def test_forced_runs_take_the_rounds_of_their_trace(measured: Path) -> None:
    assert files(measured / "forced") == [
        "forced-measured.parquet", "forced-trace.parquet", "forced.json"
    ]  # fmt: skip
    runs = read_measured(measured / "forced" / "forced-measured.parquet").times
    assert set(runs["mode"]) == set(MODES)
    assert set(runs["batch"]) == {1, 4}
    assert runs["forced"].all()
    assert (runs["wall_s"] > 0).all()
    assert main(["unpack", "--out", str(measured), "--into", str(measured / "recorded")]) == 0
    folders = sorted((measured / "recorded").iterdir())
    assert [f.name.split(SMALL)[1] for f in folders] == ["-compiled", "-eager", "-graph"]
    for folder in folders:
        rows = check_recording(folder)
        assert (rows["rounds_differ"] == 0).all()
        assert set(rows["batch"]) == {1, 4}
        assert np.isfinite(rows["error"]).all()
        latency = read_latency(folder / "latency.parquet")
        assert latency.has("target", "forward")
        assert table_shapes(latency)["target"].layers >= 1
        provenance = results(folder, "provenance")
        assert set(provenance) == {"latency", "forced"}


def test_trained_stage_records_and_checks(tmp_path: Path) -> None:
    suite("trained", "--seconds", "200", out=tmp_path)
    assert files(tmp_path) == [
        "trained-latency.parquet", "trained-measured.parquet", "trained-sampled.parquet",
        "trained-trace.parquet", "trained.json",
    ]  # fmt: skip
    trace = read_trace(tmp_path / "trained-trace.parquet")
    assert {"prob", "entropy"} <= trace.signals
    assert all(r.tokens == r.max_new_tokens and r.ended == "length" for r in trace.requests)
    assert len({r.category for r in trace.requests}) >= 4
    assert read_trace(tmp_path / "trained-sampled.parquet").temperature == 1.0
    found = results(tmp_path, "trained")
    for mode in ("eager", "graph"):
        checked = found[f"rounds_{mode}"]
        # float32 on one thread: what differs must have a cause, and most do not differ.
        assert "unexplained" not in checked["causes"]
        assert all(total > 0 for _, total in checked["rounds_differ_of"].values())
    assert found["complete"]
    assert not found["failed"]


def test_wrong_requests_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["latency", "--device", "cuda"], "use --device cpu"),
        (["latency", "--device", "gpu"], "is not a device: use cpu or cuda"),
        (["latency", "--device", "cpu", "--pairs", "gpt-5"], "--pairs 'gpt-5' is not one of llama"),
        (["latency", "--device", "cpu", "--dtype", "int8"], "'int8' is not one of float32"),
        (["unpack"], "holds no results of profiler.suite"),
        (["unpack", "--quick"], "--quick is an option of latency, forced, trained, not of unpack"),
        (["latency", "--target", "bundled"], "--target is an option of trained, not of latency"),
        (["forced", "--profile"], "--profile is an option of latency, not of forced"),
        (["trained", "--modes", "eager"], "--modes is an option of latency, forced, not of tr"),
        (["trained", "--device", "cpu", "--draft", "bundled"], "name it with --target"),
        (
            ["forced", "--device", "cpu", "--quick", "--pairs", "codellama-7b"],
            "nothing was run: codellama-7b has no draft model",
        ),
    ):
        if "cuda" in arguments and torch.cuda.is_available():
            continue
        assert main([*arguments, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err.strip()
        assert expected in error
        assert "\n" not in error
