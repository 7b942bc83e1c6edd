"""The GPU suite in miniature on the CPU: every stage, resumed, refused, and held to replay."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import Fixed
from policies.core import Round
from profiler.machine.stopwatch import Clock, Stopwatch
from profiler.models.architectures import ARCHITECTURES, PAIRS
from profiler.profile import Settings
from profiler.suite.__main__ import main
from profiler.suite.environment import Workplace, clocks, open_workplace
from profiler.suite.latency import pair as pair_latency
from profiler.suite.latency import passes
from profiler.suite.latency import stage as latency_stage
from profiler.suite.latency.passes import COMPILED, MODES, Timer
from profiler.suite.latency.points import Point, Refiner, error_summary
from profiler.suite.latency.rounds import loop_trace, pass_seconds
from profiler.suite.ledger import Ledger
from profiler.suite.runs import kept_pair, trained_stage
from profiler.suite.runs.recording import record_trace
from simulator.hardware import check_recording
from simulator.hardware.scaling import table_shapes
from simulator.pricing import price
from traces.errors import DraftsimError
from traces.latency.table import MEASURED, LatencyTable
from traces.replay.decoder import replay
from traces.store.files import read_latency, read_trace
from traces.store.measured import read_measured

ROOT = Path(__file__).parents[1]
SMALL = "cm-asd-12+3"


def suite(*arguments: str, out: Path) -> None:
    assert main([*arguments, "--device", "cpu", "--quick", "--out", str(out)]) == 0


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
        for batch in (1, 4):  # behind the target's pass, on one token and on two
            assert set(first[first["batch"] == batch]["new_tokens"]) == {1, 2}
    results = json.loads((measured / "latency" / "latency.json").read_text())
    unit = results["units"][f"{SMALL}.graph"]
    assert {part["part"] for part in unit["parts"]} >= {"argmax of 1 row", "draw of 1 row at T = 1"}
    assert results["meta"]["quick"]
    assert len(unit["drift"]) == 2
    held_out = unit["held_out"]
    assert {h["phase"] for h in held_out} == {"forward", "catch_up"}
    for kind, drawn in (("held_out_error", False), ("random_error", True)):
        assert unit[kind] == error_summary([h["error"] for h in held_out if h["random"] is drawn])
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
        provenance = json.loads((folder / "provenance.json").read_text())
        assert set(provenance) == {"latency", "forced"}


def test_trained_stage_records_checks_and_compares(tmp_path: Path) -> None:
    suite("trained", "--seconds", "200", out=tmp_path)
    assert files(tmp_path) == [
        "trained-exits.parquet", "trained-latency.parquet", "trained-measured.parquet",
        "trained-sampled.parquet", "trained-trace.parquet", "trained.json",
    ]  # fmt: skip
    trace = read_trace(tmp_path / "trained-trace.parquet")
    assert {"prob", "entropy"} <= trace.signals
    assert all(r.tokens == r.max_new_tokens and r.ended == "length" for r in trace.requests)
    assert len({r.category for r in trace.requests}) >= 4
    assert read_trace(tmp_path / "trained-sampled.parquet").temperature == 1.0
    results = json.loads((tmp_path / "trained.json").read_text())
    for mode in ("eager", "graph"):
        checked = results[f"rounds_{mode}"]
        # float32 on one thread: what differs must have a cause, and most do not differ.
        assert "unexplained" not in checked["causes"]
        assert all(total > 0 for _, total in checked["rounds_differ_of"].values())
    assert results["complete"]
    assert not results["failed"]
    names = set(results["assisted"])
    assert {"ours, graph, gamma 5", "transformers assisted, gamma 5", "transformers plain"} <= names
    assert all(row["tokens_per_s"] > 0 for row in results["assisted"].values())


def test_a_stopped_stage_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def one(
        place: Workplace, pair: Any, models: Any, share: float, ledger: Ledger, how: Any
    ) -> None:
        del place, models, share, how
        if pair.name == "vicuna-7b+68m" and len(done) == 1:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append(pair.name)
        unit = {"cells": [["target", "forward", 1, 1, 16, 1e-3, 0.0, 3]], "held_out": []}
        for mode in MODES:
            ledger.put(f"{pair.name}.{mode}", unit)

    monkeypatch.setattr(latency_stage, "_measure_pair", one)
    names = [SMALL, "vicuna-7b+68m"]
    place = open_workplace("cpu", tmp_path, seconds=60, quick=True)
    with pytest.raises(KeyboardInterrupt):
        latency_stage.run_latency(place, names)
    assert len(read_latency(tmp_path / "latency.parquet").cells) == len(MODES)
    latency_stage.run_latency(open_workplace("cpu", tmp_path, seconds=60, quick=True), names)
    assert done == [SMALL, "stopped", "vicuna-7b+68m"]
    assert len(read_latency(tmp_path / "latency.parquet").cells) == 2 * len(MODES)
    assert not (place.work / "latency").exists()


def test_a_stopped_trained_stage_keeps_its_pair_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trained_stage.sampled_rounds

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    def again(*_: Any) -> Any:
        raise AssertionError("done before")

    monkeypatch.setattr(trained_stage, "sampled_rounds", stop)
    with pytest.raises(KeyboardInterrupt):
        suite("trained", "--seconds", "200", out=tmp_path)
    before = json.loads((tmp_path / "trained.json").read_text())
    trace = read_trace(tmp_path / "trained-trace.parquet")
    monkeypatch.setattr(trained_stage, "sampled_rounds", real)
    for place, name in ((kept_pair, "train_pair"), (trained_stage._Stage, "_latency")):
        monkeypatch.setattr(place, name, again)
    suite("trained", "--seconds", "200", out=tmp_path)
    after = json.loads((tmp_path / "trained.json").read_text())
    for part in ("training", "greedy", "latency", "rounds_graph", "assisted"):
        assert after[part] == before[part], part
    assert "rounds_eager" in set(after) - set(before)
    same = read_trace(tmp_path / "trained-trace.parquet")
    assert same.meta["target"]["fingerprint"] == trace.meta["target"]["fingerprint"]
    np.testing.assert_array_equal(same.columns["token"], trace.columns["token"])
    # The pair read back decodes as the one that was recorded.
    for mode in ("graph", "eager"):
        assert "unexplained" not in after[f"rounds_{mode}"]["causes"]
    runs = read_measured(tmp_path / "trained-measured.parquet").times
    assert set(runs["mode"]) == {"eager", "graph"}
    assert not open_workplace("cpu", tmp_path, seconds=1, quick=True).work.exists()


def test_a_pair_read_back_is_the_pair_that_was_kept(tmp_path: Path) -> None:
    place = open_workplace("cpu", tmp_path, seconds=9, quick=True)
    pair, prompts, record = kept_pair.trained_pair(place, tmp_path / "pair", 0.2)
    again = kept_pair.trained_pair(place, tmp_path / "pair", 0.2)
    assert again[1:] == (prompts, record)
    assert again[0].meta == pair.meta
    assert again[0].eos == pair.eos
    text = prompts[0].text
    assert again[0].encode(text).tolist() == pair.encode(text).tolist()
    ids = pair.encode(text)[None, :32]
    with torch.inference_mode():
        for role in ("target", "draft"):
            one, other = (getattr(p, role)(input_ids=ids).logits for p in (pair, again[0]))
            assert torch.equal(one, other)


def test_recordings_of_other_weights_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_workplace("cpu", tmp_path, seconds=9, quick=True)
    monkeypatch.setattr(Workplace, "work", tmp_path / "work")
    settings = Settings(max_new_tokens=4, max_gamma=2)
    pair, prompts, _ = kept_pair.trained_pair(place, tmp_path / "pair", 0.2)
    record_trace(place, pair, prompts[:1], settings, float("inf"))
    other, _, _ = kept_pair.trained_pair(place, tmp_path / "other", 0.3)
    with pytest.raises(DraftsimError, match="stopped run with other settings"):
        record_trace(place, other, prompts[:1], settings, float("inf"))


def test_a_call_behind_another_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes(seconds: float) -> Any:
        def run() -> None:
            clock[0] += seconds

        return run

    monkeypatch.setattr(passes.time, "perf_counter", lambda: clock[0])
    told = Clock(lambda: clock[0], lambda: clock[0], lambda: 0)
    monkeypatch.setattr(passes, "Stopwatch", partial(Stopwatch, clock=told))
    sample = Timer(torch.device("cpu"), repeats=4).behind(takes(8.0), takes(0.25))
    assert sample == (0.25, 0.0, 3)  # calls of seconds are not repeated more often than that


def test_rounds_are_priced_as_the_simulator_prices_them() -> None:
    """Host time is what the passes leave: both sides must mean the same passes."""
    rows = [("target", "forward", 1, w, c, 1e-2 + 1e-3 * w + 1e-6 * c, 0.0, 1)
            for w in (1, 9) for c in (16, 512)]  # fmt: skip
    rows += [("draft", phase, 1, w, c, 1e-3 * scale * w + 1e-7 * c, 0.0, 1)
             for phase, scale in (("forward", 1.0), ("catch_up", 1.7))
             for w in (1, 2) for c in (16, 512)]  # fmt: skip
    table = passes.table_of(rows)
    trace = loop_trace(2, 60, 40, 8)
    log = replay(trace, Fixed(3))
    per_request = price(log, table).decode_s
    assert (log.rounds["catch_up"] > 1).any()
    for i in range(2):
        rounds = [Round(*map(int, (r[n] for n in Round._fields)))
                  for r in log.rounds[log.rounds["request"] == i]]  # fmt: skip
        assert pass_seconds(rounds, 40, table) == pytest.approx(per_request[i])


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
    monkeypatch.setattr(Workplace, "free_bytes", lambda self: 2 << 30)
    measured = latency_stage.PairMeasurement(
        place, pair, "eager", (None, None), latency_stage.Grids(False), 0.0
    )
    assert pair.draft is not None
    assert measured._contexts(pair.draft, (128, 1024, 4096), 1, 25, "draft") == [128, 1024, 2023]
    assert measured._contexts(pair.target, (128, 1024), 4, 25, "target") == [128]
    assert any("the model's context is 2048" in s for s in measured.skipped)
    assert any("the memory does not hold" in s for s in measured.skipped)
    with pytest.raises(DraftsimError, match="no context of"):
        measured._contexts(pair.target, (1024,), 64, 25, "target")


def test_running_out_of_memory_ends_a_piece_not_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_workplace("cpu", tmp_path, seconds=60, quick=True)
    pair = PAIRS[SMALL].miniature()
    models = latency_stage.build_pair(place, pair)
    measured = latency_stage.PairMeasurement(
        place, pair, "eager", models, latency_stage.Grids(True), float("inf")
    )

    real = pair_latency.host_cells

    def full(*args: Any, batch: int, **kwargs: Any) -> Any:
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, batch=batch, **kwargs)

    monkeypatch.setattr(pair_latency, "host_cells", full)
    measured.run()
    assert measured.skipped == ["the host at batch 4: out of memory"]
    assert not measured.unfinished
    assert any(row[1] == "host_round" for row in measured.cells)


def test_wrong_requests_get_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["latency", "--device", "cuda"], "use --device cpu"),
        (["latency", "--device", "gpu"], "is not a device: use cpu or cuda"),
        (["latency", "--device", "cpu", "--pairs", "gpt-5"], "--pairs 'gpt-5' is not one of llama"),
        (["latency", "--device", "cpu", "--dtype", "int8"], "'int8' is not one of float32"),
        (["unpack"], "holds no results of profiler.suite"),
    ):
        if "cuda" in arguments and torch.cuda.is_available():
            continue
        assert main([*arguments, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err.strip()
        assert expected in error
        assert "\n" not in error


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


def test_stages_need_nothing_but_the_libraries_named() -> None:
    """As on a bare machine: every other dependency of the project is hidden."""
    hidden = (
        "simpy", "typer", "sklearn", "joblib", "jinja2", "dask", "distributed", "plotly",
        "matplotlib", "sacrebleu", "simulator", "commands", "draftsim",
    )  # fmt: skip
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from profiler.suite import unpack, __main__\n"
        "from profiler.suite.latency import stage\n"
        "from profiler.suite.runs import forced_stage, trained_stage\n"
        f"loaded = [m for m in {hidden!r} if sys.modules[m] is not None]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_clocks_are_empty_where_there_is_no_gpu() -> None:
    assert clocks(torch.device("cpu")) == {}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_parameters_they_are_named_for(name: str) -> None:
    """On the meta device, so without memory: the formula and transformers agree."""
    shape = ARCHITECTURES[name]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(shape.config())
    counted = sum(p.numel() for p in model.parameters())
    # Norms and biases, which the formula leaves out.
    assert 0 <= counted - shape.parameters <= 0.002 * counted
    published = {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9, "vicuna-7b": 6.74e9,
                 "vicuna-13b": 13.02e9, "vicuna-68m": 68e6, "vicuna-160m": 162e6,
                 "qwen2.5-32b": 32.76e9, "qwen2.5-0.5b": 0.494e9, "codellama-7b": 6.74e9,
                 "codellama-13b": 13.02e9}  # fmt: skip
    if name in published:
        assert counted == pytest.approx(published[name], rel=0.01)
    tiny = shape.miniature()
    assert tiny.heads // tiny.kv_heads == shape.heads // shape.kv_heads
    assert tiny.parameters < 1e6


def refine(refiner: Refiner, cost: Any) -> int:
    asked = 0
    while (at := refiner.next()) is not None:
        refiner.tell(cost(at))
        asked += 1
    return asked


def table_of(refiner: Refiner) -> LatencyTable:
    import pandas as pd

    from traces.latency.table import CELL_COLUMNS

    rows = [("m", "forward", 1, *at, s, 0.0, 1) for at, s in refiner.grid().items()]
    return LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))


def test_a_linear_cost_needs_no_more_than_the_coarse_grid() -> None:
    refiner = Refiner((1, 9, 25), (128, 4096))
    refine(refiner, lambda at: 1e-3 + 1e-5 * at.width + 1e-7 * at.context)
    assert len(refiner.grid()) == 6
    assert max(map(abs, refiner.held_out.values())) < 1e-9
    assert refiner.unchecked == 0


def test_points_are_added_until_interpolation_is_good() -> None:
    """A step in the width (another kernel) and a bend in the context."""

    def cost(at: Point) -> float:
        step = 1.3e-3 if at.width > 16 else 1e-3
        return step + 4e-8 * max(0, at.context - 3000) + 1e-6 * at.width

    refiner = Refiner((1, 9, 25), (128, 8192))
    asked = refine(refiner, cost)
    table = table_of(refiner)
    for width in range(1, 26):
        for context in range(128, 8193, 61):
            read = float(table.seconds("m", "forward", new_tokens=width, context=context))
            # A kink inside an accepted gap: at most twice the tolerance, along either size.
            assert abs(read / cost(Point(width, context)) - 1) < 4 * 0.02, (width, context)
    assert asked < 80
    assert all(abs(e) <= 0.02 for e in refiner.held_out.values())
    assert not set(refiner.held_out) & set(refiner.grid())


def test_a_line_left_unfinished_is_not_used() -> None:
    refiner = Refiner((1, 5), (128, 1024))
    while not refiner.coarse_done:
        refiner.next()
        refiner.tell(1e-3)
    assert refiner.next() == Point(3, 128)
    refiner.tell(5e-3)
    assert Point(3, 128) in refiner.seconds
    assert set(refiner.grid()) == {Point(w, c) for w in (1, 5) for c in (128, 1024)}
    assert refiner.unchecked > 0


@given(seed=st.integers(0, 1000), count=st.integers(1, 20))
def test_points_at_random_had_no_part_in_the_grid(seed: int, count: int) -> None:
    refiner = Refiner((1, 2, 4), (16, 48))
    refine(refiner, lambda at: 1e-3 + 1e-5 * at.width**2 + 1e-7 * at.context)
    drawn = refiner.at_random(count, seed)
    assert len(drawn) == len(set(drawn)) <= count
    assert not set(drawn) & (set(refiner.seconds) | set(refiner.held_out))
    assert all(1 <= at.width <= 4 and 16 <= at.context <= 48 for at in drawn)


def test_error_summary_counts_both_signs() -> None:
    assert error_summary([0.01, -0.03, 0.02]) == {"points": 3, "median": 0.02, "largest": 0.03}
    assert error_summary([]) == {"points": 0}
