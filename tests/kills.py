"""Commands that are killed again and again, run to their end, and held to an uninterrupted run.

`tests/test_kills.py` does so with few kills, in processes forked off the tests.  This file by
itself starts the real program, two worker processes included, and kills it many times:

    python -m tests.kills --chains 10 --kills 5 [--seed 1] [COMMAND...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

import draftsim
from commands.validate.spot_check import ARMS
from tests.conftest import ROOT, SMALL_PROFILE
from tests.few_cells import few_cells
from tests.logs import row, write_rows
from tests.stored import rows_of
from tests.studies import read_sweep
from traces.acceptance.synthetic import synthetic_trace
from traces.latency.table import LatencyTable
from traces.store.engine_runs import read_measured
from traces.store.files import read_latency, read_trace, write_latency, write_trace

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENDS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
"""Exit code of a process that was stopped by each."""
OUTSIDE = 99
"""Exit code of a fork that was stopped before or after the command."""
PAIR = ("--policy", "autoregressive", "--policy", "fixed:gamma=2")


class Command(NamedTuple):
    """A command that writes, and what is to be the same however often it was killed."""

    arguments: tuple[str, ...]
    """With ``{given}`` for the folder of its inputs; it runs where it writes."""
    answer: Callable[[Path], Any]
    """Reads the answer from the folder that it ran in."""
    models: bool = False
    """True if it needs torch."""
    begins_in: str = ""
    """The input that is copied to ``run`` in its folder first: what it adds to."""
    stands_in: bool = False
    """True if a package index or an engine is replaced (`stand_ins`), which only tests can do."""


class Stop(NamedTuple):
    """When a process is stopped: after a share of a whole run's time, or at one of its writes."""

    number: signal.Signals
    share: float
    by_writes: bool


class Run(NamedTuple):
    """How a process ended."""

    code: int
    said: str
    seconds: float
    writes: int
    """Calls that change files which it made; 0 where they are not counted."""


def inputs(folder: Path, models: Path | None = None) -> Path:
    """Small inputs of all commands; `models` is a profiled run."""
    trace = synthetic_trace(0.7, requests=8, tokens=30, max_gamma=24, concentration=4.0, seed=1)
    made = folder / "synthetic"
    made.mkdir()
    write_trace(trace, made / "trace.parquet")
    write_latency(
        LatencyTable.constant(0.0143, 0.00176, 0.015, host_round=0.0003), made / "latency.parquet"
    )
    write_rows(
        folder / "log.jsonl", [row(n, [3, 1, 2, 4, 1], [2, 4, 1, 1, 3]) for n in range(81, 121)]
    )
    (folder / "runs.csv").write_text(RUNS)
    if models is not None:
        shutil.copytree(models, folder / "profiled")
    if find_spec("torch") is not None:
        from tests.stand_in_engine import write_measured_engine

        write_measured_engine(folder / "engine")
    short = synthetic_trace(0.7, requests=4, tokens=16, prompt_length=12, seed=3)
    write_trace(short, folder / "short.parquet")
    return folder


RUNS = """batch,k,tokens_per_s,emitted
1,0,40,1
1,3,80,2.4
8,0,300,1
8,3,420,2.4
"""
"""Runs of a server that do not exist anywhere."""


def stand_ins(patch: pytest.MonkeyPatch, arguments: Sequence[str], folder: Path) -> None:
    """Replace what a command would ask outside of this process."""
    if arguments[0] == "fetch":
        from tests.test_fetch import use_small_index

        patch.setenv("DRAFTSIM_CACHE", str(folder / "cache"))
        use_small_index(patch)
    elif arguments[0] == "demo":
        # What it says first writes nothing, and a few of its policies are all of them.
        patch.setattr("commands.demo.say_recorded", lambda: None)
        patch.setattr("commands.validate.spot_check.ARMS", ARMS[:2])
    elif "vllm" in arguments:
        from tests.stand_in_engine import use_for_commands

        use_for_commands(patch)


def table_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a table likewise."""
    frame = pd.read_csv(path).drop(columns=["elapsed_s"], errors="ignore")
    found: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return found


def files_of(*names: str) -> Callable[[Path], list[bytes]]:
    """Exact bytes of files."""
    return lambda folder: [
        path.read_bytes() for name in names for path in sorted(folder.glob(name)) or [folder / name]
    ]


def sweep_of(folder: Path) -> Any:
    frame = read_sweep(folder / "s.parquet")
    return frame.to_csv(), (folder / "s.breakeven.parquet").read_bytes()


def profile_of(folder: Path) -> Any:
    """Return a profile's recording, to the bit, and the cells that it timed."""
    trace, latency = (
        read_trace(folder / "run/trace.parquet"),
        read_latency(folder / "run/latency.parquet"),
    )
    cells = latency.cells[["model", "phase", "batch", "new_tokens", "context", "repeats"]]
    columns = {name: values.tobytes() for name, values in trace.columns.items()}
    return columns, [r.id for r in trace.requests], sorted(cells.itertuples(index=False))


def check_of(folder: Path) -> Any:
    times = read_measured(folder / "run/measured.parquet").times
    return times[["policy", "verify", "batch", "forced", "repeat", "request", "rounds"]].to_csv()


def demo_of(folder: Path) -> Any:
    """Return a demo's recordings and runs, without the policy that the measured seconds chose."""
    times = read_measured(folder / "run/measured.parquet").times
    usual = times.loc[times["policy"].isin(ARMS), ["policy", "repeat", "request", "rounds"]]
    return profile_of(folder), sorted(usual.itertuples(index=False))


def cells_of(folder: Path) -> Any:
    """The sizes of the cells that an engine's profile timed."""
    cells = read_latency(folder / "run/latency.parquet").cells
    sizes = cells[["model", "phase", "batch", "new_tokens", "context"]]
    return sorted(sizes.itertuples(index=False))


def served_of(folder: Path) -> Any:
    frame = pd.read_csv(folder / "v.csv")
    return frame[["load", "policy", "iterations", "rounds_differ", "texts_diverged"]].to_csv()


TRACE = ("--trace", "{given}/synthetic")
COMMANDS = {
    "serve": Command(
        ("serve", *TRACE, *PAIR, "--batch", "1,2,3,4", "--requests", "40", "--out", "r.jsonl"),
        lambda folder: rows_of(folder / "r.jsonl"),
    ),
    "serve table": Command(
        ("serve", *TRACE, *PAIR, "--rate", "2,4", "--requests", "40", "--out", "r.csv",
         "--timeline", "t.json", "--plots", "plots"),
        lambda folder: (table_of(folder / "r.csv"), files_of("t.json", "plots/*")(folder)),
    ),
    "sweep": Command(
        ("sweep", *TRACE, *PAIR, "--c", "0.1,0.2", "--batch", "1,2,3", "--assume-batch-free",
         "--resamples", "20", "--out", "s.parquet"),
        sweep_of,
    ),
    "capacity": Command(
        ("capacity", *TRACE, *PAIR, "--slo", "tpot=0.02", "--rate", "8", "--requests", "60",
         "--replications", "2", "--max-batch", "8", "--assume-batch-free", "--out", "c.csv"),
        lambda folder: table_of(folder / "c.csv"),
    ),
    "simulate": Command(
        ("simulate", *TRACE, *PAIR, "--resamples", "20", "--out", "s.csv", "--plots", "plots"),
        files_of("s.csv", "plots/*"),
    ),
    "tune": Command(
        ("tune", *TRACE, "--engine", "hf", "--resamples", "4", "--out", "t.json", "--json",
         "r.json"),
        files_of("t.json", "r.json"),
    ),
    "report": Command(
        ("report", "--run", "{given}/synthetic", "--no-serve", *PAIR, "--resamples", "4", "--out",
         "page.html"),
        files_of("page.html"),
    ),
    "import": Command(
        ("import", "specbench", "{given}/log.jsonl", "--out", "t.parquet"), files_of("t.parquet")
    ),
    "profile": Command(
        (*SMALL_PROFILE, "--out", "run"), profile_of, models=True,
    ),
    "validate": Command(
        ("validate", "--run", "run", *PAIR, "--repeats", "2", "--no-assisted"), check_of,
        models=True, begins_in="profiled",
    ),
    "demo": Command(
        ("demo", "--out", "run", "--limit", "4", "--max-new-tokens", "6"), demo_of, models=True,
    ),
    "calibrate": Command(
        ("calibrate", "{given}/runs.csv", "--out", "l.parquet", "--json", "c.json"),
        files_of("l.parquet", "c.json"),
    ),
    "recommend": Command(
        ("recommend", "--bench", "{given}/runs.csv", "--json", "r.json"), files_of("r.json"),
    ),
    "export": Command(
        ("export", "speculation-profile", *TRACE, "--out", "p.json"), files_of("p.json")
    ),
    "calibrate-memory": Command(
        ("calibrate-memory", "--trace", "bundled", "--split", "0.5", "--out", "m.npz", "--rest",
         "rest.parquet"),
        files_of("m.npz", "rest.parquet"),
    ),
    "fetch": Command(
        ("fetch", "qwen-coder"), files_of("cache/qwen-coder/*/weights"), models=True,
        stands_in=True,
    ),
    "profile engine": Command(
        ("profile", "--engine", "vllm", "--target", "stand-in", "--engine-batch", "2",
         "--engine-longest", "4", "--engine-length", "512", "--minutes", "0", "--out", "run"),
        cells_of, models=True, stands_in=True,
    ),
    "validate engine": Command(
        ("validate", "--engine", "vllm", "--run", "run", "--trace", "{given}/short.parquet",
         "--load", "closed:1,2", "--requests", "5", "--repeats", "2", "--policy", "fixed:gamma=2",
         "--out", "v.csv"),
        served_of, models=True, begins_in="engine", stands_in=True,
    ),
}  # fmt: skip
JOBS = {"sweep", "capacity", "serve"}
"""Commands that share their work between processes."""
QUICK_S = 5.0
"""A command that takes less is run twice to tell how long it takes, where that is needed."""


Start = Callable[[list[str], Path, Stop | None, Run | None], Run]


class Chain:
    """One command, killed at seeded moments in one folder, and then run to its end.

    Parameters
    ----------
    start:
        Runs a command in a folder, to its end or to a `Stop`, given how the whole one ended.
    given:
        The folder of `inputs`.
    work:
        An empty folder.
    whole:
        Runs the command that is not interrupted; as `start` by default.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        given: Path,
        work: Path,
        whole: Start | None = None,
    ) -> None:
        self.name, self.command, self._start = name, COMMANDS[name], start
        self._given, self._work = given, work
        self.folder = self._prepared("whole")
        self.whole = (whole or start)(self._arguments(), self.folder, None, None)
        assert self.whole.code == 0, f"{name} failed by itself: {self.whole.said}"
        self.expected = self.command.answer(self.folder)
        self.left = names_in(self.folder)
        self._again, self._timed = whole or start, False

    def killed(self, seed: int, kills: int) -> list[Stop]:
        """Kill it `kills` times, run it to its end, and compare; the stops that landed."""
        chosen, landed = random.Random(f"{self.name} {seed}"), list[Stop]()
        folder = self._prepared(f"killed-{seed}")
        stops = [
            Stop(SIGNALS[(i + seed) % len(SIGNALS)], chosen.random(), chosen.random() < 0.7)
            for i in range(kills)
        ]
        if not (self.whole.writes and all(stop.by_writes for stop in stops)):
            self._time()
        for stop in stops:
            ended = self._run(folder, stop)
            assert ended.code in (0, OUTSIDE, ENDS[stop.number], -stop.number), (stop, ended)
            # After the answer Python itself may have words for Ctrl-C.
            assert not ended.code or "Traceback" not in ended.said, (stop, ended.said)
            if ended.code not in (0, OUTSIDE):
                landed.append(stop)
            if ended.code == ENDS[stop.number] > 0:
                assert "draftsim: stopped; nothing is half-written" in ended.said
        last = self._run(folder, None)
        assert last.code == 0, (stops, last.said)
        assert self.command.answer(folder) == self.expected, (self.name, stops)
        left = set(names_in(folder)) ^ set(self.left)
        assert not left, (self.name, stops, left)
        shutil.rmtree(folder)
        return landed

    def _time(self) -> None:
        """Run a quick command once more: its first run also loads and compiles."""
        if self._timed or self.whole.seconds >= QUICK_S:
            return
        folder = self._prepared("again")
        self.whole = self._again(self._arguments(), folder, None, None)
        assert self.command.answer(folder) == self.expected, self.name
        shutil.rmtree(folder)
        self._timed = True

    def _prepared(self, name: str) -> Path:
        folder = self._work / name
        folder.mkdir()
        if self.command.begins_in:
            shutil.copytree(self._given / self.command.begins_in, folder / "run")
        return folder

    def _run(self, folder: Path, stop: Stop | None) -> Run:
        return self._start(self._arguments(), folder, stop, None if stop is None else self.whole)

    def _arguments(self) -> list[str]:
        return [text.format(given=self._given) for text in self.command.arguments]


def names_in(folder: Path) -> list[str]:
    """Everything in a folder, by its path."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def called_run(arguments: list[str], folder: Path, stop: Stop | None, whole: Run | None) -> Run:
    """The command in this process, which then has loaded all that its forks need."""
    writes = Count()
    began_s = time.monotonic()
    code = _called(arguments, folder, stop, whole, writes)
    seconds = time.monotonic() - began_s
    return Run(code, folder.with_suffix(".said").read_text(), seconds, writes.value)


def forked_run(arguments: list[str], folder: Path, stop: Stop | None, whole: Run | None) -> Run:
    """The command in a fork of this process."""
    context = get_context("fork")
    writes, begun = context.Value("i", 0), context.Event()

    def child() -> None:
        code = OUTSIDE
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            begun.set()
            code = _called(arguments, folder, stop, whole, writes)
        except KeyboardInterrupt:
            pass
        os._exit(code)

    process = context.Process(target=child)
    process.start()
    assert process.pid is not None
    begun.wait(120)
    began_s = time.monotonic()
    if stop is not None and whole is not None and not stop.by_writes:
        process.join(stop.share * whole.seconds)
        if process.is_alive():
            os.kill(process.pid, stop.number)
    process.join(300)
    assert process.exitcode is not None, "it does not end"
    said = folder.with_suffix(".said").read_text()
    return Run(process.exitcode, said, time.monotonic() - began_s, writes.value)


class Count:
    """A number that changes."""

    value = 0


def _called(
    arguments: list[str], folder: Path, stop: Stop | None, whole: Run | None, writes: Any
) -> int:
    """Run the command in `folder` and return its exit code; its output goes next to the folder."""
    arguments = [*arguments, "--jobs", "1"] if arguments[0] in JOBS else arguments
    few = few_cells() if arguments[0] in ("profile", "validate", "demo") else nullcontext()
    said = folder.with_suffix(".said").open("w")
    with (
        chdir(folder), pytest.MonkeyPatch.context() as patch, said, redirect_stderr(said),
        redirect_stdout(said), few,
    ):  # fmt: skip
        patch.setattr(sys, "argv", ["draftsim", *arguments])
        stand_ins(patch, arguments, folder)
        count_writes(patch, writes, stop, whole)
        try:
            draftsim.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    raise AssertionError("it ends with an exit code")


def count_writes(
    patch: pytest.MonkeyPatch, writes: Any, stop: Stop | None, whole: Run | None
) -> None:
    """Count the calls that change files, and stop this process at one of them."""
    at = None
    if stop is not None and whole is not None and stop.by_writes:
        at = int(stop.share * whole.writes)

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if writes.value == at:
                assert stop is not None
                os.kill(os.getpid(), stop.number)
            writes.value += 1
            return call(*given, **named)

        return counted

    for name in ("replace", "fsync", "unlink", "mkdir", "rmdir"):
        patch.setattr(os, name, counting(getattr(os, name)))


def started_run(arguments: list[str], folder: Path, stop: Stop | None, whole: Run | None) -> Run:
    """The real program in a session of its own."""
    if arguments[0] in JOBS and "--timeline" not in arguments:
        arguments = [*arguments, "--jobs", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "draftsim", *arguments]
    told = folder.with_suffix(".said")
    began_s = time.monotonic()
    with told.open("w") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=said, stderr=said, start_new_session=True
        )
    if stop is not None and whole is not None:
        try:
            # Not while Python itself starts, which has words of its own for Ctrl-C.
            process.wait((0.2 + 0.6 * stop.share) * whole.seconds)
        except subprocess.TimeoutExpired:
            # Ctrl-C reaches all processes of a terminal, the other signals the one named.
            send = os.killpg if stop.number == signal.SIGINT else os.kill
            send(process.pid, stop.number)
    process.wait()
    seconds = time.monotonic() - began_s
    if stop is not None and stop.number == signal.SIGKILL:
        with suppress(ProcessLookupError):  # workers that nobody could end
            os.killpg(process.pid, signal.SIGKILL)
    else:
        assert (left := left_behind(process.pid)) == [], (arguments, stop, left)
    return Run(process.returncode, told.read_text(), seconds, 0)


def session(pid: int) -> list[int]:
    """Return the processes of a session, by /proc, except those that have ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(place.parent.name))
    return found


def left_behind(pid: int) -> list[str]:
    """Return what a stopped process leaves: processes of its session, and shared memory."""
    # The number by itself: other processes' names hold it as a part of longer ones.
    own = re.compile(rf"(?<![0-9a-z]){pid}(?![0-9a-z])")

    def found() -> list[str]:
        shared = [path.name for path in Path("/dev").glob("shm/*") if own.search(path.name)]
        return [*map(str, session(pid)), *shared]

    until_s = time.monotonic() + 10
    while found() and time.monotonic() < until_s:
        time.sleep(0.05)
    return found()


def main() -> None:
    """Kill the real program, as often as is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("--chains", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsim-kills-") as place:
        given = Path(place, "given")
        given.mkdir()
        inputs(given)
        real = [name for name, command in COMMANDS.items() if not command.stands_in]
        for name in options.commands or real:
            if COMMANDS[name].begins_in and not (given / "profiled").exists():
                started_run([*SMALL_PROFILE, "--out", str(given / "profiled")], given, None, None)
            work = Path(tempfile.mkdtemp(dir=place))
            chain, landed = Chain(name, started_run, given, work), list[Stop]()
            for seed in range(options.seed, options.seed + options.chains):
                landed += chain.killed(seed, options.kills)
            each = ", ".join(f"{sum(s.number == n for s in landed)} {n.name}" for n in SIGNALS)
            print(f"{name}: {options.chains} chains equal; kills that landed: {each}", flush=True)


if __name__ == "__main__":
    main()
