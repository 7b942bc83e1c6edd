"""Requests that a real server got: read from its benchmark's file, served, and compared."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.serving.arrivals import read_requests
from simulator.serving.outcome.metrics import compared
from tests.conftest import Run
from traces.errors import FileError

PLAIN = ("serve", "--policy", "autoregressive", "--latency", "rtx-4090/llama-3.1-8b")
BENCH = "gpu_ops/llmservingsim/bench/RTX4090-Llama-3.1-8B/requests.jsonl.gz"


def detailed() -> dict[str, Any]:
    """A result of ``vllm bench serve --save-detailed``: the second request started first."""
    return {
        "input_lens": [40, 20, 10], "output_lens": [4, 3, 0], "ttfts": [0.2, 0.1, 0.0],
        "itls": [[0.05, 0.05, 0.05], [0.04, 0.04], []], "start_times": [101.0, 100.0, 102.0],
        "errors": ["", "", "refused"],
    }  # fmt: skip


def test_a_detailed_result_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(detailed()))
    found = read_requests(path)
    assert found.arrival_s.tolist() == [0.0, 1.0]
    assert found.prompt.tolist() == [20, 40]
    assert found.output.tolist() == [3, 4]
    assert found.skipped == 1
    assert found.measured["ttft_s"].tolist() == [0.1, 0.2]
    assert found.measured["tpot_s"] == pytest.approx([0.04, 0.05])
    assert found.measured["e2e_s"] == pytest.approx([0.18, 0.35])


def test_the_requests_of_a_bench_are_read(tmp_path: Path) -> None:
    rows = [
        {"input_toks": 8, "output_toks": 3, "queued_ts": 5.0, "first_token_ts": 5.5,
         "last_token_ts": 5.7},
        {"input_toks": 9, "output_toks": 1, "queued_ts": 4.0, "first_token_ts": 4.25,
         "last_token_ts": 4.25},
    ]  # fmt: skip
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = read_requests(path)
    assert found.arrival_s.tolist() == [0.0, 1.0]
    assert found.prompt.tolist() == [9, 8]
    assert found.measured["tpot_s"] == pytest.approx([0.0, 0.1])


def test_statistics_are_compared_metric_by_metric() -> None:
    measured = {"ttft_s": np.array([1.0, 2.0, 3.0])}
    rows = compared({"ttft_s": np.array([1.1, 2.2, 3.3])}, measured)
    assert [row["statistic"] for row in rows] == ["mean", "p50", "p90", "p95", "p99"]
    assert [row["error"] for row in rows] == pytest.approx([0.1] * 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"itls": None}, "run `vllm bench serve --save-result --save-detailed`"),
        ({"start_times": None}, "does not say when requests started"),
        ({"start_times": [1.0]}, "is damaged"),
        ({"output_lens": [0, 0, 0]}, "holds no request that succeeded"),
        ({"output_lens": [4, 2.5, 0]}, "request 1 by arrival: has impossible"),
    ],
)
def test_what_is_no_detailed_result_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    document = {**detailed(), **change}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    with pytest.raises(FileError, match=re.escape(said)):
        read_requests(path)


@pytest.mark.usefixtures("nothing_named")
def test_plain_decoding_needs_no_recording(run: Run, tmp_path: Path) -> None:
    ran = run(*PLAIN, "--prompt", 512, "--output", 32, "--batch", "1,2", "--requests", 6, "--json",
              "-").ok()  # fmt: skip
    assert {row["policy"] for row in ran.rows} == {"autoregressive"}
    assert (
        "requests of 512 prompt and 32 output tokens"
        in run(*PLAIN, "--prompt", 512, "--output", 32, "--batch", 1, "--requests", 4).err
    )
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(detailed()))
    ran = run(*PLAIN, "--arrivals", path).ok()
    assert re.search(r"ttft, ms +mean +[\d.]+ +150", ran.out)
    assert "tpot, ms" in ran.out
    asked = run(*PLAIN, "--arrivals", path, "--json", "-").document
    assert len(asked["measured"]) == 15
    # What drafts still needs a recording.
    refused = run("serve", *PLAIN[3:], "--policy", "fixed:gamma=2", "--batch", 1)
    assert "--trace" in refused.refusal


@pytest.mark.usefixtures("nothing_named")
def test_lengths_do_not_go_with_those_of_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(detailed()))
    ran = run(*PLAIN, "--arrivals", path, "--prompt", 8)
    assert "has the requests' lengths" in ran.refusal


@pytest.mark.usefixtures("nothing_named")
def test_the_300_requests_of_a_real_server_are_compared(run: Run, shared_data: Path) -> None:
    limits = ("--max-batch", 256, "--token-budget", 2048, "--kv-blocks", 2587)
    ran = run(*PLAIN, "--arrivals", shared_data / BENCH, *limits, "--async-scheduling", "--json",
              "-")  # fmt: skip
    rows = ran.document["measured"]
    errors = {(row["metric"], row["statistic"]): row["error"] for row in rows}
    assert abs(errors["tpot_s", "mean"]) < 0.02
    assert abs(errors["e2e_s", "mean"]) < 0.01
    assert abs(errors["ttft_s", "mean"]) < 0.02


@pytest.mark.usefixtures("nothing_named")
def test_capacity_of_plain_decoding_needs_no_recording(run: Run) -> None:
    ran = run("capacity", *PLAIN[1:], "--rate", 2, "--slo", "tpot=40ms", "--requests", 40,
              "--replications", 2).ok()  # fmt: skip
    assert "256 output tokens" in ran.said
