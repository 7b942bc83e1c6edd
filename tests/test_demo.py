"""``draftsim demo``: the prediction comes first, the page last, and a stopped one goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from commands.demo import FULL, QUICK
from commands.validate.flow import CheckedPair
from commands.validate.spot_check import SpotCheck
from profiler.checks.interleaved import PLACE
from profiler.prompts import read_prompts
from profiler.recording.run import BUNDLED
from tests.conftest import Run
from tests.few_cells import few_cells
from traces.store.files import read_trace

SMALL = ("--limit", 4, "--max-new-tokens", 8)


def test_a_demo_stopped_while_it_decodes_keeps_its_recording(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    found = []

    def interrupted(given: CheckedPair) -> None:
        found.append((given.run / "trace.parquet").read_bytes())
        (given.run / f"{PLACE}-0").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("commands.demo.SpotCheck", interrupted)
    with few_cells():
        for _ in range(2):
            ran = run("demo", "--out", folder, *SMALL)
            assert ran.code == 130
    assert f"{folder} is finished and kept" in ran.said
    assert found[0] == found[1]


def test_the_recorded_machine_s_prediction_is_said_before_anything_is_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("commands.demo.run_profile", stopped)
    ran = run("demo", "--out", tmp_path / "run")
    assert ran.code == 130
    first = ran.err.splitlines()[0]
    assert first.startswith("Predicted for the recorded machine (")
    assert "is fastest, " in first
    assert "x no speculation (" in first  # with its interval
    assert f"{QUICK.prompts} prompts of up to {QUICK.tokens} tokens" in ran.said


def test_a_demo_ends_with_the_path_of_its_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def checked(given: CheckedPair) -> SpotCheck:
        asked.append(given)
        return SpotCheck(replace(given, policy=["fixed:gamma=2"]), assisted=False)

    monkeypatch.setattr("commands.demo.SpotCheck", checked)
    monkeypatch.setattr("commands.validate.flow.SWEEPS", 1)
    folder = tmp_path / "run"
    with few_cells():
        ran = run("demo", "--out", folder, *SMALL, "--repeats", 1, "--json", "-")
    assert [row["policy"] for row in ran.rows] == ["autoregressive", "fixed:gamma=2"]
    # The policies are those that a check has where none is named.
    assert asked == [CheckedPair(run=folder, repeats=1)]
    assert ran.err.splitlines()[-1].startswith(f"wrote {folder / 'report.html'}")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "fixed:gamma=2" in page
    trace = read_trace(folder / "trace.parquet")
    assert (len(trace.requests), trace.requests[0].max_new_tokens) == (4, 8)


def test_the_quick_demo_runs_all_categories_alike_and_a_quarter_of_the_full_one() -> None:
    categories = [p.category for p in read_prompts(BUNDLED / "prompts.jsonl", QUICK.prompts)]
    assert {categories.count(name) for name in categories} == {2}
    quick, full = (s.prompts * s.tokens * s.repeats for s in (QUICK, FULL))
    # The full one took 9 minutes on two quiet cores, 13.5 on a slow day, and is to take 5 at most.
    assert quick / full < 1 / 4
    assert QUICK.sweeps / FULL.sweeps < 1 / 3
    assert QUICK.repeats > 1  # spreads are known
