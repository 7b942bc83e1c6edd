"""Sweeps, fleets and capacity plans on a real Dask cluster on loopback, and workers that die."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from policies import DraftPolicy
from policies.core import Load
from simulator.executors import Cluster, Local
from simulator.serving import over_rates, read_results
from simulator.serving import sweep as serving_sweep
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from tests.compiled import same
from tests.conftest import ROOT, Run
from tests.forked import forked
from tests.serving import CONSTANT, SMALL
from tests.studies import recorded, study
from tests.test_capacity import planned
from tests.test_serving_parts import POLICIES, fleet, timeless
from traces.errors import DraftsimError

WAIT = "2s"
"""How long a killed worker is asked for the results that it had; usually half a minute."""


class Started(NamedTuple):
    """A scheduler's address, and two of its three workers."""

    address: str
    doomed: list[BaseProcess]
    """One for each test to kill."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A Dask scheduler and three workers as processes of their own, ended with the tests.

    One of the workers is started as users start them; the others have imported all that they need.
    """
    distributed: Any = pytest.importorskip("distributed")
    from dask import config

    folder = tmp_path_factory.mktemp("cluster")
    where = folder / "scheduler.json"
    here = {"host": "127.0.0.1", "scheduler_file": str(where), "dashboard": False}
    alone = {"nthreads": 1, "memory_limit": 0, "local_directory": str(folder), "death_timeout": 60}
    usual = [
        sys.executable, "-m", "dask", "worker", "--scheduler-file", str(where), "--nthreads", "1",
        "--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--local-directory", str(folder),
        "--death-timeout", "60",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
           "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": WAIT}  # fmt: skip
    with ExitStack() as ended:
        ended.enter_context(config.set({
            # A part is not tried again, so that what a worker held is lost with it, and that alone.
            "distributed.scheduler.allowed-failures": 0,
            "distributed.comm.timeouts.connect": WAIT,
        }))  # fmt: skip

        def start(make: Callable[[], Any]) -> BaseProcess:
            process = ended.enter_context(forked(lambda: _runs(make)))
            ended.callback(process.kill)
            return process

        start(lambda: distributed.Scheduler(port=0, **here))
        worker = subprocess.Popen(
            usual, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ended.callback(worker.wait, 20)
        ended.callback(worker.kill)
        doomed = [start(lambda: distributed.Worker(**here, **alone)) for _ in range(2)]
        yield Started(_address(where), doomed)


def _runs(make: Callable[[], Any]) -> None:
    """A node of the cluster, until it is killed."""

    async def run() -> None:
        async with make() as node:
            await node.finished()

    logging.disable()
    asyncio.run(run())


def _address(where: Path) -> str:
    """The scheduler's address, once all workers have joined it."""
    from distributed import Client

    deadline = time.monotonic() + 60
    while not where.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with Client(scheduler_file=str(where), set_as_default=False, timeout=30) as client:
        client.wait_for_workers(3, timeout=60)
        return str(client.scheduler.address)


FIRST_CONTEXT = 65
"""Tokens in the cache when a synthetic request's first round begins."""


class Slow(DraftPolicy):
    """Drafts three tokens, and takes its time on a worker."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def begin_round(self, load: Load) -> None:
        if load.context == FIRST_CONTEXT:
            time.sleep(self.pause_s)

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < 3


def test_sweeps_give_the_same_rows_and_outlive_a_worker(cluster: Started, tmp_path: Path) -> None:
    sweep = study(resamples=10)
    pd.testing.assert_frame_equal(sweep.run(Cluster(cluster.address)), sweep.run(Local(1)))

    # Eight parts on as many workers as there are, one of which is killed in the midst of its work.
    alphas = tuple(np.linspace(0.3, 0.9, 8))
    slow = Sweep(recorded(), {"slow": Slow(0.02)}, Prices((0.1,)), alphas, measure_tilt=False)
    out = tmp_path / "grid.parquet"
    worker = cluster.doomed.pop()

    def kill(done: int, total: int) -> None:
        del total
        if done == 2:
            worker.kill()

    with pytest.raises(DraftsimError, match="were lost with their workers") as caught:
        slow.run(Cluster(cluster.address), out=out, progress=kill)
    lost = int(str(caught.value).split()[0])
    assert len(list(Path(f"{out}.parts").glob("*.npz"))) == 8 - lost
    assert lost <= 3  # those running or waiting on that worker
    frame = slow.run(Cluster(cluster.address), out=out)
    pd.testing.assert_frame_equal(frame, slow.run(Local(1)))


def test_fleets_and_plans_give_the_same_rows_and_outlive_a_worker(
    cluster: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic_run: Path, run: Run
) -> None:
    address = cluster.address
    monkeypatch.setattr("simulator.serving.study.MANY", 50)
    monkeypatch.setattr("simulator.serving.study.A_PART", 20)
    scenarios = over_rates(fleet(), [10.0, 60.0])
    expected = serving_sweep(SMALL, CONSTANT, POLICIES, scenarios)
    for row, other in zip(
        timeless(serving_sweep(SMALL, CONSTANT, POLICIES, scenarios, executor=Cluster(address))),
        timeless(expected), strict=True,
    ):  # fmt: skip
        same(row, other, "row")
    monkeypatch.setattr("simulator.capacity.FEW", 60)
    # Here first: what is compiled for it, the workers find.
    plans = (planned(9.0, requests=60, executor=own) for own in (None, Cluster(address)))
    for row, other in zip(*plans, strict=True):
        same(row, other, "row")
    rows = run(
        "serve", "--trace", synthetic_run, "--rate", 9, "--replicas", 3, "--requests", 30,
        "--policy", "fixed:gamma=3", "--cluster", address, "--json", "-",
    ).rows  # fmt: skip
    assert [row["requests"] for row in rows] == [30, 30]

    # A worker dies: what it held is lost, and that alone is computed again.
    path = tmp_path / "rows.jsonl"
    many = over_rates(fleet(240), [5.0, 10.0, 20.0, 40.0])
    finished: list[int] = []
    worker = cluster.doomed.pop()

    def kill(done: int, total: int, name: str) -> None:
        del total, name
        finished.append(done)
        if done == 1:
            worker.kill()

    with pytest.raises(DraftsimError, match="were lost with their workers"):
        serving_sweep(
            SMALL, CONSTANT, POLICIES, many, path=path, executor=Cluster(address), progress=kill
        )
    kept = len(read_results(path).rows)
    assert kept == len(finished) < 8
    rows = serving_sweep(SMALL, CONSTANT, POLICIES, many, path=path, executor=Cluster(address))
    assert read_results(path).complete
    for row, other in zip(
        timeless(rows), timeless(serving_sweep(SMALL, CONSTANT, POLICIES, many)), strict=True
    ):
        same(row, other, "row")


def test_no_scheduler_is_one_clear_error() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(DraftsimError, match="no Dask scheduler answers at tcp"):
        list(Cluster("tcp://127.0.0.1:1", timeout_s=0.5).run(study().runner, study().parts))
