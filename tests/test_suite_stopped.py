"""The suite stopped in the middle: the same command goes on with what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profiler.profile import Settings
from profiler.suite import MODES, forced_stage, latency_stage, trained_stage
from profiler.suite.checks import Checks
from profiler.suite.environment import Units, Workplace, open_workplace
from profiler.suite.trained_stage import record_trace
from tests.suite_results import SMALL, results, suite
from traces.errors import DraftsimError
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace


def test_a_stopped_stage_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def one(place: Workplace, pair: Any, models: Any, share: float, units: Units, how: Any) -> None:
        del place, models, share, how
        if pair.name == "vicuna-7b+68m" and len(done) == 1:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append(pair.name)
        unit = {"cells": [["target", "forward", 1, 1, 16, 1e-3, 0.0, 3]], "held_out": []}
        for mode in MODES:
            units.put(f"{pair.name}.{mode}", unit)

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
    real = Checks.run

    def stop(self: Checks, mode: str, *more: Any) -> Any:
        if mode == "eager":
            raise KeyboardInterrupt
        return real(self, mode, *more)

    def again(*_: Any, **__: Any) -> Any:
        raise AssertionError("done before")

    monkeypatch.setattr(Checks, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        suite("trained", "--seconds", "200", out=tmp_path)
    before = results(tmp_path, "trained")
    trace = read_trace(tmp_path / "trained-trace.parquet")
    monkeypatch.setattr(Checks, "run", real)
    for name in ("train_pair", "measure_modes"):
        monkeypatch.setattr(trained_stage, name, again)
    suite("trained", "--seconds", "200", out=tmp_path)
    after = results(tmp_path, "trained")
    for part in ("training", "greedy", "latency", "rounds_graph"):
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


def test_a_killed_forced_stage_goes_on_where_it_was_killed(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = forced_stage._unit

    def unit(place: Workplace, unit: forced_stage.ForcedUnit, *rest: Any) -> Any:
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
    assert results(place.out, "forced")["stopped"] == "KeyboardInterrupt"
    forced_stage.run_forced(place, [SMALL], MODES[:2])
    assert done == ["graph.1", "killed", "eager.1", "graph.4", "eager.4"]


def test_a_pair_read_back_is_the_pair_that_was_kept(tmp_path: Path) -> None:
    place = open_workplace("cpu", tmp_path, seconds=9, quick=True)
    pair, prompts, record = trained_stage.trained_pair(place, tmp_path / "pair", 0.2)
    again = trained_stage.trained_pair(place, tmp_path / "pair", 0.2)
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
    pair, prompts, _ = trained_stage.trained_pair(place, tmp_path / "pair", 0.2)
    record_trace(place, pair, prompts[:1], settings, float("inf"))
    other, _, _ = trained_stage.trained_pair(place, tmp_path / "other", 0.3)
    with pytest.raises(DraftsimError, match="stopped run with other settings"):
        record_trace(place, other, prompts[:1], settings, float("inf"))


def test_units_are_kept_while_parts_are_left(place: Workplace) -> None:
    units = Units(place, "forced")
    units.put("a.b", {"rows": []})
    units.late["b"] = "no time left"
    units.close()
    assert Units(place, "forced").get("a.b") == {"rows": []}
    units.late.clear()
    units.failed["c"] = "broken"
    units.close()
    units = Units(place, "forced")
    assert units.units == {"a.b": {"rows": []}}
    units.put("of other pairs", {"unfinished": ["layers"]})
    units.close()
    assert Units(place, "forced").get("a.b") is not None
    units.put("of other pairs", {"unfinished": []})
    units.close()
    assert Units(place, "forced").get("a.b") is None
