"""Early exits and skipped layers, priced layer by layer on composed latencies."""

from __future__ import annotations

import pytest

from simulator.papers.ours import Ours
from simulator.papers.settings import setting_rows
from tests.conftest import Run
from traces.latency.table import LatencyTable
from traces.store.operators import at_depths
from traces.store.recordings import find_latency, find_trace

ONE, OTHER = "smollm2-cpu", "a100/llama-2-7b"


def test_a_recorded_layer_is_the_same_share_of_another_depth() -> None:
    own = find_latency(OTHER)
    priced = at_depths(own, 16)
    for batch in (1, 8):
        at = {"batch": batch, "context": 512}
        one, two = (t.seconds("target", "layer", **at).item() for t in (own, priced))
        assert two == pytest.approx(2 * one)
        assert priced.seconds("target", "forward", **at) == own.seconds("target", "forward", **at)
    assert at_depths(own, 32) is own
    assert at_depths(own, None) is own
    constant = LatencyTable.constant(0.01, 0.001)
    assert at_depths(constant, 16) is constant


def test_exits_and_skipped_layers_have_a_speedup_on_a_gpu_measured_by_others(run: Run) -> None:
    asked = ("simulate", "--trace", ONE, "--latency", OTHER, "--resamples", 8, "--json", "-")
    ran = run(*asked, "--policy", "specbound")
    assert ran.code == 0, ran.err
    assert "recorded of a target with 30 and are priced as the same share of 32" in ran.err
    [found] = [row for row in ran.rows if row["policy"] == "specbound"]
    assert 0.5 < found["speedup"] < 3
    skipped = run(*asked, "--source", "layer-skip", "--policy", "fixed:gamma=2")
    assert skipped.code == 0, skipped.err
    assert skipped.err.count("priced as the same share of 32") == 1
    [row] = [row for row in skipped.rows if row["policy"] == "fixed:gamma=2"]
    assert 0.3 < row["speedup"] < 2


def test_layer_skip_is_served_and_swept_in_batches(run: Run) -> None:
    asked = ("--trace", ONE, "--latency", OTHER, "--source", "layer-skip", "--policy",
             "fixed:gamma=1")  # fmt: skip
    ran = run("serve", *asked, "--batch", "1,4", "--requests", 8, "--json", "-")
    assert ran.code == 0, ran.err
    ran = run("sweep", *asked, "--batch", "1,4", "--resamples", 0, "--json", "-")
    assert ran.code == 0, ran.err


def test_specbound_on_an_h800_has_a_speedup_and_a_batch_curve() -> None:
    rows = setting_rows(Ours(find_trace("qwen-coder-cpu"), find_latency("a100/llama-2-7b")))
    found = {(row.row, row.column): row for row in rows}
    for model in ("Vicuna-7B", "Vicuna-13B"):
        one = found[f"{model}, H800", "speedup, SpecBound"]
        assert one.published is not None
        assert one.ours is not None
        assert one.ours >= 1
        assert "those of smollm2-cpu, of 30 layers" in one.note
        curve = [found[f"{model}, H800", f"speedup at batch {b}"].ours for b in (4, 16, 64)]
        assert all(value is not None for value in curve)
        row = found[f"{model}, H800", "speedup at batch 4, published acceptance"]
        assert row.ours is not None
        assert 1 < row.ours < one.published + 0.2


def test_a_table_without_layers_is_refused(run: Run) -> None:
    constant = "const:target=0.01,draft=0.001"
    ran = run("simulate", "--trace", ONE, "--latency", constant, "--source", "layer-skip")
    assert ran.code == 2
    assert "no 'layer' cells" in ran.err.splitlines()[-1]
