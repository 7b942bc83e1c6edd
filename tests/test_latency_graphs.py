"""CUDA graphs: what is padded, what launches cost, and the lists that commands take and propose."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import Run
from traces.errors import DraftsimError
from traces.latency.graphs import CAPTURED, CUDAGraphs
from traces.latency.interpolate import EXTRAPOLATED
from traces.latency.table import LatencyTable
from traces.operators.compose import LAUNCHED_S
from traces.store.operators import in_graphs
from traces.store.recordings import find_latency

PAIR = "rtx-3090/llama-3.1-8b+llama-3.2-1b"


def test_default_is_vllms_list() -> None:
    graphs = CUDAGraphs()
    assert graphs.sizes == CAPTURED
    assert len(CAPTURED) == 51
    assert graphs.padded([1, 5, 9, 250, 257, 512, 513]).tolist() == [1, 8, 16, 256, 272, 512, 513]
    assert CUDAGraphs.parsed(None, None) == graphs
    assert CUDAGraphs.parsed("16,4,8", "piecewise") == CUDAGraphs((4, 8, 16), "PIECEWISE")
    assert CUDAGraphs.parsed(None, "full_and_piecewise") == graphs
    assert CUDAGraphs.parsed(None, "NONE").sizes == ()


@pytest.mark.parametrize(
    ("sizes", "mode", "said"),
    [("4,x", None, "whole numbers"), ("0,4", None, "at least 1"), (None, "half", "PIECEWISE")],
)
def test_impossible_graphs_are_refused(sizes: str | None, mode: str | None, said: str) -> None:
    with pytest.raises(DraftsimError, match=said):
        CUDAGraphs.parsed(sizes, mode)


def test_proposed_sizes_pad_no_round() -> None:
    rows = [[1, 4, 5], [5, 16, 3], [17, 64, 1]]
    graphs = CUDAGraphs.for_lengths(rows)
    for first, last, length in rows:
        for batch in range(first, last + 1):
            asked = batch * (length + 1)
            padded = graphs.padded(asked).item()
            assert asked <= padded <= 1.125 * asked
            if batch <= 16:
                assert padded == asked


def test_composed_passes_cost_what_the_captured_size_costs() -> None:
    """Padding 5 sequences of 4 tokens to 24 costs the operators' difference; more is next up."""
    table = find_latency(PAIR)
    own, coarse, none = (
        in_graphs(table, graphs, 64)
        for graphs in (None, CUDAGraphs((4, 64, 512)), CUDAGraphs(mode="NONE"))
    )

    def read(of: LatencyTable, batch: int, width: int) -> float:
        sizes = {"batch": batch, "new_tokens": width, "context": 512}
        return of.seconds("target", "forward", **sizes).item()

    assert read(own, 5, 4) < read(coarse, 5, 4)
    # A layer's products of 20 tokens run over 64 like those of 64; attention keeps its own sizes.
    assert read(coarse, 5, 4) < read(coarse, 16, 4)
    assert read(coarse, 16, 4) == pytest.approx(read(own, 16, 4))
    launched = read(none, 8, 4) - read(own, 8, 4)
    assert launched == pytest.approx(32 * LAUNCHED_S)
    assert own.meta["captured"] == list(CAPTURED)
    assert none.meta["graph_mode"] == "NONE"
    batches = own.grid("target", "forward").batches
    assert set(range(1, 65)) <= set(batches)


def test_a_measured_table_is_padded_with_sequences_without_a_cache() -> None:
    table = find_latency("smollm2-vllm-draft-cpu")
    assert in_graphs(table, None, 8) is table
    padded = in_graphs(table, CUDAGraphs((4, 16)), 8)
    for batch, width, run in ((1, 4, 4), (3, 2, 16), (2, 8, 16), (5, 4, 20)):
        context = 64.0 * run / (batch * width)
        expected = table.seconds(
            "target", "forward", batch=run / width, new_tokens=width, context=64.0
        ).item()
        found = padded.seconds(
            "target", "forward", batch=batch, new_tokens=width, context=context
        ).item()
        assert found == pytest.approx(expected, rel=0.05)
    with pytest.raises(DraftsimError, match="measured in one mode"):
        in_graphs(table, CUDAGraphs(mode="NONE"), 8)
    with pytest.raises(DraftsimError, match="do not say what a batch costs"):
        in_graphs(LatencyTable.constant(0.01, 0.001), CUDAGraphs((4,)), 8)


def test_padding_measures_nothing() -> None:
    table = find_latency("h200-llama-3.1-8b+1b-graph")  # of 64 requests, only short contexts
    asked = {"batch": 64, "new_tokens": 1, "context": 9000}
    assert table.estimate("target", "forward", **asked).origin == EXTRAPOLATED
    padded = in_graphs(table, CUDAGraphs(tuple(range(1, 65))), 64)
    assert padded.estimate("target", "forward", **asked).origin == EXTRAPOLATED


def test_serve_and_capacity_take_the_list(run: Run) -> None:
    common = ("--trace", "qwen-coder-cpu", "--latency", PAIR, "--policy", "fixed:gamma=2")
    rates = {}
    for name, more in (("own", ()), ("wide", ("--cudagraph-capture-sizes", "256,512"))):
        ran = run("serve", *common, "--batch", "2", "--requests", "20", *more, "--json", "-").ok()
        rates[name] = ran.rows[-1]["throughput_tok_s"]
    assert rates["wide"] < 0.95 * rates["own"]
    for command in (("serve", "--batch", "2"), ("capacity", "--slo", "tpot=1s", "--rate", "1")):
        refused = run(*command[:1], *common, *command[1:], "--cudagraph-mode", "half")
        assert refused.code == 2
        assert "CUDA-graph mode is 'HALF'" in refused.err.splitlines()[-1]


def test_tune_proposes_multiples_of_k_plus_1(run: Run) -> None:
    ran = run(
        "tune", "--engine", "vllm", "--trace", "qwen-coder-cpu", "--latency", PAIR, "--batch",
        "1,3", "--resamples", "8", "--json", "-",
    ).ok()  # fmt: skip
    said = ran.document
    found = said["cudagraph_capture_sizes"]
    for first, last, length in said["settings"]["num_speculative_tokens_per_batch_size"]:
        assert {b * (length + 1) for b in range(first, last + 1)} <= set(found)
    assert f"--cudagraph-capture-sizes {' '.join(map(str, found))}" in said["launch"]
    assert "capture multiples of K + 1" in ran.err
    assert np.all(np.diff(found) > 0)
