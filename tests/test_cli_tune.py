"""``draftsim tune``: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulator.tune import TUNE_COLUMNS
from tests.conftest import Run
from tests.tuning import batched
from traces.files import write_latency, write_trace
from traces.latency import LatencyTable
from traces.synthetic import synthetic_trace


@pytest.fixture
def recorded(tmp_path: Path) -> SimpleNamespace:
    trace = synthetic_trace(0.7, requests=12, tokens=40, max_gamma=24, concentration=4.0, seed=1)
    write_trace(trace, tmp_path / "trace.parquet")
    write_latency(batched(), tmp_path / "latency.parquet")
    return SimpleNamespace(folder=tmp_path, out=tmp_path / "settings.json")


@pytest.mark.parametrize(
    ("engine", "key"),
    [("vllm", "num_speculative_tokens"), ("sglang", "1"), ("hf", "num_assistant_tokens")],
)
def test_the_command_writes_file_and_rows(
    run: Run,
    recorded: SimpleNamespace, engine: str, key: str,
) -> None:  # fmt: skip
    more = [] if engine == "hf" else ["--batches", "1,16", "--draws", "4"]
    ran = run(
        "tune", "--engine", engine, "--trace", recorded.folder, "--slo", "ttft=5,tpot=0.05",
        "--out", recorded.out, "--json", "-", *more,
    )  # fmt: skip
    found = ran.rows
    assert [r["batch"] for r in found] == ([1] if engine == "hf" else [1, 16])
    assert tuple(found[0]) == TUNE_COLUMNS
    assert key in json.loads(recorded.out.read_text())
    assert "only 12 prompts" in ran.err


def test_the_command_serves_what_it_found(run: Run, recorded: SimpleNamespace) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batches", "1,4", "--check",
        "--json", "-",
    )  # fmt: skip
    for row in ran.rows:
        assert row["not_worse"] is True
        assert row["rival"] in ("off", "K=1", "K=3", "K=5")
        assert row["margin_lo"] <= row["margin_hi"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--slo", "fast"], "expected ttft=SECONDS"),
        (["--engine", "vllm", "--slo", "tpot=-1"], "expected ttft=SECONDS"),
        (["--engine", "vllm", "--batches", "0"], "expected whole numbers >= 1"),
        (["--engine", "hf", "--batches", "1,2"], "decodes one request"),
        (["--engine", "sglang", "--by-context"], "a form of vllm's"),
        (["--engine", "tgi"], "tgi"),
    ],
)
def test_wrong_options_are_one_line(
    run: Run,
    recorded: SimpleNamespace, arguments: list[str], message: str,
) -> None:  # fmt: skip
    ran = run("tune", "--trace", recorded.folder, *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_where_it_never_pays_the_file_says_null(run: Run, recorded: SimpleNamespace) -> None:
    slow = batched().cells
    slow.loc[slow["model"] == "draft", "median_s"] *= 20
    write_latency(LatencyTable(slow), recorded.folder / "latency.parquet")
    ran = run(
        "tune", "--engine", "vllm", "--trace", recorded.folder, "--batches", "1,4", "--check",
        "--out", recorded.out, "--json", "-",
    )  # fmt: skip
    assert json.loads(recorded.out.read_text()) is None
    assert [row["deploy"] for row in ran.rows] == ["off", "off"]
    assert all(row["not_worse"] for row in ran.rows)
    assert "leave it off" in ran.err
