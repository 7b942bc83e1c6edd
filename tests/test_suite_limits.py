"""The suite's limits: time, memory, files, and what is left for another run."""

from __future__ import annotations

import gc
import json
import re
import shutil
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from profiler.models.architectures import PAIRS, Architecture
from profiler.profile import Settings
from profiler.suite.__main__ import SECONDS, main
from profiler.suite.account import COMPLETE, FAILED, UNFINISHED, Account
from profiler.suite.environment import NoTimeError, Workplace, clocks, open_workplace
from profiler.suite.latency import pair as pair_latency
from profiler.suite.latency import stage as latency_stage
from profiler.suite.latency.grids import Grids
from profiler.suite.latency.pair import PairMeasurement
from profiler.suite.latency.passes import MODES
from profiler.suite.ledger import Ledger
from profiler.suite.runs import arms, forced_stage, kept_pair, recording
from profiler.suite.runs.arms import ARMS, COLUMNS, MORE_ARMS, sweeps
from profiler.suite.runs.recording import LARGEST
from tests.pretend_gpu import pretended
from traces.errors import DraftsimError
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.store.files import read_latency, write_latency, write_trace
from traces.store.measured import MeasuredRuns, read_measured, write_measured

SMALL = "cm-asd-12+3"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    made = open_workplace("cpu", tmp_path / "out", seconds=300, quick=True)
    yield made
    shutil.rmtree(made.work, ignore_errors=True)


def check_files(out: Path) -> None:
    found = [f for f in out.rglob("*") if f.is_file()]
    assert 0 < len(found) <= 8
    for file in found:
        assert file.stat().st_size <= LARGEST <= 16 << 20
        assert len(file.relative_to(out).parts) <= 3
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", p) for p in file.relative_to(out).parts)


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
    assert gpu.ranges
    results = json.loads((tmp_path / f"{arguments[0]}.json").read_text())
    assert results["meta"]["device"] == "Pretended GPU"
    assert results["meta"]["dtype"] == "bfloat16"
    assert results["complete"]
    assert not results["left_out"]
    for unit in results.get("units", {}).values():
        assert not unit.get("skipped")
    for mode in MODES:
        assert "unexplained" not in results.get(f"rounds_{mode}", {}).get("causes", {})


def test_files_of_full_size_are_small_enough(tmp_path: Path) -> None:
    """As many cells as the time holds, every run made, every round recorded."""
    # Every cell takes several timings of 8 ms: more do not fit into the stage's time.
    cells = int(SECONDS / (3 * Grids(False).enough_s))
    row = ("llama-3.1-8b+1b/eager/target", "forward", 64, 25, 16384, 1.2345678e-3, 1.2e-5, 5)
    rows = [(*row[:5], row[5] + i * 1e-9, *row[6:]) for i in range(cells)]
    meta = {"shapes": {p.name: latency_stage.shapes_of(p) for p in PAIRS.values()}}
    table = LatencyTable.__new__(LatencyTable)
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    object.__setattr__(table, "cells", frame)
    object.__setattr__(table, "meta", meta)
    write_latency(table, tmp_path / "latency.parquet")
    entry = {"model": "target", "phase": "forward", "batch": 64, "width": 25, "context": 16384,
             "error": 0.0123456789012, "random": False}  # fmt: skip
    kept = [[entry, row]] * cells
    (tmp_path / "latency.json").write_text(json.dumps(kept, indent=1))
    trace = forced_stage.forced_trace(False)
    write_trace(trace, tmp_path / "forced-trace.parquet")
    policies = len(ARMS) + len(MORE_ARMS)
    runs = len(PAIRS) * len(MODES) * 3 * forced_stage.REPEATS * policies * len(trace.requests)
    measured = [["llama-3.1-8b+1b", "eager", ARMS[5], "exact", 1, True, 0, f"r{i}", i * 1e-7, i]
                for i in range(runs)]  # fmt: skip
    write_measured(
        MeasuredRuns(pd.DataFrame(measured, columns=list(COLUMNS)), {}),
        tmp_path / "forced-measured.parquet",
    )
    check_files(tmp_path)


def test_recorded_exits_stay_within_a_file(
    place: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompts, _ = kept_pair.trained_pair(place, tmp_path / "pair", 0.2)
    trace = recording.record_trace(place, pair, prompts, Settings(12, 4), float("inf"))
    text = torch.randint(50, (4, 40), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "exits.parquet"
    recording.record_early_exits(place, pair, trace, text, path, 60.0)
    whole = path.stat().st_size
    limit = int(0.8 * whole)
    monkeypatch.setattr(recording, "LARGEST", limit)
    # Guessed too high: as if the first requests were the smallest.
    monkeypatch.setattr(recording, "ROOM", 2.0)
    done = recording.record_early_exits(place, pair, trace, text, path, 60.0)
    assert path.stat().st_size <= limit
    assert 0 < done["requests"] < len(trace.requests)


def test_a_stage_ends_well_before_nine_minutes() -> None:
    assert SECONDS <= 500  # what is under way then takes seconds, see the checks below


class Clock:
    """Seconds that pass when something runs."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 0.0, end

    def run(self, *_: Any) -> tuple[float, int]:
        self.now += 1.0
        return 1.0, 1

    def left(self) -> float:
        return self.end - self.now

    def check(self) -> None:
        if self.left() <= 0:
            raise NoTimeError("no time left")


def swept(clock: Clock, left: float = 1e9) -> list[Any]:
    own = [arms.Arm(name, None) for name in "ab"]  # type: ignore[arg-type]
    return sweeps(own, [0, 1, 2], clock.run, repeats=3, left=lambda: left - clock.now,
                  check_time=clock.check)  # fmt: skip


def test_sweeps_stop_between_any_two_runs() -> None:
    # One run warms up and six make a sweep.
    assert len(swept(Clock(100))) == 18
    clock = Clock(15)
    assert len(swept(clock)) == 12  # the third sweep was begun, and is dropped
    assert clock.now == 15
    # Of the ten seconds that are left a group takes two, in each of three repeats.
    rows = swept(Clock(40), left=11)
    assert [row[1:3] for row in rows] == [(repeat, 0) for repeat in (0, 0, 1, 1, 2, 2)]
    clock = Clock(2)
    with pytest.raises(NoTimeError):
        swept(clock)
    assert clock.now == 2
    assert len(swept(Clock(100), left=1)) == 4  # two repeats, whatever the share


def test_a_forced_stage_out_of_time_goes_on_with_what_is_left(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    real = forced_stage._unit

    def unit(place: Workplace, unit: forced_stage.Unit, *rest: Any) -> Any:
        if len(done) == 2:
            done.append("late")
            monkeypatch.setattr(Workplace, "left", property(lambda self: -1.0))
        result = real(place, unit, *rest)
        done.append(f"{unit.mode}.{unit.batch}")
        return result

    monkeypatch.setattr(forced_stage, "_unit", unit)
    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "left", property(lambda self: 100.0))
        assert forced_stage.run_forced(place, [SMALL], MODES[:2]).status == UNFINISHED
    assert done == ["graph.1", "eager.1", "late"]
    assert "the same command on this machine goes on" in " ".join(capsys.readouterr().err.split())
    left_out = json.loads((place.out / "forced.json").read_text())["left_out"]
    assert left_out == [f"{SMALL}.graph.4: no time left", f"{SMALL}.eager.4: no time left"]
    assert len(read_measured(place.out / "forced-measured.parquet").times["mode"].unique()) == 2
    monkeypatch.setattr(Workplace, "left", property(lambda self: 100.0))
    assert forced_stage.run_forced(place, [SMALL], MODES[:2]).status == COMPLETE
    assert done[3:] == ["graph.4", "eager.4"]
    assert not place.work.exists()
    check_files(place.out)


def test_a_killed_forced_stage_goes_on_where_it_was_killed(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = forced_stage._unit

    def unit(place: Workplace, unit: forced_stage.Unit, *rest: Any) -> Any:
        if len(done) == 1:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(f"{unit.mode}.{unit.batch}")
        return real(place, unit, *rest)

    monkeypatch.setattr(forced_stage, "_unit", unit)
    with pytest.raises(KeyboardInterrupt):
        forced_stage.run_forced(place, [SMALL], MODES[:2])
    # What was finished is written, not only kept, and so is why there is no more.
    assert len(read_measured(place.out / "forced-measured.parquet").times) > 0
    assert json.loads((place.out / "forced.json").read_text())["stopped"] == "KeyboardInterrupt"
    forced_stage.run_forced(place, [SMALL], MODES[:2])
    assert done == ["graph.1", "killed", "eager.1", "graph.4", "eager.4"]


def test_a_latency_stage_out_of_time_goes_on_with_its_pieces(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair_latency.host_cells

    def late(*args: Any, **kwargs: Any) -> Any:
        raise NoTimeError("no time left")

    monkeypatch.setattr(pair_latency, "host_cells", late)
    assert latency_stage.run_latency(place, [SMALL], ["eager"]).status == UNFINISHED
    first = json.loads((place.out / "latency.json").read_text())["units"][f"{SMALL}.eager"]
    assert first["unfinished"] == ["the host at batch 1", "the host at batch 4"]
    before = read_latency(place.out / "latency.parquet").cells
    monkeypatch.setattr(pair_latency, "host_cells", real)
    assert latency_stage.run_latency(place, [SMALL], ["eager"]).status == COMPLETE
    unit = json.loads((place.out / "latency.json").read_text())["units"][f"{SMALL}.eager"]
    assert not unit["unfinished"]
    assert not [text for text in unit["skipped"] if "time" in text]
    after = read_latency(place.out / "latency.parquet").cells
    assert set(after["phase"]) >= {"host_round", "signal"}
    assert set(after[after["phase"] == "host_round"]["batch"]) == {1, 4}
    kept = after.merge(before, on=list(before.columns))
    assert len(kept) == len(before)
    assert not place.work.exists()


def test_pieces_after_the_deadline_are_left(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = latency_stage.build_pair(place, PAIRS[SMALL].miniature())
    args = place, PAIRS[SMALL].miniature(), "eager", models, Grids(True)
    measured = PairMeasurement(*args, float("-inf"))
    measured.run()
    # What every prediction needs is measured all the same.
    assert {tuple(row[:3]) for row in measured.cells} >= {
        ("target", "forward", 1), ("draft", "catch_up", 1), ("target", "host_round", 1)
    }  # fmt: skip
    assert {row[2] for row in measured.cells} == {1}
    assert len(measured.unfinished) > 5
    monkeypatch.setattr(Workplace, "left", property(lambda self: -1.0))
    none = PairMeasurement(*args, float("inf"))
    none.run()
    assert not none.cells
    before = none.unit()
    assert before["skipped"] == [f"{name}: no time left" for name in none.unfinished]
    again = PairMeasurement(*args, float("inf"), before)
    again.run()
    assert again.unit() == before


def test_a_trained_stage_out_of_time_names_what_is_left_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Workplace.check_time
    late = [True]

    def check(self: Workplace) -> None:
        if late[0]:
            raise NoTimeError("no time left")
        real(self)

    monkeypatch.setattr(Workplace, "check_time", check)
    arguments = ["trained", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main(arguments) == UNFINISHED
    results = json.loads((tmp_path / "trained.json").read_text())
    names = ["latency", "graph", "assisted", "sampled-rounds", "eager", "exits"]
    assert results["left_out"] == [f"{name}: no time left" for name in names]
    assert (tmp_path / "trained-trace.parquet").is_file()
    late[0] = False
    assert main(arguments) == 0
    results = json.loads((tmp_path / "trained.json").read_text())
    assert not results["left_out"]
    check_files(tmp_path)
    assert (tmp_path / "trained-measured.parquet").is_file()
    assert not open_workplace("cpu", tmp_path, seconds=1, quick=True).work.exists()


def test_a_pair_that_does_not_fit_is_freed_and_a_smaller_one_named(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    real = Architecture.build

    def build(self: Architecture, device: Any, dtype: Any) -> Any:
        if built:
            raise torch.OutOfMemoryError("CUDA out of memory")
        model = real(self, device, dtype)
        built.append(weakref.ref(model))
        return model

    def release(self: Workplace) -> None:
        gc.collect()
        freed.append(built[0]() is None)

    freed: list[bool] = []
    monkeypatch.setattr(Architecture, "build", build)
    monkeypatch.setattr(Workplace, "release", release)
    account = Account(place)
    assert latency_stage.build_or_none(place, PAIRS[SMALL].miniature(), account) is None
    assert freed == [True]  # before memory is handed back, not after
    assert account.notes == [f"{SMALL}: out of memory while it was built; --pairs {SMALL} fits"]
    for run in (latency_stage.run_latency, forced_stage.run_forced):
        built[:] = [lambda: None]
        with pytest.raises(DraftsimError, match=r"nothing was .*: .*out of memory while it was"):
            run(place, [SMALL])


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
        results = json.loads((tmp_path / f"{stage}.json").read_text())
        assert results["stopped"] == "CUDA error: an illegal memory access"
    shutil.rmtree(open_workplace("cpu", tmp_path, seconds=1, quick=True).work)


def test_clocks_are_asked_of_the_gpu_that_torch_means(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ask(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="1980, 2619, 1980, 41, 120.5, 700.0, P0, 570.1\n")

    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", ask)
    with pretended():
        assert clocks(torch.device("cuda", 0))["clocks.sm"] == "1980"
        assert "--id=0" in asked[0]
        named = SimpleNamespace(uuid="ab-12")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: named)
        clocks(torch.device("cuda", 0))
        assert "--id=GPU-ab-12" in asked[1]

        def fail(*_: Any, **__: Any) -> Any:
            raise subprocess.CalledProcessError(9, "nvidia-smi")

        monkeypatch.setattr(subprocess, "run", fail)
        assert clocks(torch.device("cuda", 0)) == {}


def test_a_ledger_is_kept_while_parts_are_left(place: Workplace) -> None:
    ledger = Ledger(place, "forced", {})
    ledger.put("a.b", {"rows": []})
    account = Account(place)
    account.late["b"] = "no time left"
    ledger.close(account)
    assert Ledger(place, "forced", {}).get("a.b") == {"rows": []}
    account.late.clear()
    account.failed["c"] = "broken"
    ledger.close(account)
    assert Ledger(place, "forced", {}).units == {"a.b": {"rows": []}}
    ledger.put("of other pairs", {"unfinished": ["layers"]})
    ledger.close(Account(place))
    assert Ledger(place, "forced", {}).get("a.b") is not None
    ledger.put("of other pairs", {"unfinished": []})
    ledger.close(Account(place))
    assert Ledger(place, "forced", {}).get("a.b") is None
