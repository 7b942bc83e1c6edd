"""The suite's time: what is cut where it ends, what is named, and what goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiler.machine import NoTimeError
from profiler.models.architectures import PAIRS
from profiler.suite import MODES, forced_stage, latency_stage, trained_stage
from profiler.suite import pair as pair_latency
from profiler.suite.__main__ import SECONDS, main
from profiler.suite.environment import COMPLETE, UNFINISHED, Workplace, open_workplace
from profiler.suite.pair import QUICK, PairMeasurement
from profiler.suite.trained_stage import ENOUGH, PROMPTS
from tests.suite_results import SMALL, check_files, results
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency


def test_a_stage_ends_well_before_nine_minutes() -> None:
    assert SECONDS <= 500  # what is under way then takes seconds, see the checks below


def test_a_recording_is_enough_and_fits_its_time() -> None:
    """Outputs have no end token: of 256 tokens each, 150 were estimated to fit."""
    assert trained_stage.NEW_TOKENS * ENOUGH <= 150 * 256
    assert ENOUGH <= PROMPTS


def test_a_forced_stage_out_of_time_goes_on_with_what_is_left(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    real = forced_stage._unit

    def unit(place: Workplace, unit: forced_stage.ForcedUnit, *rest: Any) -> Any:
        if len(done) == 2:
            done.append("late")
            monkeypatch.setattr(Workplace, "left", property(lambda self: -1.0))
        result = real(place, unit, *rest)
        done.append(f"{unit.mode}.{unit.batch}")
        return result

    monkeypatch.setattr(forced_stage, "_unit", unit)
    monkeypatch.setattr(Workplace, "left", property(lambda self: 100.0))
    assert forced_stage.run_forced(place, [SMALL], MODES[:2]).status == UNFINISHED
    assert done == ["graph.1", "eager.1", "late"]
    assert "the same command on this machine goes on" in " ".join(capsys.readouterr().err.split())
    left_out = results(place.out, "forced")["left_out"]
    assert left_out == [f"{SMALL}.graph.4: no time left", f"{SMALL}.eager.4: no time left"]
    assert len(read_measured(place.out / "forced-measured.parquet").times["mode"].unique()) == 2
    monkeypatch.setattr(Workplace, "left", property(lambda self: 100.0))
    assert forced_stage.run_forced(place, [SMALL], MODES[:2]).status == COMPLETE
    assert done[3:] == ["graph.4", "eager.4"]
    assert not place.work.exists()
    check_files(place.out)


def test_a_latency_stage_out_of_time_goes_on_with_its_parts(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair_latency.host_beyond

    def late(*args: Any, **kwargs: Any) -> Any:
        raise NoTimeError("no time left")

    monkeypatch.setattr(pair_latency, "host_beyond", late)
    assert latency_stage.run_latency(place, [SMALL], ["eager"]).status == UNFINISHED
    first = results(place.out, "latency")["units"][f"{SMALL}.eager"]
    assert first["unfinished"] == ["the host at batch 1", "the host at batch 4"]
    before = read_latency(place.out / "latency.parquet").cells
    monkeypatch.setattr(pair_latency, "host_beyond", real)
    assert latency_stage.run_latency(place, [SMALL], ["eager"]).status == COMPLETE
    unit = results(place.out, "latency")["units"][f"{SMALL}.eager"]
    assert not unit["unfinished"]
    assert unit["seconds"] > first["seconds"]
    assert not [text for text in unit["skipped"] if "time" in text]
    after = read_latency(place.out / "latency.parquet").cells
    assert set(after["phase"]) >= {"host_round", "signal"}
    assert set(after[after["phase"] == "host_round"]["batch"]) == {1, 4}
    kept = after.merge(before, on=list(before.columns))
    assert len(kept) == len(before)
    assert not place.work.exists()


@pytest.mark.parametrize("name", ["latency", "forced"])
def test_a_stage_without_any_time_is_unfinished(name: str, out: Path) -> None:
    options = ("--pairs", SMALL, "--modes", "eager", "--seconds", "0")
    assert main([name, "--device", "cpu", "--quick", "--out", str(out), *options]) == UNFINISHED
    found = results(out, name)
    assert found["late"]
    assert not found["units"]


def test_parts_after_the_deadline_are_left(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = latency_stage.build_pair(place, PAIRS[SMALL].miniature())
    args = place, PAIRS[SMALL].miniature(), "eager", models, QUICK
    measured = PairMeasurement(*args, float("-inf"))
    measured.run()
    # What every prediction needs is measured all the same.
    assert {tuple(row[:3]) for row in measured.cells} >= {
        ("target", "forward", 1), ("draft", "catch_up", 1), ("target", "host_round", 1)
    }  # fmt: skip
    assert {row[2] for row in measured.cells} == {1}
    assert len(measured.unfinished) >= 5
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

    def out_of_time(*_: Any) -> Any:
        raise NoTimeError("no time left")

    def check(self: Workplace) -> None:
        if late[0]:
            raise NoTimeError("no time left")
        real(self)

    monkeypatch.setattr(Workplace, "check_time", check)
    arguments = ["trained", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main(arguments) == UNFINISHED
    found = results(tmp_path, "trained")
    names = ["latency", "graph", "eager"]
    assert found["left_out"] == [f"{name}: no time left" for name in names]
    assert (tmp_path / "trained-trace.parquet").is_file()
    late[0] = False
    with monkeypatch.context() as patch:
        patch.setattr(PairMeasurement, "layers", out_of_time)
        assert main(arguments) == UNFINISHED
    found = results(tmp_path, "trained")
    why = "no time left for target, layer by layer, draft, layer by layer"
    assert found["left_out"] == [f"latency, {mode}: {why}" for mode in ("eager", "graph")]
    assert not found["complete"]
    before = read_latency(tmp_path / "trained-latency.parquet").cells
    # Again, only what is left is measured, and what was measured is written in any case.
    monkeypatch.setattr(PairMeasurement, "passes", out_of_time)
    late[0] = True
    assert main(arguments) == UNFINISHED
    assert read_latency(tmp_path / "trained-latency.parquet").cells.equals(before)
    late[0] = False
    assert main(arguments) == 0
    found = results(tmp_path, "trained")
    assert not found["left_out"]
    after = read_latency(tmp_path / "trained-latency.parquet").cells
    assert len(after.merge(before, on=list(before.columns))) == len(before)
    assert "layer" in set(after["phase"]) - set(before["phase"])
    check_files(tmp_path)
    assert (tmp_path / "trained-measured.parquet").is_file()
    assert not open_workplace("cpu", tmp_path, seconds=1, quick=True).work.exists()
