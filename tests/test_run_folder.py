"""A run folder holds one run: mixed ones are refused, finished ones kept, writers alone."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands.validate import flow, spot_check
from profiler.prompts import TEXTS, read_prompts
from profiler.recording.run import (
    BUNDLED,
    LOCK,
    NAME,
    RunInfo,
    claimed,
    only_writer,
    read_info,
)
from tests.conftest import SMALL_PROFILE, Run
from tests.forked import forked
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.files import read_latency, read_trace, write_latency, write_trace
from traces.store.recordings import find_latency, find_trace

RULE = ("--verify", "lossy-global", "--policy", "fixed:gamma=2")
DRAWN = ("--temperature", "1")


@pytest.fixture
def folder(small_run: Path, tmp_path: Path) -> Path:
    place = tmp_path / "run"
    shutil.copytree(small_run, place)
    return place


def test_files_of_a_run_share_an_identity(small_run: Path) -> None:
    run_id = read_info(small_run).run_id
    assert run_id
    assert read_trace(small_run / "trace.parquet").meta["run_id"] == run_id
    assert read_latency(small_run / "latency.parquet").meta["run_id"] == run_id
    assert not list(small_run.glob(".*"))


@pytest.mark.parametrize("more", [(), ("--verify", "typical"), ("--batch", "1")], ids=str)
def test_outputs_without_a_round_are_not_compared(
    folder: Path, run: Run, more: tuple[str, ...]
) -> None:
    trace = read_trace(folder / "trace.parquet")
    first = trace.columns["position"] == 0
    columns = {name: values[first] for name, values in trace.columns.items()}
    requests = [replace(r, tokens=1, max_new_tokens=1, ended="length") for r in trace.requests]
    write_trace(replace(trace, columns=columns, requests=requests), folder / "trace.parquet")
    ran = run("validate", "--run", folder, *more)
    assert "are too short for a round: there is nothing to predict" in ran.refusal


@pytest.mark.invariant(13)
def test_a_mixed_folder_is_refused_by_name(folder: Path, run: Run) -> None:
    latency = read_latency(folder / "latency.parquet")
    other = replace(latency, meta={**latency.meta, "run_id": "another"})
    write_latency(other, folder / "latency.parquet")
    for command in (["simulate", "--trace", folder], ["validate", "--run", folder]):
        ran = run(*command)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        for name in ("trace.parquet", "latency.parquet", "draftsim profile latency"):
            assert name in ran.err
    with pytest.raises(DraftsimError, match="are of two runs"):
        find_latency(folder)
    # What was meant can still be named by its file.
    files = ("--trace", folder / "trace.parquet", "--latency", folder / "latency.parquet")
    assert run("simulate", *files, "--policy", "fixed:gamma=2", "--json", "-").code == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"run_id": "another"}, "is of another run than"),
        ({"run_id": None}, "is of another run than"),
        ({"threads": 3}, "their threads is 3 and"),
        ({"dtype": "float16"}, "their dtype is 'float16' and 'float32'"),
        ({"target": -1}, "run.json has target=-1: copy it again"),
        ({"device": True}, "run.json has device=True: copy it again"),
        ({"threads": 10**11}, "run.json has threads=100000000000: copy it again"),
        ({"model": "x"}, "run.json does not have the fields"),
        ({"device": None}, "run.json names no device: copy it again"),
    ],
)
def test_a_damaged_run_file_is_named_before_any_work(
    folder: Path, changed: dict[str, object], message: str
) -> None:
    fields = json.loads((folder / NAME).read_text())
    fields |= changed
    if fields["device"] is None:
        del fields["device"]
    (folder / NAME).write_text(json.dumps(fields))
    with pytest.raises(DraftsimError, match=message):
        read_info(folder)


def _with_trace(folder: Path, trace: Trace) -> None:
    write_trace(trace, folder / "trace.parquet")


def test_validate_leaves_out_what_was_not_recorded_and_says_so(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with --max-gamma 2: its defaults and transformers' own schedules draft more."""
    trace = read_trace(folder / "trace.parquet")
    short = {name: values[trace.columns["offset"] < 2] for name, values in trace.columns.items()}
    _with_trace(folder, Trace(short, trace.requests, 2, trace.meta))
    notes: list[str] = []
    monkeypatch.setattr(spot_check, "note", notes.append)
    monkeypatch.setattr(flow, "note", notes.append)
    monkeypatch.setattr(spot_check, "ARMS", ("fixed:gamma=2", "fixed:gamma=4"))
    ran = run("validate", "--run", folder, "--repeats", 1, "--limit", 1, "--json", "-")
    assert {row["policy"] for row in ran.rows} >= {"autoregressive", "fixed:gamma=2"}
    assert "left out: fixed:gamma=4; drafts of up to 2 tokens were recorded" in notes
    assert any("transformers' own generation, heuristic schedule" in note for note in notes)


@pytest.mark.parametrize("more", [(), ("--batch", "1"), ("--verify", "lossy-global")])
def test_requests_of_one_id_are_refused_before_decoding(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    trace = read_trace(folder / "trace.parquet")
    same = [replace(request, id="same") for request in trace.requests]
    _with_trace(folder, Trace(trace.columns, same, trace.max_gamma, trace.meta))
    monkeypatch.setattr(RunInfo, "load", lambda self: pytest.fail("the pair was loaded"))
    ran = run("validate", "--run", folder, *more)
    assert "'same', and measured times are filed by them" in ran.refusal


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": "same", "prompt": "a"}', "", '{"id": "same", "prompt": "b"}'],
         r"line 3: has the id 'same' of line 1"),
        (['{"id": 2, "prompt": "a"}', '{"prompt": "b"}'], "line 2: has the id '2' of line 1"),
        (['{"turns": 5}'], "has no text under"), (['{"turns": {}}'], "has no text under"),
        (['{"prompt": "a", "id": []}'], r"'id' is \[\], expected text or a number"),
        (["[" * 100_000], "nested deeper than 64 levels"),
        (['{"prompt": "a", "answer": ' + "9" * 5000 + "}"], "a number of 5000 digits"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_told_apart_or_read(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DraftsimError, match=message):
        read_prompts(file)


def test_an_older_recording_is_given_the_signals_it_lacks(folder: Path, run: Run) -> None:
    file = folder / "trace.parquet"
    trace = read_trace(file)
    columns = {n: v for n, v in trace.columns.items() if n != "draft_top10_logprob"}
    write_trace(replace(trace, columns=columns), file)
    simulate = ("simulate", "--trace", folder, "--policy", "llama-cpp:p_min=0.5", "--json", "-")
    add = ("profile", "--target", "bundled", "--draft", "bundled", "--out", folder)
    refused = run(*simulate)
    assert refused.code == 2
    said = refused.err.splitlines()[-1]  # the machine may have been disturbed, which a line says
    assert "reads top10_prob" in said
    assert "--signals-only" in said
    assert run(*simulate[:4], "llama-cpp", "--json", "-").code == 0  # which reads none
    ran = run(*add, "--signals-only").ok()
    assert "added draft_top10_logprob" in ran.err
    kept = file.read_bytes()
    found = read_trace(file).columns["draft_top10_logprob"]
    np.testing.assert_allclose(found, trace.columns["draft_top10_logprob"], atol=1e-3)
    assert run(*simulate).code == 0
    assert "has all draft signals" in run(*add, "--signals-only").err
    assert file.read_bytes() == kept
    for more in ("--latency-only", "--exit-layers"):
        assert run(*add, "--signals-only", more).code == 2


def test_signals_are_added_by_the_draft_model_that_was_recorded(folder: Path, run: Run) -> None:
    file = folder / "trace.parquet"
    trace = read_trace(file)
    columns = {n: v for n, v in trace.columns.items() if n != "draft_top10_logprob"}
    other = {**trace.meta["draft"], "fingerprint": "another"}
    write_trace(Trace(columns, trace.requests, 4, {**trace.meta, "draft": other}), file)
    add = ("profile", "--target", "bundled", "--draft", "bundled", "--signals-only", "--out")
    ran = run(*add, folder)
    assert "the draft's weights differ" in ran.refusal
    assert "holds no recording" in run(*add, folder / "empty").err


def test_latencies_are_measured_for_what_was_recorded(folder: Path, run: Run) -> None:
    kept = (folder / "trace.parquet").read_bytes()
    (folder / "latency.parquet").unlink()
    ran = run(*SMALL_PROFILE, "--latency-only", "--out", folder).ok()
    assert "are measured, its recordings are kept" in ran.err
    assert (folder / "trace.parquet").read_bytes() == kept
    find_latency(folder)
    (folder / "trace.parquet").unlink()
    (folder / "latency.parquet").unlink()
    ran = run(*SMALL_PROFILE, "--latency-only", "--out", folder)
    assert "holds no recording: make one with `draftsim profile pair`" in ran.refusal


def test_older_files_are_held_by_their_weights(folder: Path) -> None:
    latency, trace = read_latency(folder / "latency.parquet"), read_trace(folder / "trace.parquet")
    bare = {k: v for k, v in latency.meta.items() if k != "run_id"}
    write_latency(replace(latency, meta=bare), folder / "latency.parquet")
    find_latency(folder)  # they agree in what they hold
    other = {**bare, "target": {**bare["target"], "fingerprint": "0" * 16}}
    write_latency(replace(latency, meta=other), folder / "latency.parquet")
    with pytest.raises(DraftsimError, match="the target's weights differ"):
        find_latency(folder)
    # Logs of other tools know neither.
    write_trace(Trace(trace.columns, trace.requests, trace.max_gamma, {}), folder / "trace.parquet")
    find_latency(folder)
    find_trace(folder)


def test_a_finished_folder_is_recorded_over_only_with_force(folder: Path, run: Run) -> None:
    before = {f.name: f.read_bytes() for f in folder.glob("*.parquet")}
    ran = run(*SMALL_PROFILE, "--out", folder).ok()
    assert "kept: --force records it again" in ran.err
    assert {f.name: f.read_bytes() for f in folder.glob("*.parquet")} == before
    ran = run(*SMALL_PROFILE, "--max-gamma", "3", "--out", folder)
    assert "other options or prompts" in ran.refusal
    assert "--force" in ran.err
    assert {f.name: f.read_bytes() for f in folder.glob("*.parquet")} == before
    # Nor does it go where what was asked for cannot be recorded.
    ran = run(*SMALL_PROFILE, "--max-new-tokens", "5000", "--force", "--out", folder)
    assert "exceed the pair's context of" in ran.refusal
    assert {f.name: f.read_bytes() for f in folder.glob("*.parquet")} == before
    ran = run(*SMALL_PROFILE, "--max-new-tokens", "5000", "--out", folder / "new")
    assert "exceed the pair's context of" in ran.refusal
    assert not (folder / "new").exists()
    # Only the stage that is missing is done again.
    (folder / "latency.parquet").unlink()
    assert run(*SMALL_PROFILE, "--out", folder).code == 0
    assert (folder / "trace.parquet").read_bytes() == before["trace.parquet"]
    find_latency(folder)
    old = read_info(folder).run_id
    anew = ("--max-gamma", "3", "--limit", "1", "--force")
    assert run(*SMALL_PROFILE, *anew, "--out", folder).code == 0
    assert read_info(folder).run_id != old
    assert read_trace(folder / "trace.parquet").max_gamma == 3
    assert not list(folder.glob("starts-*"))
    find_latency(folder)


@pytest.mark.parametrize("digests", [True, False], ids=["new", "old"])
def test_other_texts_of_the_same_ids_are_not_taken_for_the_recorded(
    folder: Path, run: Run, tmp_path: Path, digests: bool
) -> None:
    trace = read_trace(folder / "trace.parquet")
    assert trace.meta[TEXTS].keys() == {request.id for request in trace.requests}
    if not digests:  # a recording from before they were kept
        meta = {name: value for name, value in trace.meta.items() if name != TEXTS}
        _with_trace(folder, replace(trace, meta=meta))
    rows = [json.loads(line) for line in (BUNDLED / "prompts.jsonl").read_text().splitlines()]
    file = tmp_path / "prompts.jsonl"
    command = (*SMALL_PROFILE, "--prompts", file, "--out", folder)
    kept = (folder / "trace.parquet").read_bytes()
    for change in ("", "prompt", "category"):
        changed = [{n: v + "!" * (n == change) for n, v in row.items()} for row in rows]
        file.write_text("\n".join(map(json.dumps, changed)))
        alone, decoded, sampled = run(*command), run(*command, *RULE), run(*command, *RULE, *DRAWN)
        if not change:
            assert "is finished and kept" in alone.ok().said
            assert not {decoded.code, sampled.code} - {0}
            (folder / "sampled.parquet").unlink()
            continue
        assert "was recorded on other texts or categories" in alone.refusal
        assert "was not recorded on prompt" in decoded.refusal
        assert "was not recorded on prompt" in sampled.refusal
        assert not (folder / "sampled.parquet").exists()
    assert (folder / "trace.parquet").read_bytes() == kept


def test_options_of_a_finished_recording_are_not_ignored(folder: Path, run: Run) -> None:
    pair = ("--target", "bundled", "--draft", "bundled", "--out", folder, "--prompts")
    command = ("profile", "decode", *pair, "unused", *RULE)
    for given, was in (
        (("--max-new-tokens", 128), "with --max-new-tokens 10"),
        (("--max-gamma", 3), "with --max-gamma 4"),
        (("--chat",), "without it"),
    ):
        assert (
            f"{given[0]}: {folder} is complete, and was recorded {was}"
            in run(*command, *given).refusal
        )
    drawn = ("profile", "decode", *pair, SMALL_PROFILE[6], "--limit", 2, *RULE, *DRAWN)
    run(*drawn, "--seed", 1).ok()
    sampled = read_trace(folder / "sampled.parquet")
    assert (sampled.requests[0].max_new_tokens, sampled.max_gamma) == (10, 4)
    assert "was recorded with --seed 1: leave --seed out" in run(*drawn, "--seed", 0).refusal
    run(*drawn).ok()
    # Outputs of other prompts, which such a command once recorded.
    other = [replace(request, id=f"other-{request.id}") for request in sampled.requests]
    write_trace(replace(sampled, requests=other), folder / "sampled.parquet")
    assert "which the trace lacks: remove that file" in run(*drawn).refusal


def test_another_pair_does_not_get_the_folder(folder: Path) -> None:
    other = RunInfo("elsewhere", "bundled", threads=1)
    with pytest.raises(DraftsimError, match=r"another pair.*--force"):
        claimed(other, folder)
    assert claimed(other, folder, force=True).run_id != read_info(folder).run_id


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", tmp_path / "said"

    def second() -> None:
        with pytest.raises(DraftsimError) as refused, only_writer(folder):
            pass
        said.write_text(str(refused.value))

    with only_writer(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        with forked(second):
            pass
        assert f"is being written by process {os.getpid()} on " in said.read_text()
    assert not folder.exists()
    with only_writer(folder):
        pass


def test_a_lock_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    # The system has released the lock of a process that was killed; its file is all that is left.
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "long ago"}))
    with only_writer(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    ran = run(*SMALL_PROFILE, "--out", tmp_path / "file" / "run")
    assert "cannot be written to" in ran.refusal
