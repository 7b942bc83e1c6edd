"""TensorRT-LLM's schedule, Dynamo's mocker rates and vLLM's table by sequence length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.batch.engines import TensorRTLLM
from policies.core import Load
from policies.lengths.basic import Autoregressive, Fixed
from simulator.aggregate.positions import of_trace
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from simulator.targets import Targets
from simulator.tune.costs import RESTING
from simulator.tune.formats import SettingsError, check_settings, read_settings
from simulator.tune.served import closed_load, served_rates
from simulator.tune.tensorrt_llm import tune_dynamo, tune_tensorrt_llm
from tests.conftest import Run
from tests.tuning import batched, iid
from traces.acceptance.synthetic import synthetic_trace, trace_by_position
from traces.latency.table import LatencyTable
from traces.store.recordings import find_latency, find_trace

TRACE = synthetic_trace(0.8, requests=12, tokens=60, seed=3)
FREE = LatencyTable.constant(0.01, 0.0005)
"""Passes cost the same at every batch: drafts pay everywhere."""


def test_tensorrt_llms_schedule_is_one_that_it_takes(tmp_path: Path) -> None:
    found = tune_tensorrt_llm(TRACE, FREE, [1, 4], lengths=(0, 2, 4), draws=20)
    document: Any = found.document
    check_settings("tensorrt-llm", document)
    assert document["max_draft_len"] == 4
    assert list(document["draft_len_schedule"].values()) == [4]
    # Passes over two drafts cost 1.1 plain steps: a tenth of a token breaks even.
    assert document["acceptance_length_threshold"] == pytest.approx(4 * 0.05, abs=0.01)
    assert document["acceptance_window"] >= 8
    path = tmp_path / "s.json"
    path.write_text(json.dumps(document))
    engine, policy = read_settings(path)
    assert engine == "tensorrt-llm"
    assert isinstance(policy, TensorRTLLM)
    assert policy.plan([Load(4, 10)] * 4) == 4
    assert policy.plan([Load(5, 10)] * 5) == 0


def test_tensorrt_llm_is_not_said_to_run_the_drafter_at_no_drafts() -> None:
    """Its workers skip the draft at length 0 (``skip_drafting`` of _torch/speculative)."""
    found = tune_tensorrt_llm(iid(0.7, 20, 40), batched(), [1, 64], lengths=(0, 1, 3), draws=20)
    said = " ".join(found.warnings)
    assert "K = 0 is priced with a draft pass, which TensorRT-LLM may skip (slower by" in said
    assert "still runs the drafter" not in said


def test_the_gate_leaves_on_what_the_search_says_is_on() -> None:
    """One draft accepts one token at most, and four have to accept more than that to gain."""
    trace, latency = find_trace("qwen-coder-cpu"), find_latency("qwen-coder-vllm-cpu")
    found = tune_tensorrt_llm(trace, latency, [1, 2], lengths=(0, 1, 4), draws=20)
    document: Any = found.document
    assert set(document["draft_len_schedule"].values()) == {1, 4}
    assert document.get("acceptance_length_threshold", 0.0) < of_trace("", trace, 1).known[1] - 1
    policy = check_settings("tensorrt-llm", document)
    scenario = Scenario(ClosedLoop(2), Limits(max_batch=2), requests=200)
    ours, plain = (
        simulate(trace, latency, one, scenario).row()["throughput_tok_s"]
        for one in (policy, Autoregressive())
    )
    assert ours / plain > 1.2


def test_dynamos_rates_are_the_recordings() -> None:
    found = tune_dynamo(TRACE, FREE, [1], draws=20)
    document: Any = found.document
    check_settings("dynamo", document)
    rates = [float(rate) for rate in document["aic_nextn_accept_rates"].split(",")]
    own = of_trace("", TRACE, document["aic_nextn"]).rates
    assert rates == pytest.approx(np.asarray(own).tolist(), abs=1e-4)


def test_dynamos_rates_are_those_given() -> None:
    found = tune_dynamo(trace_by_position((0.9, 0.5)), FREE, [1], draws=20)
    document: Any = found.document
    assert document["aic_nextn_accept_rates"] == "0.9000,0.5556"


def test_dynamos_rows_are_of_the_one_length_that_its_mocker_drafts() -> None:
    trace, latency = find_trace("qwen-coder-cpu"), find_latency("qwen-coder-vllm-cpu")
    found = tune_dynamo(trace, latency, [1, 4], lengths=(0, 2, 4), draws=20)
    document: Any = found.document
    assert {row["setting"] for row in found.rows} == {f"K={document['aic_nextn']}"}


def test_dynamos_rows_are_of_its_one_length_where_resting_would_be_faster() -> None:
    """At batch 64 K = 0 loses less than any draft, but Dynamo has no table to write it into."""
    trace, latency = iid(0.7, 20, 40), batched()
    found = tune_dynamo(trace, latency, [1, 64], lengths=(0, 1, 3), draws=20)
    document: Any = found.document
    k = document["aic_nextn"]
    assert [row["setting"] for row in found.rows] == [f"K={k}", f"K={k}"]
    assert [row["deploy"] for row in found.rows] == ["on", "off"]
    load = closed_load(trace, 64, latency=latency)
    lone = served_rates(trace, latency, [Fixed(k), RESTING], load).mean(axis=1)
    assert found.rows[1]["served_tok_s"] == pytest.approx(lone[0], rel=1e-12)
    assert lone[1] > lone[0]
    said = " ".join(found.warnings)
    assert "because it drafts at every load: start the server without aic_nextn" in said
    assert "table" not in said
    assert "K = 0" not in said


def test_dynamos_one_length_is_of_a_load_that_meets_the_slo() -> None:
    """K = 2 is faster at batch 16, which misses 9 ms per token whatever is drafted."""
    trace, latency = iid(0.7, 20, 40), batched()
    found = tune_dynamo(trace, latency, [1, 16], slo=Targets(tpot_s=0.009), draws=20)
    free = tune_dynamo(trace, latency, [1, 16], draws=20)
    assert [row["deploy"] for row in found.rows] == ["on", "SLO missed"]
    assert [one.document["aic_nextn"] for one in (found, free)] == [4, 2]  # type: ignore[index]


def test_an_engine_is_started_without_its_own_option() -> None:
    """Where drafts lose, it is not vLLM's option that is to be left out."""
    dear = LatencyTable.constant(0.01, 0.02)
    for tune, own in ((tune_tensorrt_llm, "speculative_config"), (tune_dynamo, "aic_nextn")):
        said = " ".join(tune(TRACE, dear, [1], draws=20).warnings)
        assert f"start the server without {own}" in said
        assert "--speculative-config" not in said


def test_drafts_that_pay_nowhere_leave_nothing_to_write() -> None:
    dear = LatencyTable.constant(0.01, 0.02)
    for tune in (tune_tensorrt_llm, tune_dynamo):
        assert tune(TRACE, dear, [1], draws=20).document is None


@pytest.mark.parametrize(
    ("engine", "document", "said"),
    [
        ("tensorrt-llm", {"max_draft_len": 4}, "draft_len_schedule is None"),
        ("tensorrt-llm", {"max_draft_len": 4, "draft_len_schedule": {"4": 2, "8": 4}},
         "smallest batch size must have the longest draft"),
        ("tensorrt-llm", {"max_draft_len": 2, "draft_len_schedule": {"4": 2, "8": 4}},
         "smallest batch size must have the longest draft"),
        ("tensorrt-llm", {"max_draft_len": 4, "draft_len_schedule": {"4": 2}},
         "must have max_draft_len = 4"),
        ("tensorrt-llm", {"max_draft_len": 2, "draft_len_schedule": {"x": 2}}, "by batch size"),
        ("tensorrt-llm", {"max_draft_len": 2, "draft_len_schedule": {"4": 2},
                          "max_concurrency": 8}, "excludes draft_len_schedule"),
        ("tensorrt-llm", {"max_draft_len": 2, "draft_len_schedule": {"4": 2},
                          "acceptance_length_threshold": -1}, "^acceptance_length_threshold is -1"),
        ("dynamo", {"aic_nextn": 6, "aic_nextn_accept_rates": "1"}, "1 to 5"),
        ("dynamo", {"aic_nextn": 2, "aic_nextn_accept_rates": "0.8"}, "expected 2 chances"),
        ("dynamo", {"aic_nextn": 1, "aic_nextn_accept_rates": "1.2"}, "expected 1 chances"),
        ("vllm", {"num_speculative_tokens": 4,
                  "num_speculative_tokens_per_seq_len": [[1, 10, 4], [20, 30, 0]]},
         "expected to start at 11"),
        ("vllm", {"num_speculative_tokens": 4,
                  "num_speculative_tokens_per_seq_len": [[1, 10, 5]]}, "more, up to num_sp"),
        ("vllm", {"num_speculative_tokens": 4,
                  "num_speculative_tokens_per_batch_size": [[1, 64, 4]],
                  "num_speculative_tokens_per_seq_len": [[1, 10, 0]]}, "which table wins"),
        ("vllm", {"num_speculative_tokens": 4,
                  "num_speculative_tokens_per_seq_len": [[1, 8, 3], [9, 5, 2]]},
         r"^num_speculative_tokens_per_seq_len is \[9, 5\]: the range 9..5 is empty"),
        ("vllm", {"num_speculative_tokens": 4, "num_speculative_tokens_per_seq_len": []},
         "expected a list of rows"),
    ],
)  # fmt: skip
def test_what_an_engine_would_refuse_is_not_written(
    engine: str, document: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        check_settings(engine, document)


def test_vllms_table_by_sequence_length(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "spec.json"
    ran = run("tune", "--engine", "vllm", "--by-length", "--trace", "bundled", "--resamples", 20,
              "--context", "64,128,200", "--out", out).ok()  # fmt: skip
    document = json.loads(out.read_text())
    rows = document["num_speculative_tokens_per_seq_len"]
    check_settings("vllm", document)
    assert rows[0][0] == 1
    engine, policy = read_settings(out)
    assert engine == "vllm"
    for low, _, k in rows:
        assert policy.plan([Load(7, low)] * 7) == k  # type: ignore[union-attr]
    assert "does not read this table" in ran.err
    # An engine finds no model by a recording's name for it.
    named = run("tune", "--engine", "vllm", "--trace", "smollm2-vllm-eagle3-cpu", "--batch", "1",
                "--resamples", 4).ok()  # fmt: skip
    assert "on the hub, for smollm2 and smollm2-eagle3 launch: vllm serve smollm2 " in named.said
    assert run("tune", "--engine", "vllm", "--by-length", "--batch", "1,4").code == 2


@pytest.mark.parametrize("engine", ["tensorrt-llm", "dynamo"])
def test_settings_on_the_command_line(engine: str, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "settings.json"
    ran = run("tune", "--engine", engine, "--trace", "bundled", "--batch", "1", "--resamples", 20,
              "--out", out).ok()  # fmt: skip
    document = json.loads(out.read_text())
    if document is not None:
        check_settings(engine, {k: v for k, v in document.items() if k not in ("method", "model")})
    assert "launch: " in ran.err
