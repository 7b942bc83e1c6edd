"""Real runs under rules as they are kept: read back, judged, and used by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from profiler.checks.spot_check import real_run
from profiler.recording.run import RunInfo, write_info
from tests import bundled
from tests.conftest import Run
from tests.rule_runs import decode, short_trace
from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.store.files import write_latency, write_trace
from traces.store.outputs import file_name, find_runs, quality, read_run, write_run


def test_runs_are_kept_with_their_outputs(tmp_path: Path) -> None:
    trace = short_trace()
    planned, measured = decode("lossy-global", trace)
    run = real_run(bundled.pair(), trace, planned, measured, {"note": "here"})
    path = write_run(run, tmp_path)
    assert path.stem == file_name(run.log) == "fixed_gamma-5+lossy-global"
    assert find_runs(tmp_path) == [path]
    again = read_run(path)
    np.testing.assert_array_equal(again.log.rounds, run.log.rounds)
    np.testing.assert_array_equal(again.log.mismatched, run.log.mismatched)
    assert list(again.outputs) == list(run.outputs)
    assert again.meta["note"] == "here"
    pytest.importorskip("sacrebleu")
    assert quality(again.outputs, trace) == quality(run.outputs, trace)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(FileError, match="record the run again"):
        read_run(path)
    path.with_suffix(".json").unlink()
    with pytest.raises(FileError, match="profile decode --verify"):
        read_run(path)


def test_quality_of_the_greedy_output_is_perfect() -> None:
    pytest.importorskip("sacrebleu")
    trace = short_trace()
    planned, measured = decode("csd:threshold=inf", trace)
    run = real_run(bundled.pair(), trace, planned, measured, {})
    seen = quality(run.outputs, trace)
    assert seen.agreement == 1
    assert seen.relative_bleu == pytest.approx(100)
    assert seen.log_likelihood == pytest.approx(seen.reference_log_likelihood, abs=1e-4)
    with pytest.raises(DraftsimError, match="no request"):
        quality(run.outputs, trace.select([0]))


def test_the_commands_record_price_validate_and_calibrate(run: Run, tmp_path: Path) -> None:
    """The exact way for lossy rules, end to end, on a folder that is already profiled."""
    trace = short_trace()
    write_trace(trace, tmp_path / "trace.parquet")
    write_latency(LatencyTable.constant(0.0143, 0.00176, 0.0150), tmp_path / "latency.parquet")
    write_info(RunInfo("bundled", "bundled", threads=1), tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        ran = run(*arguments)
        return ran.code, ran.out, ran.said

    again = (
        "profile", "--target", "bundled", "--draft", "bundled", "--prompts", "unused", "--out",
        tmp_path,
    )  # fmt: skip
    memory = tmp_path / "memory.npz"
    code, _, said = call(
        "calibrate-memory", "--trace", tmp_path, "--out", memory, "--policy", "fixed"
    )
    assert (code, "3 prompts" in said) == (0, True)
    rule = ("--verify", "csd:threshold=0", "--policy", "fixed:gamma=4", "--memory", memory)
    code, _, said = call(*again, *rule)
    assert code == 0, said
    [path] = find_runs(tmp_path)
    kept = read_run(path)
    assert (kept.log.policy, kept.log.verify) == ("fixed:gamma=4", "csd:threshold=0")
    assert kept.meta["memory_file"] == "memory.npz"
    assert len(kept.meta["memory"]["sizes"]) == 3

    code, out, said = call("simulate", "rounds", tmp_path, "--json", "-", "--resamples", 5)
    assert code == 0, said
    plain, priced = json.loads(out)["results"]
    assert plain["policy"] == "autoregressive"
    assert (priced["rounds"], priced["fidelity"]) == (len(kept.log), "exact")
    assert priced["tokens"] == kept.log.rounds["emitted"].sum()

    code, out, said = call("simulate", "--trace", tmp_path, *rule, "--json", "-")
    assert code == 0, said
    replayed = json.loads(out)["results"][1]
    assert replayed["fidelity"] == "approximate"
    # A memory by itself means the rule that has one.
    alone = ("simulate", "--trace", tmp_path, *rule[2:], "--json", "-")
    assert json.loads(call(*alone)[1])["results"][1]["verify"] == "csd"

    code, out, said = call("validate", "--run", tmp_path, *rule, "--repeats", 1, "--json", "-")
    assert code == 0, said
    row = json.loads(out)["results"][1]
    real = kept.log.rounds["accepted"].mean()
    assert row["accepted_per_round"] == pytest.approx(real)
    assert row["bias"] == pytest.approx(replayed["accepted"] / replayed["rounds"] / real - 1)
    assert 0 <= row["agreement"] <= 1
    assert row["log_likelihood"] < 0

    # A stopped command is repeated: what it finished is not decoded again, the rest is.
    more = ("--verify", "lossy-global", "--policy", "fixed:gamma=4")
    code, _, said = call(*again, *more)
    assert (code, len(find_runs(tmp_path))) == (0, 2), said
    first = {file: file.stat().st_mtime_ns for file in find_runs(tmp_path)}
    code, _, said = call(*again, *more, "--policy", "fixed:gamma=2")
    assert (code, "is finished and kept:" in said) == (0, True), said
    assert len(find_runs(tmp_path)) == 3
    assert {file: file.stat().st_mtime_ns for file in first} == first
    damaged = next(file for file in first if "lossy-global" in file.name)
    damaged.with_suffix(".json").unlink()
    code, _, said = call(*again, *more)
    assert (code, "finished and kept:" in said.replace("is complete", "")) == (0, False), said
    read_run(damaged)

    for wrong, what in (
        ((*again, "--verify", "exact"), "is lossless"),
        ((*again, "--policy", "fixed"), "--policy belongs to `draftsim profile decode`"),
        ((*again, "--method", "gammatune"), "is lossless"),
        ((*again, "--device", "cuda", "--verify", "typical"), "another pair"),
        (("simulate", "--trace", tmp_path, "--verify", "cds"), "did you mean 'csd'"),
        (("simulate", "rounds", tmp_path / "rounds"), "holds no recorded rounds"),
        (("simulate", "rounds", "smollm2-cp"), "did you mean 'smollm2-cpu'"),
        (
            ("validate", "--run", tmp_path, "--verify", "typical", "--forced"),
            "--verify chooses `draftsim validate lossy`: drop one of them",
        ),
    ):
        code, _, said = call(*wrong)
        assert (code, what in said) == (2, True), (wrong, said)


def test_rounds_of_a_bundled_recording_are_found_by_its_name(run: Run) -> None:
    ran = run("simulate", "rounds", "bundled", "--json", "-", "--resamples", 5)
    scored = [row for row in ran.rows if row["relative_bleu"] is not None]
    decoded = {(row["policy"], row["verify"]) for row in scored}
    assert {("fixed:gamma=6", "csd:threshold=1"), ("cm-asd", "cm-asd")} <= decoded
    other = run("simulate", "rounds", "bundled", "--trace", "smollm2-cpu")
    assert other.refusal.endswith("with their own trace: drop --trace smollm2-cpu")
