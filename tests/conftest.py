"""Shared fixtures: the command line, recordings, public data; the packages on the path."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

# Before anything imports a library that asks: a worker of the tests has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

with suppress(ImportError):  # a machine with a GPU may lack it
    from hypothesis import settings

    # A busy machine makes any example slow: no example fails by the clock.  A submission is checked
    # with the same examples each time; elsewhere every run looks at others.
    settings.register_profile("draftsim", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("draftsim")

with suppress(ImportError):
    from commands.common import output

    # Tests look for sentences: `tests/test_remarks.py` sees how they are wrapped.
    output.WIDEST = 1_000_000

with suppress(ImportError):
    from simulator import executors

    # One as above: processes are started where a test asks for them.
    executors.cores = lambda: 1

from tests.few_cells import few_cells  # noqa: E402
from tests.shared import SHARED, made_once  # noqa: E402

if TYPE_CHECKING:
    from profiler.suite.environment import Workplace

# Tests speak of the small pair's recording, whatever the commands' default is.
os.environ["DRAFTSIM_TRACE"] = "bundled"

SMALL_PROFILE = (
    "profile", "--target", "bundled", "--draft", "bundled", "--prompts",
    str(ROOT / "profiler" / "bundled" / "prompts.jsonl"), "--limit", "2", "--max-new-tokens", "10",
    "--max-gamma", "4", "--repeats", "3",
)  # fmt: skip
"""The command that profiles the bundled pair on a few prompts."""

ONE_PROMPT = (*SMALL_PROFILE, "--limit", "1")
"""Likewise, on one of them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, collect only the files that have such tests.

    A machine with a GPU may have nothing but the libraries that these import.
    """
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


SLOW = frozenset((ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").split())
"""Tests of a second or more, which `make test` leaves out (`tests.slow` names them)."""


@pytest.fixture(autouse=True)
def _nothing_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run to warm up, or again where it was disturbed: no test is about seconds."""
    repeats = sys.modules.get("profiler.machine")
    if repeats is not None:
        monkeypatch.setattr(repeats, "MOST", 0)
        monkeypatch.setattr(repeats, "WARMING", 0)


@contextmanager
def few_draws() -> Iterator[None]:
    """Fit servers with a sixth of the draws."""
    from simulator.aggregate import hazard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hazard, "STEPS", 120)
        patch.setattr(hazard, "KEPT", 60)
        yield


@pytest.fixture
def short_chains() -> Iterator[None]:
    """Likewise, for tests of what a command does with a fit, and not of the fit itself.

    A test or a whole file asks for it with ``pytest.mark.usefixtures("short_chains")``.
    """
    with few_draws():
        yield


@pytest.fixture
def collector() -> None:
    """Stages of the GPU suite freeze and thaw what is alive, as they do by themselves."""


@pytest.fixture(autouse=True)
def _kept_frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of the GPU suite thaw nothing: a walk through all libraries, after every piece."""
    if "collector" in request.fixturenames or "gpu" in request.keywords:
        return
    mild = SimpleNamespace(
        collect=lambda: gc.collect(1), freeze=lambda: None, unfreeze=lambda: None
    )
    for name in ("profiler.suite.environment", "profiler.suite.__main__"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "gc", mild)


LONG = (
    "test_vllm.py", "test_vllm_server.py", "test_notebooks.py", "test_suite_gpu.py",
    "test_suite_failures.py", "test_suite_drafters.py", "test_device_sources.py",
    "test_cluster.py",
)  # fmt: skip
"""Files that take a good part of a minute."""


def _settled() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Keep what the files imported out of garbage collection.

    Collections then skip it, also while a test builds objects that live as long as itself.
    """
    _settled()
    gc.set_threshold(20_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect a file's garbage when the file ends, and keep what it imported."""
    if nextitem is None or nextitem.path != item.path:
        _settled()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests.  Files that take long come first: at the end no worker waits for one."""
    for item in items:
        if item.nodeid.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)


class Ran(NamedTuple):
    """How a command ended, and what it wrote to standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows it printed as JSON."""
        document = json.loads(self.ok().out)
        assert document["schema"] == 1
        results: list[dict[str, Any]] = document["results"]
        return results

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object that it printed after anything else."""
        found: dict[str, Any] = json.loads(self.ok().out[self.out.index("{") :])
        return found

    @property
    def said(self) -> str:
        """Standard error, however its lines are wrapped."""
        return " ".join(self.err.split())

    @property
    def refusal(self) -> str:
        """The one line with which it refused its input, after remarks on what it had read."""
        *remarks, last = self.err.splitlines()
        assert self.code == 2, self.err
        assert last.startswith("draftsim: "), self.err
        assert not [line for line in remarks if line.startswith("draftsim: ")], self.err
        return last

    def ok(self) -> Ran:
        """Return itself if the command succeeded."""
        assert self.code == 0, self.err
        return self


Run = Callable[..., Ran]
Serve = Callable[..., Ran]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """The folder of a stage of the GPU suite; what the stage kept elsewhere is removed."""
    from profiler.suite.environment import open_workplace

    yield tmp_path / "out"
    place = open_workplace("cpu", tmp_path / "out", seconds=1, quick=True)
    shutil.rmtree(place.work, ignore_errors=True)


@pytest.fixture
def place(out: Path) -> Workplace:
    """Where a stage of the GPU suite runs in miniature."""
    from profiler.suite.environment import open_workplace

    return open_workplace("cpu", out, seconds=300, quick=True)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``draftsim ARGUMENTS...`` in this process."""
    import draftsim  # only now: the packages are on the path

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["draftsim", *map(str, arguments)])
        code = 0
        try:
            with few_cells() if {"profile", "validate"} & {*arguments[:1]} else nullcontext():
                draftsim.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the recording that comes by default."""
    monkeypatch.delenv("DRAFTSIM_TRACE")


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    os.environ[SHARED] = str(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


def beside(name: str, what: str) -> Path:
    """Return a folder next to the checkout; the test that needs it skips where it is absent."""
    path = Path(os.environ.get("DRAFTSIM_SHARED", ROOT.parent / "shared")) / name
    if not path.is_dir():
        pytest.skip(f"needs {what} in ../shared/{name}, next to the checkout")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data."""
    return beside("data", "public data")


@pytest.fixture(scope="session")
def shared_tables() -> Path:
    """The tables of the four source papers."""
    return beside("tables", "the papers' tables")


@pytest.fixture(scope="session")
def _profiled(_shared_folder: None) -> Path:
    pytest.importorskip("torch")
    import draftsim

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch, few_cells():
            command = ["draftsim", *SMALL_PROFILE, "--out", str(folder), "--exit-layers"]
            patch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as stop:
                draftsim.main()
        assert not stop.value.code

    return made_once("profiled", make)


@pytest.fixture(scope="module")
def small_run(_profiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of `SMALL_PROFILE` with --exit-layers; each module changes its own copy."""
    folder = tmp_path_factory.mktemp("small") / "run"
    shutil.copytree(_profiled, folder)
    return folder


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random drafters for the bundled target: ``one``, ``another`` and ``three``."""
    pytest.importorskip("torch")
    from tests.features import write_random

    return write_random(tmp_path_factory.mktemp("drafters"))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """`tests.stored.small_trace`, written."""
    from tests.stored import small_trace
    from traces.store.files import write_trace

    path = tmp_path / "trace.parquet"
    write_trace(small_trace(), path)
    return path


@pytest.fixture(scope="module")
def synthetic_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a synthetic trace, signals and all, and latencies that are constant."""
    from traces.acceptance.synthetic import synthetic_trace
    from traces.latency.table import LatencyTable
    from traces.store.files import write_latency, write_trace

    folder = tmp_path_factory.mktemp("run")
    trace = synthetic_trace(0.7, requests=8, tokens=30, max_gamma=24, concentration=4.0, seed=1)
    write_trace(trace, folder / "trace.parquet")
    table = LatencyTable.constant(0.0143, 0.00176, 0.015, host_round=0.0003)
    write_latency(table, folder / "latency.parquet")
    return folder


@pytest.fixture
def serve(synthetic_run: Path, run: Run) -> Serve:
    """Runs ``draftsim serve --trace SYNTHETIC_RUN ARGUMENTS...`` in this process."""
    return partial(run, "serve", "--trace", synthetic_run)
