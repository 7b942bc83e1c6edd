"""A check of an engine that was stopped, or is to have more repeats, goes on after its runs."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

from profiler.checks.interleaved import DONE, PLACE
from profiler.engines import cells, loads, vllm
from profiler.engines import served as clients
from profiler.engines.drafts import Forced
from profiler.engines.loads import RunningLoad
from profiler.engines.served import CONTROL, Clients
from profiler.engines.session import FORCED, Setup, policy_from
from profiler.engines.texts import own_texts
from profiler.engines.vllm import engine
from profiler.engines.vllm import server as process
from tests.conftest import Ran, Run
from tests.stand_in_engine import TICK_S, Clock, Control, StandIn, write_measured_engine
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import Demand, LoadRun, ServedRun
from traces.store.files import read_latency, write_trace

LOADS, ARMS = 2, 2
PAIR = LOADS * ARMS
"""Runs of a repeat."""
MEASURED = (
    "load", "policy", "iterations", "throughputs", "ttft_s", "tpot_s", "e2e_s", "busy_s", "machine",
    "profile_error", "profile_speedup_error",
)  # fmt: skip
Checked = Callable[..., Ran]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of the stand-in's, which is every engine from now on."""
    Clock.use(monkeypatch)
    monkeypatch.setattr(engine, "VllmEngine", StandIn)
    run = tmp_path / "run"
    write_measured_engine(run)
    trace = synthetic_trace(0.7, requests=4, tokens=16, prompt_length=12, seed=3)
    write_trace(trace, tmp_path / "trace.parquet")
    return run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the engine really ran: an "x" per policy and load."""
    found: list[str] = []
    result = loads.RunningLoad.result

    def noted(load: loads.RunningLoad) -> LoadRun:
        found.append("x")
        return result(load)

    monkeypatch.setattr(loads.RunningLoad, "result", noted)
    return found


@pytest.fixture
def check(run: Run, tmp_path: Path) -> Checked:
    def checked(folder: Path, repeats: int, *more: object) -> Ran:
        policies = () if "--policy" in more else ("--policy", "fixed:gamma=2")
        return run(
            "validate", "--engine", "vllm", "--run", folder, "--trace",
            tmp_path / "trace.parquet", "--load", "closed:1,2", "--requests", 5, "--repeats",
            repeats, *policies, "--json", "-", *more,
        )  # fmt: skip

    return checked


def is_run(kept: Checkpoint) -> bool:
    return kept.folder.name.startswith(PLACE)


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a check once `count` runs are kept; those of a repeat are kept at its end."""
    put, runs = Checkpoint.put, [0]

    def interrupted(self: Checkpoint, name: str, arrays: Any) -> None:
        put(self, name, arrays)
        runs[0] += is_run(self)
        if runs[0] == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "put", interrupted)


REMEASURED: Any = pytest.mark.parametrize("more", [(), ("--remeasure",)], ids=["own", "between"])


@REMEASURED
@pytest.mark.parametrize("count", [PAIR, PAIR + 1])
def test_a_stopped_check_goes_on_as_if_it_had_not_been(
    more: tuple[str, ...], count: int, folder: Path, tmp_path: Path, check: Checked,
    ran: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    expected = check(other, 2, *more)
    assert len(ran) == 2 * PAIR
    with monkeypatch.context() as patch:
        stop_after(count, patch)
        stopped = check(folder, 2, *more)
    assert stopped.code == 130
    assert "the same command continues" in stopped.err
    [place] = folder.glob(f"{PLACE}-*")
    ran.clear()
    resumed = check(folder, 2, *more)
    assert len(ran) == PAIR
    assert f"continues after {count} of {2 * PAIR} runs: remove {place}" in resumed.said
    assert [row["rounds_differ"] for row in resumed.rows] == [0] * PAIR
    assert not list(folder.glob(f"{PLACE}-*"))
    if not more:
        assert resumed.rows == expected.rows
        return
    for row, whole in zip(resumed.rows, expected.rows, strict=True):
        assert {key: row[key] for key in MEASURED} == {key: whole[key] for key in MEASURED}
        # Sequences grow while the cells of a block are measured, in an order that is drawn.
        assert row["error"] == pytest.approx(whole["error"], abs=1e-3)
    own, whole = (read_latency(f / "latency-check.parquet").cells for f in (folder, other))
    counts = ["model", "phase", "batch", "new_tokens", "repeats"]
    assert own[counts].equals(whole[counts])


def test_a_finished_check_is_extended_by_more_repeats(
    folder: Path, tmp_path: Path, check: Checked, ran: list[str]
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    first = check(folder, 1)
    assert "the same command with more --repeats continues" in first.said
    assert {row["repeats"] for row in first.rows} == {1}
    ran.clear()
    more = check(folder, 3)
    assert len(ran) == 2 * PAIR
    assert f"continues after {PAIR} of {3 * PAIR} runs" in more.said
    assert more.rows == check(other, 3).rows
    # With no more repeats than there are, everything is measured again.
    ran.clear()
    again = check(folder, 3)
    assert len(ran) == 3 * PAIR
    assert f"continues after {3 * PAIR} of" not in again.said
    assert len(list(folder.glob(f"{DONE}-*"))) == 1


def test_finished_runs_stay_until_another_check_begins(
    folder: Path, check: Checked, ran: list[str]
) -> None:
    check(folder, 1)
    check(folder, 1, "--seed", 1)
    assert len(list(folder.glob(f"{DONE}-*"))) == 1
    ran.clear()
    assert f"of {2 * PAIR} runs" not in check(folder, 2).said
    assert len(ran) == 2 * PAIR


def test_an_engine_of_another_version_begins_anew(
    folder: Path, check: Checked, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newer(StandIn):
        def __init__(self, options: Any) -> None:
            super().__init__(options)
            self.meta["engine"]["version"] = "2"

    with monkeypatch.context() as patch:
        stop_after(PAIR, patch)
        check(folder, 2)
    monkeypatch.setattr(engine, "VllmEngine", Newer)
    ran.clear()
    assert "keeps unfinished runs with other options" in check(folder, 2).said
    assert len(ran) == 2 * PAIR
    monkeypatch.setattr(engine, "VllmEngine", StandIn)
    assert f"continues after {PAIR} of {2 * PAIR} runs" in check(folder, 2).said


def test_a_policy_of_ones_own_that_changed_begins_anew(
    folder: Path, tmp_path: Path, check: Checked, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from policies import Fixed\n"
        "class Mine(Fixed):\n"
        "    def __init__(self):\n"
        "        super().__init__({})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def checked(longest: int) -> Ran:
        (tmp_path / "own_rule.py").write_text(code.format(longest))
        sys.modules.pop("own_rule", None)
        return check(folder, 2, "--policy", "own_rule.Mine")

    with monkeypatch.context() as patch:
        stop_after(PAIR, patch)
        checked(2)
    ran.clear()
    assert "start from the beginning" in checked(3).said
    assert len(ran) == 2 * PAIR
    ran.clear()
    assert f"continues after {PAIR} of {2 * PAIR} runs" in checked(2).said
    assert len(ran) == PAIR


def test_a_run_that_could_not_be_written_is_not_there(
    folder: Path, tmp_path: Path, check: Checked, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = check(Path(shutil.copytree(folder, tmp_path / "other")), 2)
    savez, left = np.savez, [1 + PAIR]  # outputs, and a repeat's runs

    def full(file: Any, **arrays: Any) -> None:
        if not left[0]:
            file.write(b"PK half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        savez(file, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        failed = check(folder, 2)
    assert "No space left" in failed.refusal
    [place] = folder.glob(f"{PLACE}-*")
    assert len(list(place.glob("*.npz"))) == PAIR
    ran.clear()
    resumed = check(folder, 2)
    assert len(ran) == PAIR
    assert resumed.rows == expected.rows


def test_what_was_added_on_a_slower_machine_is_predicted_from_both_hours(
    folder: Path, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each repeat has as many sweeps, and none is left out for being of a slow hour."""
    advanced: list[float] = []
    block = cells.CellTimer.block

    def counted(self: cells.CellTimer, *given: Any) -> Any:
        advanced.append(Clock.slower)
        return block(self, *given)

    monkeypatch.setattr(cells.CellTimer, "block", counted)
    first = check(folder, 1, "--remeasure")
    assert max(abs(row["error"]) for row in first.rows) < 0.03
    Clock.slower = 1.5
    more = check(folder, 2, "--remeasure")
    assert advanced.count(1.0) == advanced.count(1.5) > 0
    for before, row in zip(first.rows, more.rows, strict=True):
        fast, slow = row["throughputs"]
        assert fast == before["throughput"]
        assert slow == pytest.approx(fast / 1.5, rel=0.01)
        # A cell is the middle of 1 and 1.5 times its seconds, throughput that of 1 and 1 / 1.5.
        assert row["error"] == pytest.approx(1 / 1.25 / ((1 + 1 / 1.5) / 2) - 1, abs=0.03)


def test_fewer_repeats_take_no_sweeps_of_others(
    folder: Path, tmp_path: Path, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    monkeypatch.setattr(loads, "SWEEPS", 1)
    expected = check(other, 1, "--remeasure")
    with monkeypatch.context() as patch:
        stop_after(2 * PAIR, patch)
        check(folder, 3, "--remeasure")
    Clock.slower = 2.0
    fewer = check(folder, 1, "--remeasure")
    for row, alone in zip(fewer.rows, expected.rows, strict=True):
        assert row["throughputs"] == alone["throughputs"]
        assert row["error"] == pytest.approx(alone["error"], abs=1e-3)


__all__ = ["check", "folder"]  # fixtures


class StandInClients(Clients):
    """Clients that step a stand-in themselves, and say what its server added."""

    loads: ClassVar[list[tuple[str, int]]] = []
    """Policy and requests of every load that was sent."""

    def __init__(self, server: Any, trace: Trace, device: str) -> None:
        del device
        self.server, self.trace, self.engine = server, trace, StandIn(server.options)

    def decide(self, policy: str) -> None:
        self.policy = policy

    def _sent(self, demand: Demand) -> Any:
        texts = own_texts(
            self.engine, self.trace, {j.sequence: self.prompts[j.sequence] for j in demand.jobs}
        )
        return [SimpleNamespace(sequence=i, tokens=text) for i, text in texts.items()], None

    def run(self, demand: Demand) -> ServedRun:
        self.loads.append((self.policy, len(demand.jobs)))
        forced = Forced.read(Path(self._drafts.removeprefix(FORCED)))
        setup, control = Setup(policy_from(self.policy), forced), Control()
        load = RunningLoad(self.engine, setup, demand, self.prompts, control)  # type: ignore[arg-type]
        load.go_on()
        ran = load.result()
        added = [TICK_S * i for i in range(len(demand.jobs))]
        return ServedRun(ran, added, [2 * TICK_S] * len(ran.steps), added)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the loads sent to a server (a stand-in); control loads have 8 requests."""

    @contextmanager
    def server(options: Any, folder: Path) -> Iterator[Any]:
        yield SimpleNamespace(options=options, folder=folder)

    monkeypatch.setattr(process, "VllmServer", server)
    monkeypatch.setattr(vllm, "check_installed", lambda server: None)
    monkeypatch.setattr(clients, "Clients", StandInClients)
    StandInClients.loads.clear()
    return StandInClients.loads


def test_a_server_s_check_goes_on_and_is_extended(
    folder: Path, tmp_path: Path, check: Checked, sent: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    expected = check(other, 2, "--http")
    assert expected.code == 0, expected.err
    controls = [load for load in sent if load[1] == CONTROL]
    assert len(controls) == LOADS * 3  # before either repeat, and after the last
    with monkeypatch.context() as patch:
        stop_after(PAIR + 1, patch)
        assert check(folder, 2, "--http").code == 130
    sent.clear()
    resumed = check(folder, 2, "--http")
    assert resumed.rows == expected.rows
    # One to read the recording; the loads left, and the control after them.
    assert len(sent) == 1 + (PAIR - 1) + LOADS
    sent.clear()
    assert {row["repeats"] for row in check(folder, 3, "--http").rows} == {3}
    assert len(sent) == 1 + PAIR + 2 * LOADS
