"""A check that was stopped goes on where it stopped, as if it had not been."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from policies import parse_policy
from policies.rules.registry import parse_rule
from profiler.checks.interleaved import PLACE, unfinished
from profiler.checks.spot_check import DraftModel, Measured, PlannedPolicy, run_requests
from profiler.recording.run import BUNDLED
from profiler.sources.run import SourceRunner
from tests import bundled
from tests.conftest import Run
from tests.shared import made_once
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.run import replay
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency
from traces.store.outputs import find_runs, read_run

LEARNERS = (
    "confidence:roc_update=next_call", "ucb:learns_across_requests=true",
    "exp3:learns_across_requests=true",
)  # fmt: skip
TEXTS = ("fixed:gamma=3", *LEARNERS)
REQUESTS, REPEATS = 3, 2
WHAT_RAN = ["policy", "verify", "forced", "repeat", "request", "rounds"]


def decoded(
    trace: Trace, kept: Checkpoint | None, stop_after: int | None = None,
    runs: Sequence[PlannedPolicy] | None = None,
) -> Measured:  # fmt: skip
    """Every planned on every request, stopped in the middle of a request's runs if asked."""
    done = 0

    def advance() -> None:
        nonlocal done
        if done == stop_after:
            raise KeyboardInterrupt
        done += 1

    runs = runs or [
        PlannedPolicy(text, parse_policy(text, max_gamma=trace.max_gamma)) for text in TEXTS
    ]
    return run_requests(bundled.pair(), trace, runs, repeats=REPEATS, advance=advance, kept=kept)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs whose decoders were opened."""
    names: list[str] = []
    draft_model, source = DraftModel.decoder, SourceRunner.decoder

    def of_draft_model(self: DraftModel, planned: PlannedPolicy, *rest: Any) -> Any:
        names.append(planned.name)
        return draft_model(self, planned, *rest)

    def of_source(self: SourceRunner, *given: Any) -> Any:
        names.append(given[0].name)
        return source(self, *given)

    monkeypatch.setattr(DraftModel, "decoder", of_draft_model)
    monkeypatch.setattr(SourceRunner, "decoder", of_source)
    return names


@cache
def whole(sampling: Sampling) -> tuple[Trace, Measured]:
    """Requests, and what comes of decoding them in one go."""
    trace = bundled.record(REQUESTS, sampling, max_new=12)
    return trace, decoded(trace, None)


@pytest.mark.parametrize(("sampling", "steps"), [(GREEDY, 2), (Sampling(1.0), 5)])
def test_learners_go_on_as_if_they_had_not_been_stopped(
    sampling: Sampling, steps: int, tmp_path: Path, opened: list[str]
) -> None:
    trace, expected = whole(sampling)
    for name in LEARNERS:  # what was learnt before shows
        rounds = replay(trace, parse_policy(name, max_gamma=trace.max_gamma)).rounds
        alone = replay(trace.select([2]), parse_policy(name, max_gamma=trace.max_gamma)).rounds
        later = rounds["drafted"][rounds["request"] == 2]
        assert later.tolist() != alone["drafted"].tolist()
    kept = Checkpoint(tmp_path / "kept", {})
    with pytest.raises(KeyboardInterrupt):
        decoded(trace, kept, steps * len(TEXTS) + 2)
    assert len(kept.names()) == steps
    opened.clear()
    resumed = decoded(trace, kept)
    left = REQUESTS * REPEATS - steps
    for name in TEXTS:
        # Only who learns across requests runs again what it ran, and only of the repeat under way.
        assert opened.count(name) == left + (steps % REQUESTS if name in LEARNERS else 0)
        np.testing.assert_array_equal(resumed.logs[name].rounds, expected.logs[name].rounds)
        assert resumed.outputs[name] == expected.outputs[name]
    assert resumed.times[WHAT_RAN].equals(expected.times[WHAT_RAN])
    assert resumed.times.dtypes.equals(expected.times.dtypes)
    for figure in ("runs", "repeated"):
        assert resumed.machine[figure] == expected.machine[figure]


@pytest.mark.parametrize("steps", [2, REQUESTS, REQUESTS + 1])
@pytest.mark.parametrize(
    ("sampling", "policy", "rule"),
    [
        (GREEDY, "fixed:gamma=3", "csd:threshold=0"),
        (GREEDY, "fixed:gamma=3", "csd:threshold=0,capacity=4"),
        (GREEDY, LEARNERS[1], "csd:threshold=0"),
        (GREEDY, LEARNERS[1], "cm-asd"),
        (Sampling(1.0), "fixed:gamma=3", "csd:threshold=0"),
        (Sampling(1.0), "fixed:gamma=3", "lenience:mode=sample"),
    ],
)  # fmt: skip
def test_a_rule_goes_on_as_if_it_had_not_been_stopped(
    sampling: Sampling, policy: str, rule: str, steps: int, tmp_path: Path, opened: list[str]
) -> None:
    trace, _ = whole(sampling)
    planned = PlannedPolicy(
        policy, parse_policy(policy, max_gamma=trace.max_gamma), parse_rule(rule)
    )
    runs = [PlannedPolicy("autoregressive", parse_policy("autoregressive")), planned]
    expected, kept = decoded(trace, None, runs=runs), Checkpoint(tmp_path / "kept", {})
    with pytest.raises(KeyboardInterrupt):
        decoded(trace, kept, steps * len(runs), runs)
    assert len(kept.names()) == steps
    opened.clear()
    resumed = decoded(trace, kept, runs=runs)
    again = steps % REQUESTS if policy in LEARNERS else 0  # of the repeat under way
    assert opened.count(policy) == REPEATS * REQUESTS - steps + again
    assert resumed.times[WHAT_RAN].equals(expected.times[WHAT_RAN])
    mine, own = (measured.logs[planned.label] for measured in (resumed, expected))
    np.testing.assert_array_equal(mine.rounds, own.rounds)
    np.testing.assert_array_equal(mine.mismatched, own.mismatched)
    assert resumed.outputs == expected.outputs
    assert resumed.log_likelihoods == expected.log_likelihoods
    if rule.startswith("csd"):
        assert len(own.rule.table) > 0
        assert vars(mine.rule.table) == vars(own.rule.table)


def test_a_memory_that_is_not_learnt_again_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above would fail if a rule forgot what it had learnt."""
    trace, _ = whole(GREEDY)
    fixed = parse_policy("fixed:gamma=3", max_gamma=trace.max_gamma)
    planned = PlannedPolicy("fixed:gamma=3", fixed, parse_rule("csd:threshold=0"))
    kept = Checkpoint(tmp_path / "kept", {})
    first = run_requests(bundled.pair(), trace, [planned], repeats=1, kept=kept)
    monkeypatch.setattr("profiler.checks.spot_check.judge_again", lambda *_: None)
    again = run_requests(bundled.pair(), trace, [planned], repeats=1, kept=kept)
    tables = (measured.logs[planned.label].rule.table for measured in (first, again))
    assert [len(table) > 0 for table in tables] == [True, False]


def test_what_ran_keeps_its_seconds_and_counts(tmp_path: Path) -> None:
    trace, _ = whole(GREEDY)
    kept = Checkpoint(tmp_path / "kept", {})
    first = decoded(trace, kept)
    again = decoded(trace, kept)
    assert again.times.equals(first.times)
    beside = ("steal", "others")
    assert {k: v for k, v in again.machine.items() if k not in beside} == {
        k: v for k, v in first.machine.items() if k not in beside
    }


@pytest.fixture
def folder(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> Path:
    """A profile of short outputs; one with the cells of sources for what asks for a source."""

    def make(folder: Path) -> None:
        prompts = ("--prompts", BUNDLED / "prompts.jsonl", "--limit", 2, "--max-new-tokens", 8)
        run("profile", *bundled.named(), *prompts, "--max-gamma", 4, "--out", folder).ok()

    if "source" in request.node.name:
        run_folder = request.getfixturevalue("small_run")
    else:
        run_folder = made_once("short-outputs", make)
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def stopped(
    folder: Path, run: Run, options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...] | None = None, after: int = 3,
) -> Path:  # fmt: skip
    """Where a check keeps its runs that is stopped once `after` requests' runs are kept."""
    put, steps = Checkpoint.put, [0]

    def interrupted(self: Checkpoint, name: str, arrays: Any) -> None:
        put(self, name, arrays)
        steps[0] += self.folder.name.startswith(PLACE)
        if steps[0] == after:
            # What a crash in the middle of writing leaves.
            (self.folder / "000-00009.part").write_bytes(b"PK half of it")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "put", interrupted)
        ran = run(*(command or ("validate", "--run", folder)), *options)
    assert ran.code == 130
    assert "the same command continues" in ran.err
    [place] = folder.glob(f"{PLACE}-*")
    return place


DRAFT_MODEL = ("--policy", "fixed:gamma=2", "--policy", "hf-heuristic:persist=persistent")


@pytest.mark.parametrize(
    ("more", "file", "name", "count"),
    [
        (DRAFT_MODEL, "measured", "fixed:gamma=2", 3),
        ((*DRAFT_MODEL, "--forced"), "measured-forced", "fixed:gamma=2", 3),
        # Tried for each policy before all runs; then the learner decodes one request again.
        ((*DRAFT_MODEL, "--source", "pld"), "measured-sources", "pld", 2 + 1 + 6),
    ],
    ids=["draft model", "forced", "source"],
)  # fmt: skip
def test_a_stopped_check_goes_on_with_the_same_command(
    more: tuple[str, ...], file: str, name: str, count: int, folder: Path, run: Run,
    opened: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = (*more, "--repeats", 3, "--no-assisted", "--json", "-")
    place = stopped(folder, run, options, monkeypatch)
    opened.clear()
    ran = run("validate", "--run", folder, *options)
    assert f"continues after 9 of 18 runs: remove {place} to start again" in ran.said
    assert len(ran.rows) == 3
    for row in ran.rows:
        assert row["rounds_differ"] == row.get("texts_diverged", 0) == 0
        assert row["measured_s"] > 0
    assert opened.count("autoregressive") == 3
    assert opened.count(name) == count
    times = read_measured(folder / f"{file}.parquet").times
    assert len(times) == 18
    assert not times.duplicated(["policy", "repeat", "request"]).any()
    assert not list(folder.glob(".*"))


LOSSY = ("--verify", "csd:threshold=0", "--policy", "fixed:gamma=2")


def test_a_stopped_check_of_a_rule_goes_on(
    folder: Path, run: Run, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*LOSSY, "--repeats", 3, "--json", "-")
    place = stopped(folder, run, options, monkeypatch)
    opened.clear()
    ran = run("validate", "--run", folder, *options)
    assert f"continues after 6 of 12 runs: remove {place} to start again" in ran.said
    assert opened.count("autoregressive") == opened.count("fixed:gamma=2") == 3
    assert len(ran.rows) == 2
    times = read_measured(folder / "measured-lossy.parquet").times
    times = times.sort_values(["policy", "request"])
    once = [times.loc[times["repeat"] == repeat, "rounds"].tolist() for repeat in range(3)]
    assert once[0] == once[1] == once[2]  # each begins without what was learnt
    assert not list(folder.glob(".*"))


def test_a_stopped_decoding_under_a_rule_goes_on(
    folder: Path, run: Run, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("profile", *bundled.named(), "--prompts", "unused", "--out", folder)
    whole_folder = Path(shutil.copytree(folder, folder.parent / "whole"))
    run(*command[:-1], whole_folder, *LOSSY).ok()
    [expected] = map(read_run, find_runs(whole_folder))
    place = stopped(folder, run, LOSSY, monkeypatch, command, after=1)
    assert not find_runs(folder)
    opened.clear()
    ran = run(*command, *LOSSY).ok()
    assert f"continues after 1 of 2 runs: remove {place} to start again" in ran.said
    assert opened.count("fixed:gamma=2") == 1
    [again] = map(read_run, find_runs(folder))
    np.testing.assert_array_equal(again.log.rounds, expected.log.rounds)
    assert list(again.outputs) == list(expected.outputs)
    assert again.meta["memory"] == expected.meta["memory"]
    assert not list(folder.glob(".*"))


def test_what_was_decoded_is_kept_until_it_is_written(
    folder: Path, run: Run, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("profile", *bundled.named(), "--prompts", "unused", "--out", folder, *LOSSY)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("commands.profile.recording.write_run", full)
        assert run(*command).code == 2
    opened.clear()
    assert "continues after 2 of 2 runs" in run(*command).ok().said
    assert not opened
    assert len(find_runs(folder)) == 1


@pytest.mark.parametrize("changed", [False, True])
def test_runs_under_another_memory_are_others(
    changed: bool, folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory.npz"

    def calibrate(*more: object) -> None:
        run("calibrate-memory", "--trace", folder, "--out", memory, *more).ok()

    calibrate()
    command = ("profile", *bundled.named(), "--prompts", "unused", "--out", folder)
    options = (*LOSSY, "--memory", memory)
    stopped(folder, run, options, monkeypatch, command, after=1)
    if changed:
        calibrate("--capacity", 1)
    said = run(*command, *options).ok().said
    assert ("start from the beginning" if changed else "continues after 1 of 2 runs") in said


def test_a_stopped_check_of_batches_goes_on(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = ("--policy", "fixed:gamma=2", "--policy", "confidence-freeze:gamma=4")
    options = ("--batch", 1, *policies, "--repeats", 2, "--json", "-")
    place = stopped(folder, run, options, monkeypatch)
    ran = run("validate", "--run", folder, *options)
    assert f"continues after 9 of 12 runs: remove {place} to start again" in ran.said
    assert [row["rounds_differ"] for row in ran.rows] == [0, 0, 0]
    times = read_measured(folder / "measured_batches.parquet").times
    assert len(times) == 12
    assert not times.duplicated(["policy", "batch", "repeat", "request"]).any()
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("more", "file"), [(("--no-assisted",), "measured"), (("--batch", 1), "measured_batches")]
)
def test_a_forced_check_leaves_the_times_of_a_greedy_one(
    more: tuple[object, ...], file: str, folder: Path, run: Run
) -> None:
    options = ("validate", "--run", folder, "--policy", "fixed:gamma=2", "--repeats", 1, *more)
    run(*options).ok()
    greedy = (folder / f"{file}.parquet").read_bytes()
    run(*options, "--forced").ok()
    assert (folder / f"{file}.parquet").read_bytes() == greedy
    assert not read_measured(folder / f"{file}.parquet").times["forced"].any()
    assert read_measured(folder / f"{file}-forced.parquet").times["forced"].all()


def test_another_check_begins_anew_and_leaves_the_unfinished_one(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--policy", "fixed:gamma=2", "--repeats", 2, "--no-assisted", "--json", "-")
    place = stopped(folder, run, options, monkeypatch)
    for other in (("--limit", 1), ("--forced", "--repeats", 1)):
        ran = run("validate", "--run", folder, *options, *other).ok()
        assert f"{place} keeps unfinished runs with other options" in ran.said
        assert "these runs start from the beginning" in ran.said
        assert list(folder.glob(f"{PLACE}-*")) == [place]
    assert "continues after 6 of 8 runs" in run("validate", "--run", folder, *options).said
    assert not list(folder.glob(f"{PLACE}-*"))


def test_a_policys_own_file_that_changed_since_is_another_check(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from policies.core import DraftPolicy\n"
        "class Mine(DraftPolicy):\n"
        "    def keep_drafting(self, draft):\n"
        "        return len(draft) < {}\n"
    )
    own = tmp_path / "mine.py"
    own.write_text(code.format(2))
    options = ("--policy", f"{own}:Mine", "--repeats", 2, "--no-assisted")
    stopped(folder, run, options, monkeypatch)
    written = own.stat()
    own.write_text(code.format(3))
    # What was compiled of a file as long, written in the same second, is not taken for this one.
    os.utime(own, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert "start from the beginning" in run("validate", "--run", folder, *options).said
    own.write_text(code.format(2))
    assert "continues after 6 of 8 runs" in run("validate", "--run", folder, *options).said


def test_runs_of_another_version_are_another_check(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--policy", "fixed:gamma=2", "--repeats", 2, "--no-assisted")
    stopped(folder, run, options, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("profiler.checks.interleaved.version", lambda: "another")
        assert "start from the beginning" in run("validate", "--run", folder, *options).said
    assert "continues after 6 of 8 runs" in run("validate", "--run", folder, *options).said


@pytest.mark.parametrize("more", [(), ("--source", "pld")], ids=["draft model", "source"])
def test_sweeps_between_the_runs_are_kept_with_them(
    more: tuple[str, ...], folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.validate.flow.SWEEPS", 2)
    monkeypatch.setattr("commands.validate.flow.FEWEST", 2)
    options = (
        "--policy", "fixed:gamma=2", *more, "--repeats", 2, "--no-assisted", "--remeasure",
    )  # fmt: skip
    place = stopped(folder, run, options, monkeypatch)
    kept = {p: np.load(p)["samples"] for p in place.rglob("latency.npz")}
    assert len(kept) == 1 + len(more) // 2
    assert {len(samples) for samples in kept.values()} == {1}
    put, last = Checkpoint.put, dict[Path, Any]()

    def seen(self: Checkpoint, name: str, arrays: Any) -> None:
        last[self.folder / f"{name}.npz"] = arrays.get("samples")
        put(self, name, arrays)

    monkeypatch.setattr(Checkpoint, "put", seen)
    assert run("validate", "--run", folder, *options).code == 0
    for path, samples in kept.items():
        assert len(last[path]) == 2
        np.testing.assert_array_equal(last[path][:1], samples)
    cells = read_latency(folder / "latency-check.parquet").cells
    assert cells.loc[cells["phase"] == "forward", "repeats"].ge(2).any()
    assert not list(folder.glob(".*"))


def test_nothing_is_left_of_a_check_without_runs(tmp_path: Path) -> None:
    said: list[str] = []

    def failing(error: BaseException) -> None:
        with unfinished(tmp_path, {"arms": ["one"]}, 3, said.append) as kept:
            kept.within("passes").put("latency", {"samples": np.zeros(2)})
            raise error

    for error in (DraftsimError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            failing(error)
        assert not list(tmp_path.iterdir())
    assert not said
