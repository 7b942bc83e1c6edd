"""A real vLLM server under our policies: its rounds over HTTP are the replay's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.server_runs import POLICIES, with_words
from tests.test_vllm import INSTALLED, PYTHON
from traces.store.files import read_latency

LOADS = ("closed:1", "closed:3", "rate:20")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not INSTALLED.is_file():
        pytest.skip("needs vLLM in .venv-vllm next to .venv: make vllm")
    folder = tmp_path_factory.mktemp("server")
    with_words(folder / "miniature")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(PYTHON), "-m", "tests.server_runs", str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads((folder / "rows.json").read_text())


@pytest.mark.invariant(1)
def test_rounds_behind_a_server_are_the_replays(served: Any) -> None:
    rows = served[1]
    assert [(r["load"], r["policy"]) for r in rows] == [
        (load, policy) for load in LOADS for policy in ("autoregressive", *POLICIES)
    ]
    assert [r["rounds_differ"] for r in rows] == [0] * len(rows)


def test_one_client_meets_the_simulators_iterations(served: Any) -> None:
    for row in served[1]:
        if row["load"] == "closed:1":
            assert row["iterations"] == row["iterations_predicted"] > 0


def test_the_server_adds_time_around_requests_and_iterations(served: Any) -> None:
    for row in served[1]:
        assert row["request_s"] > 0
        assert 0 < row["share"] < 1
        assert 0 < row["share_predicted"] < 1
        assert row["ttft_s"] > row["request_s_predicted"] / 10
        assert row["e2e_s_bare"] < row["e2e_s_predicted"]
        assert sum(k["iterations"] for k in row["kinds"]) == row["iterations"]
        assert sum(k["measured_s"] for k in row["kinds"]) == pytest.approx(row["busy_s"])


def test_the_servers_share_is_kept_as_cells_of_control_loops(served: Any) -> None:
    folder = Path(served[0])
    cells = read_latency(folder / "latency-http.parquet").cells
    server = cells[cells["model"] == "server"]
    assert set(server["phase"]) == {"request", "iteration", "apart"}
    assert set(server["batch"]) == {1, 4}
    around = server[server["phase"] == "request"]
    assert (around["median_s"] > 0).all()
    predicted = {r["request_s_predicted"] for r in served[1] if r["load"] == "closed:1"}
    assert predicted == {float(around["median_s"][around["batch"] == 1].iloc[0])}
