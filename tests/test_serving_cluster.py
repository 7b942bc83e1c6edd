"""Fleets and capacity plans on a real Dask cluster on loopback."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from simulator.capacity import stages
from simulator.executors import Cluster
from simulator.serving import over_rates, parts, read_results, sweep
from tests.conftest import Run
from tests.serving import CONSTANT, SMALL
from tests.spans import same
from tests.test_capacity import planned
from tests.test_serving_parts import POLICIES, fleet, timeless
from tests.test_whatif_cluster import cluster
from traces.errors import DraftsimError

__all__ = ["cluster"]  # a fixture

Workers = tuple[str, list[subprocess.Popen[bytes]]]


def test_a_cluster_gives_the_same_rows_and_outlives_a_worker(
    cluster: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic_run: Path, run: Run
) -> None:
    address, workers = cluster
    monkeypatch.setattr(parts, "MANY", 50)
    monkeypatch.setattr(parts, "A_PART", 20)
    scenarios = over_rates(fleet(), [10.0, 60.0])
    expected = sweep(SMALL, CONSTANT, POLICIES, scenarios)
    for row, other in zip(
        timeless(sweep(SMALL, CONSTANT, POLICIES, scenarios, executor=Cluster(address))),
        timeless(expected), strict=True,
    ):  # fmt: skip
        same(row, other, "row")
    monkeypatch.setattr(stages, "TRIED", 30)
    monkeypatch.setattr(stages, "FEW", 60)
    plans = (planned(9.0, requests=60, executor=own) for own in (Cluster(address), None))
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

    def kill(done: int, total: int, name: str) -> None:
        del total, name
        finished.append(done)
        if done == 1:
            workers[0].send_signal(signal.SIGKILL)

    with pytest.raises(DraftsimError, match="were lost with their workers"):
        sweep(SMALL, CONSTANT, POLICIES, many, path=path, executor=Cluster(address), progress=kill)
    kept = len(read_results(path).rows)
    assert kept == len(finished) < 8
    rows = sweep(SMALL, CONSTANT, POLICIES, many, path=path, executor=Cluster(address))
    assert read_results(path).complete
    for row, other in zip(
        timeless(rows), timeless(sweep(SMALL, CONSTANT, POLICIES, many)), strict=True
    ):
        same(row, other, "row")
