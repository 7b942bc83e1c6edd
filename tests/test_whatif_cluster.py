"""A sweep on a real Dask cluster on loopback, and workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies import DraftPolicy
from policies.core import Load
from simulator.executors import Cluster, Local
from simulator.whatif.sweep.prices import Prices
from simulator.whatif.sweep.run import Sweep
from tests.conftest import ROOT
from tests.studies import recorded, study
from traces.errors import DraftsimError


def test_no_scheduler_is_one_clear_error() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(DraftsimError, match="no Dask scheduler answers at tcp"):
        list(Cluster("tcp://127.0.0.1:1", timeout_s=0.5).run(study().bench, study().parts))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A Dask scheduler and two workers as processes of their own, ended with the test."""
    pytest.importorskip("distributed")
    where = tmp_path / "scheduler.json"
    quiet: dict[str, Any] = {
        "cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL,
        "env": {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    dask = [sys.executable, "-m", "dask"]
    started = [
        subprocess.Popen(
            [*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
             "--scheduler-file", str(where)], **quiet,
        )
    ]  # fmt: skip
    try:
        started += [
            subprocess.Popen(
                [*dask, "worker", "--scheduler-file", str(where), "--nthreads", "1", "--no-nanny",
                 "--no-dashboard", "--host", "127.0.0.1", "--local-directory", str(tmp_path),
                 "--death-timeout", "60"], **quiet,
            )
            for _ in range(2)
        ]  # fmt: skip
        yield _address(where), started[1:]
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.wait(20)


def _address(where: Path) -> str:
    """The scheduler's address, once both workers have joined it."""
    from distributed import Client

    deadline = time.monotonic() + 60
    while not where.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with Client(scheduler_file=str(where), set_as_default=False, timeout=30) as client:
        client.wait_for_workers(2, timeout=60)
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


def test_a_cluster_gives_the_same_rows_and_outlives_a_worker(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, workers = cluster
    sweep = study(resamples=10)
    pd.testing.assert_frame_equal(sweep.run(Cluster(address)), sweep.run(Local(1)))

    # Eight parts on two workers, one of which is killed in the midst of its work.  The
    # scheduler allows no second try here, so that what it held is lost, and that alone.
    alphas = tuple(np.linspace(0.3, 0.9, 8))
    slow = Sweep(recorded(), {"slow": Slow(0.02)}, Prices((0.1,)), alphas, measure_tilt=False)
    out = tmp_path / "grid.parquet"

    def kill(done: int, total: int) -> None:
        del total
        if done == 2:
            workers[0].send_signal(signal.SIGKILL)

    with pytest.raises(DraftsimError, match="were lost with their workers") as caught:
        slow.run(Cluster(address), out=out, progress=kill)
    lost = int(str(caught.value).split()[0])
    assert len(list(Path(f"{out}.parts").iterdir())) == 8 - lost
    assert lost <= 3  # those running or waiting on that worker
    frame = slow.run(Cluster(address), out=out)
    pd.testing.assert_frame_equal(frame, slow.run(Local(1)))
