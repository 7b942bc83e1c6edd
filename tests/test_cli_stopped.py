"""Commands that are told to end, by a signal or by code of the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import draftsim
from policies import Fixed
from tests.conftest import ROOT, Run, Serve
from tests.kills import left_behind, session
from traces.store.recordings import Bundled

STOPPED = (
    "draftsim: stopped; nothing is half-written, and the same command continues where it can\n"
)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", CODES)
def test_a_signal_stops_as_ctrl_c_does(
    number: signal.Signals, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned: list[bool] = []

    def stopped() -> None:
        try:
            # As `timeout` does: to the process, and to its group.
            for _ in range(1 if number == signal.SIGINT else 2):
                os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            time.sleep(0.1)
            cleaned.append(True)

    # The program that starts the tests may have had it ignored, as a shell does in the background.
    first = signal.signal(
        number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    )
    before = {one: signal.getsignal(one) for one in CODES}
    monkeypatch.setattr("traces.store.recordings.recordings", stopped)
    ran = run("list")
    assert (ran.code, ran.out, ran.err) == (CODES[number], "", STOPPED)
    assert cleaned == [True]
    assert {one: signal.getsignal(one) for one in CODES} == before
    signal.signal(number, first)


def test_a_signal_that_is_ignored_stays_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    held = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        monkeypatch.setattr(
            "traces.store.recordings.recordings",
            lambda: os.kill(os.getpid(), signal.SIGHUP) or [Bundled("one", Path(), "")],
        )
        assert run("list").code == 0
    finally:
        signal.signal(signal.SIGHUP, held)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_workers_and_what_they_share_go_with_the_command(
    synthetic_run: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "draftsim", "sweep", "--trace", str(synthetic_run), "--c", "0.1,0.2",
        "--batch", "1,2,3,4", "--assume-batch-free", "--jobs", "2", "--resamples", "400000",
        "--out", str(tmp_path / "s.parquet"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        until_s = time.monotonic() + 60
        # The main process, two workers, and two that look after what they share.
        while len(session(process.pid)) < 4 and time.monotonic() < until_s:
            assert process.poll() is None
            time.sleep(0.05)
        assert len(session(process.pid)) >= 4
        process.terminate()
        said = process.communicate()[1]
    assert process.returncode == 143, said
    assert said.endswith(STOPPED)
    assert left_behind(process.pid) == []


OWN = """
import sys
from policies import DraftPolicy

class Quits(DraftPolicy):
    calls = 0

    def keep_drafting(self, draft):
        Quits.calls += 1
        if Quits.calls > {calls}:
            sys.exit(0)
        return len(draft) < 2
"""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("command", ["simulate", "serve"])
def test_a_policy_that_exits_is_an_error(
    command: str, late: bool, synthetic_run: Path, tmp_path: Path, run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "own.py").write_text(OWN.format(calls=50))
    if late:  # not where its contract is checked, but in the work itself
        monkeypatch.setattr("policies.checks.check_policy", lambda _: None)
    more = {"simulate": ("--resamples", 2), "serve": ("--batch", 1, "--requests", 20)}[command]
    policy = f"{tmp_path / 'own.py'}:Quits"
    ran = run(command, "--trace", synthetic_run, "--policy", policy, *more)
    assert "sys.exit(0)" in ran.refusal
    assert ran.err.splitlines()[-1].startswith("draftsim: ")


RAISES = """
from policies import DraftPolicy
from own_help import looked_up

class Raises(DraftPolicy):
    calls = 0

    def keep_drafting(self, draft):
        Raises.calls += 1
        if Raises.calls > 50:
            {raising}
        return len(draft) < 2
"""


@pytest.mark.parametrize(
    ("raising", "said", "place"),
    [
        ("return self.absent > 2", "AttributeError: 'Raises' object has no", "own.py, line 11)"),
        ("open('/absent/file')", "FileNotFoundError: [Errno 2]", "own.py, line 11)"),
        ("looked_up({})", "KeyError: 3", "own_help.py, line 2)"),
        ("raise ValueError", "ValueError (", "own.py, line 11)"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "serve", "sweep"])
def test_a_policy_that_raises_is_one_line(
    command: str, raising: str, said: str, place: str, synthetic_run: Path, tmp_path: Path,
    run: Run, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The message, the place and the policy; no traceback, nor the code of a failed check."""
    monkeypatch.setattr("policies.from_file.check_policy", lambda _: None)  # in the work itself
    (tmp_path / "own.py").write_text(RAISES.replace("{raising}", raising))
    (tmp_path / "own_help.py").write_text("def looked_up(table):\n    return table[3]\n")
    more = {
        "simulate": ("--resamples", 2), "serve": ("--batch", 1, "--requests", 20),
        "sweep": ("--resamples", 2),
    }[command]  # fmt: skip
    policy = f"{tmp_path / 'own.py'}:Raises"
    refusal = run(command, "--trace", synthetic_run, "--policy", policy, *more).refusal
    assert f"the policy own.py:Raises raised {said}" in refusal
    assert refusal.endswith(place)


def test_a_policy_that_raises_in_a_worker_process_is_one_line(
    synthetic_run: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policies.from_file._LOADED", {})
    own = f"""
import os
from policies import DraftPolicy

class Raises(DraftPolicy):
    def keep_drafting(self, draft):
        if os.getpid() != {os.getpid()}:
            raise OSError(28)
        return len(draft) < 2
"""
    (tmp_path / "own.py").write_text(own)
    policy = f"{tmp_path / 'own.py'}:Raises"
    ran = run(
        "sweep", "--trace", synthetic_run, "--policy", policy, "--policy", "svip", "--batch",
        "1,2,4", "--jobs", 2,
    )  # fmt: skip
    place = f"({tmp_path / 'own.py'}, line 8)"
    assert ran.refusal == f"draftsim: the policy own.py:Raises raised OSError: 28 {place}"


def test_a_policy_that_raises_in_python_raises_its_own_error(
    synthetic_run: Path, tmp_path: Path
) -> None:
    class Raises(Fixed):
        def keep_drafting(self, draft: Sequence[Any]) -> bool:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        draftsim.predict(str(synthetic_run), policies=[Raises()])


def test_a_policy_file_that_exits_is_an_error(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    ran = serve("--policy", f"{tmp_path / 'own.py'}:Mine")
    assert "it calls sys.exit(None), which would end draftsim" in ran.refusal


def test_the_end_of_a_file_is_not_ctrl_d(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended() -> None:
        raise EOFError("no data left in file")

    monkeypatch.setattr("traces.store.recordings.recordings", ended)
    with pytest.raises(EOFError, match="no data left"):
        run("list")


def test_a_policy_of_ones_own_is_swept(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "own.py").write_text(OWN.format(calls=10**9))
    found = run(
        "sweep", "--trace", synthetic_run, "--c", "0.1", "--jobs", 1, "--json", "-",
        "--policy", f"{tmp_path / 'own.py'}:Quits", "--out", tmp_path / "s.parquet",
    ).rows  # fmt: skip
    assert [row["policy"] for row in found] == ["own.py:Quits"]
