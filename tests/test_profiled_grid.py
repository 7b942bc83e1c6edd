"""A profile measures the latencies that its recording needs, and keeps a table that has more."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from commands.profile.recording import RecordingJob, complete, measure_latency, run_profile
from profiler import profile
from profiler.latency.table import Grid
from profiler.profile import GRID, Settings, latency_options
from profiler.recording.run import BUNDLED, DONE_WITH, RunInfo, digest_of
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store.files import read_trace, write_latency

WHOLE = Grid().drafting(4)


@pytest.fixture
def job(tmp_path: Path) -> RecordingJob:
    """A recording of two prompts."""
    info = RunInfo("bundled", "bundled", threads=1, run_id="one")
    settings = Settings(max_new_tokens=6, max_gamma=4, grid=WHOLE)
    return RecordingJob(info, BUNDLED / "prompts.jsonl", tmp_path, settings, 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    """The grids of the latencies that were measured; none takes any time."""
    grids: list[Grid] = []

    def timed(pair: Any, settings: Settings, folder: Path, _: Any) -> None:
        grids.append(settings.grid)
        table = LatencyTable.constant(1.0, 0.1)
        done = digest_of(latency_options(pair, settings))
        write_latency(
            replace(table, meta={**pair.meta, DONE_WITH: done, GRID: asdict(settings.grid)}),
            folder / "latency.parquet",
        )

    monkeypatch.setattr(profile, "profile_latency", timed)
    return grids


def test_a_profile_measures_as_far_as_its_recording_reaches(
    job: RecordingJob, measured: list[Grid], capsys: pytest.CaptureFixture[str]
) -> None:
    run_profile(job)
    [grid] = measured
    longest = max(r.prompt_length for r in read_trace(job.out / "trace.parquet").requests)
    assert longest + 6 + 4 <= max(grid.contexts) < max(WHOLE.contexts)
    assert longest <= max(grid.prompts) < max(WHOLE.prompts)
    assert grid.widths == (1, 2, 3, 4, 5)
    said = " ".join(capsys.readouterr().err.split())
    assert f"contexts of up to {max(grid.contexts)} tokens, passes over up to 5" in said
    assert "`draftsim profile latency --max-context N` measures more" in said


def test_a_longer_context_is_measured_where_it_is_asked_for(
    job: RecordingJob, measured: list[Grid], capsys: pytest.CaptureFixture[str]
) -> None:
    run_profile(replace(job, max_context=600))
    assert max(measured[0].contexts) == 608
    assert "measures more" not in capsys.readouterr().err


def test_other_sources_have_their_wide_passes_measured(
    job: RecordingJob, measured: list[Grid]
) -> None:
    complete(job, [])
    assert measured[0].widths == WHOLE.widths
    assert max(measured[0].contexts) < max(WHOLE.contexts)
    run_profile(job)  # the table has what this recording needs
    assert len(measured) == 1


def test_latencies_by_themselves_are_measured_over_the_whole_grid(
    job: RecordingJob, measured: list[Grid], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.profile.recording.remeasure", lambda *_, **__: None)
    run_profile(job)
    measure_latency(job.info, job.out, Settings(grid=WHOLE))
    assert measured.pop() == WHOLE
    run_profile(job)  # the whole grid's table is kept
    assert len(measured) == 1
    measure_latency(job.info, job.out, Settings(grid=WHOLE), max_context=300)
    assert max(measured[-1].contexts) == 320
    run_profile(job)  # so is one to the context asked for, and of longer drafts in batches
    measure_latency(job.info, job.out, Settings(grid=Grid(batches=(1, 4))), max_context=300)
    run_profile(job)
    assert len(measured) == 3
    with pytest.raises(DraftsimError, match="recorded with other options"):
        run_profile(replace(job, max_context=600))


def test_contexts_end_where_the_pairs_positions_do(
    job: RecordingJob, measured: list[Grid], capsys: pytest.CaptureFixture[str]
) -> None:
    run_profile(replace(job, max_context=1020))  # the bundled pair has 1024 positions
    assert max(measured[0].contexts) == 1019
    said = " ".join(capsys.readouterr().err.split())
    assert "contexts of up to 1019 tokens: the pair has no positions" in said
    measure_latency(job.info, job.out, Settings(grid=Grid()), max_context=9000)
    assert (max(measured[1].contexts), measured[1].prompts[-1]) == (999, 1024)
    assert "up to 999 tokens" in capsys.readouterr().err
    with pytest.raises(DraftsimError, match=r"1024 positions leave no room .* lower --max-gamma"):
        run_profile(replace(job, settings=replace(job.settings, grid=Grid().drafting(1000))))


def test_generation_settings_that_are_not_followed_are_said(
    job: RecordingJob, measured: list[Grid], capsys: pytest.CaptureFixture[str]
) -> None:
    target = Path(shutil.copytree(BUNDLED / "target", job.out / "target"))
    config = json.loads((target / "generation_config.json").read_text())
    config |= {"repetition_penalty": 1.3, "suppress_tokens": [5]}
    (target / "generation_config.json").write_text(json.dumps(config))
    run_profile(replace(job, info=replace(job.info, target=str(target))))
    said = " ".join(capsys.readouterr().err.split())
    assert "change texts: repetition_penalty 1.3, suppress_tokens [5]" in said
    about = read_trace(job.out / "trace.parquet").meta["target"]
    assert about["ignored_generation_settings"]["repetition_penalty"] == 1.3


def test_contexts_begin_at_the_shortest_prompt(job: RecordingJob, measured: list[Grid]) -> None:
    prompts = job.out / "prompts.txt"
    prompts.write_text("def f\nThe quick fox\n")
    run_profile(replace(job, prompts=prompts))
    shortest = min(r.prompt_length for r in read_trace(job.out / "trace.parquet").requests)
    assert shortest == measured[0].contexts[0] < 32
