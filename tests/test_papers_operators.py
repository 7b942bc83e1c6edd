"""Operators against others' measurements: whole steps, half the cells, decoding, a server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from simulator.hardware.scaling import bounds_of
from simulator.papers.measured.engines import (
    SERVER,
    SERVER_LOG,
    read_over_time,
    server_rows,
)
from simulator.papers.measured.operators import (
    ALONE,
    WITH_HOST,
    attention_rows,
    concurrency_rows,
    decode_rows,
    eagle_rows,
    expert_rows,
    law_rows,
    product_rows,
    step_rows,
)
from simulator.papers.measured.rows import Evidence, by_study, kind_of
from traces.errors import DraftsimError
from traces.store.recordings import find_latency


def errors(rows: Sequence[Evidence], given: str) -> list[float]:
    found = [abs(row.error) for row in rows if kind_of(row.given) == given]
    assert found
    return found


def test_a_few_whole_steps_say_what_the_others_take() -> None:
    rows = list(step_rows())
    alone = errors(rows, ALONE)
    assert np.median(alone) > 0.1  # what the steps by themselves take beyond their operators
    assert max(alone) > 0.35
    for given in (
        "operators, and steps of 1 and 64 tokens",
        "operators, and steps at 1k of context",
    ):
        assert np.median(errors(rows, given)) < 0.03
        assert max(errors(rows, given)) < 0.1


def test_half_the_cells_say_the_others() -> None:
    assert np.median(errors(list(product_rows()), "products of the GPU's other models")) < 0.06
    assert np.median(errors(list(attention_rows()), "half the cells")) < 0.05
    assert np.median(errors(list(expert_rows()), "half the cells")) < 0.05
    assert np.median(errors(list(law_rows()), "another GPU's attention")) < 0.2


def test_published_decode_steps() -> None:
    record = by_study(list(decode_rows()))
    assert record["Qwen2.5, vLLM on A100", WITH_HOST].median < 0.07
    assert record["llama.cpp, several GPUs", WITH_HOST].median < 0.05
    assert record["llama.cpp, tokens a pass", ALONE].median < 0.05
    assert record["gpt-fast on A100", ALONE].median < 0.05


def test_an_a100s_server_at_several_concurrencies() -> None:
    rows = list(concurrency_rows())
    for row, bound in zip(rows, (0.03, 0.03, 0.06, 0.1), strict=True):
        assert abs(row.error) < bound


def test_300_requests_through_a_real_server(shared_data: Path) -> None:
    if not (shared_data / SERVER_LOG).is_file():
        pytest.skip("needs the requests of a server in ../shared/data/gpu_ops")
    rows = server_rows(shared_data)
    error = {row.quantity: abs(row.error) for row in rows}
    record = by_study(rows)
    given = "operators and the server's settings"
    for of, bound in (
        ("ttft of each request", 0.02),
        ("e2e of each request", 0.02),
        ("running over time", 0.06),
        ("waiting over time", 0.06),
    ):
        assert record[SERVER, f"{given}, {of}"].median < bound
    assert record[SERVER, f"{given}, ttft of each request"].rows == 300
    for name in ("tpot", "e2e"):
        assert error[f"{name} mean, s"] < 0.012
        assert error[f"{name} p99, s"] < 0.03
    assert error["tpot p50, s"] < 0.01
    # The server found beginnings of prompts in its prefix cache; the data has no tokens to tell.
    assert error["e2e p50, s"] < 0.04
    for label in ("mean", "p50", "p90", "p99"):
        assert error[f"ttft {label}, s"] < 0.03


def test_a_70b_whose_layers_lie_on_four_gpus(shared_data: Path) -> None:
    if not (shared_data / "eagle_logs").is_dir():
        pytest.skip("needs EAGLE's logs in ../shared/data")
    found = {row.quantity: row.error for row in eagle_rows(shared_data)}
    assert abs(found["ms a token, plain"]) < 0.15
    assert list(eagle_rows(shared_data / "elsewhere")) == []


def test_samples_over_time_are_means_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "timeseries.csv"
    lines = [f"{t}.0,{t},{2 * t},5" for t in range(1, 14)]
    path.write_text("\n".join(["t,running,waiting,kv_cache_pct", *lines]))
    found = read_over_time(path)
    assert found["running"].tolist() == [5.5, 12.0]
    assert found["waiting"].tolist() == [11.0, 24.0]
    path.write_text("t,running\n1.0,x\n")
    with pytest.raises(DraftsimError, match="cannot read the samples"):
        read_over_time(path)


def test_damaged_requests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / SERVER_LOG
    path.parent.mkdir(parents=True)
    assert server_rows(tmp_path / "elsewhere") == []
    path.write_bytes(gzip.compress(json.dumps({"input_toks": 1}).encode()))
    with pytest.raises(DraftsimError, match="is not of LLMServingSim's bench"):
        server_rows(tmp_path)


def test_whole_steps_correct_passes_unless_operators_are_asked_for() -> None:
    names = [f"rtx-pro-6000{kind}/llama-3.1-8b" for kind in (":operators", "")]
    alone, steps = map(find_latency, names)
    at = {"batch": 64, "context": 8191}
    short, whole = (t.seconds("target", "forward", **at).item() for t in (alone, steps))
    assert whole == pytest.approx(89.6e-3, rel=0.03)  # the step table's
    assert short < 0.7 * whole
    assert "attention 1.6" in steps.meta["said"]
    assert "leave out ':operators'" in alone.meta["said"]
    a100 = [find_latency(f"a100{kind}/llama-2-7b").cells for kind in ("", ":operators")]
    assert a100[0].equals(a100[1])


def test_passes_that_no_step_covers_have_an_interval() -> None:
    """From the sum of the operators to the corrected time."""
    alone, steps = (
        find_latency(f"rtx-pro-6000{kind}/llama-3.1-8b+llama-3.2-1b") for kind in (":operators", "")
    )
    bounds = bounds_of(steps)
    assert bounds is not None
    assert bounds.dear is steps
    assert bounds_of(alone) is None
    assert bounds_of(find_latency("a100/llama-2-7b")) is None

    def read(model: str, **sizes: int) -> list[float]:
        tables = (alone, bounds.cheap, steps)
        return [table.seconds(model, "forward", **sizes).item() for table in tables]

    for sizes in ({"batch": 64, "context": 4096}, {"batch": 128, "context": 512}):
        low, cheap, dear = read("target", **sizes)
        assert low < cheap == dear
    for model, sizes in (
        ("target", {"batch": 8, "new_tokens": 4, "context": 1024}),  # a verification
        ("target", {"batch": 128, "context": 8192}),  # beyond 64 sequences of 8k
        ("draft", {"context": 1024}),  # another model
    ):
        low, cheap, dear = read(model, **sizes)
        assert low == cheap < dear
