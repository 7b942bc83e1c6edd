"""The recordings of a real GPU: what they hold, and what is said of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from docs.engine_tables import checks
from policies.registry import PLAIN
from profiler.latency.passes import layer_blocks
from profiler.models.architectures import PAIRS
from profiler.models.stack import LayerRunner
from simulator.hardware.scaling import carry_over
from simulator.validation import anchor_drift, check_recording
from tests.conftest import ROOT, Run
from traces.latency.table import LatencyTable
from traces.operators.devices import DEVICES
from traces.store.recordings import BUNDLED, TRACE_VARIABLE, find_latency

DRAFTING = "fixed:gamma=4"
H200 = sorted(folder.name for folder in BUNDLED.glob("h200-*"))


@pytest.mark.parametrize("name", H200)
def test_a_recording_of_the_gpu_names_it_and_holds_a_pairs_passes(name: str) -> None:
    table = find_latency(name)
    assert table.meta["device"] == "NVIDIA H200"
    assert table.meta["quick"] is False
    for model in ("target", "draft"):
        own = table.cells["model"].eq(model) & table.cells["phase"].eq("forward")
        cells = table.cells[own & table.cells["batch"].eq(1)]
        assert len(cells) > 3
        assert cells["median_s"].between(1e-4, 0.1).all()


@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_a_longer_context_takes_longer(mode: str) -> None:
    table = find_latency(f"h200-llama-3.1-8b+1b-{mode}")
    for model in ("target", "draft"):
        times = table.seconds(model, "forward", batch=1, new_tokens=1, context=[128, 1024, 16384])
        assert (np.diff(times) > 0).all()


def test_the_logs_composed_passes_of_an_h100_are_those_of_the_operators() -> None:
    """Its table of passes composed from others' timings, and timed by ourselves on the same GPU."""
    text = (ROOT / "docs" / "log" / "gpu.md").read_text(encoding="utf-8")
    row = r"^\| (target|draft), (\d+) tokens?.* \| (.+) \| (.+) \| −(\d+)% \|$"
    rows = re.findall(row, text, re.MULTILINE)
    composed = find_latency("h100/llama-3.1-8b+llama-3.2-1b")
    measured = find_latency("h100-llama-3.1-8b+1b-compiled")
    contexts = (128, 128, 128, 1024, 4096, 128)
    assert len(rows) == len(contexts)
    for (model, width, told, timed, less), context in zip(rows, contexts, strict=True):
        pass_ = {"batch": 1, "new_tokens": int(width), "context": context}
        ours, own = (
            1e3 * float(t.seconds(model, "forward", **pass_)) for t in (composed, measured)
        )
        assert (f"{ours:.2f}", f"{own:.2f}", f"{1 - ours / own:.0%}") == (told, timed, f"{less}%")


def test_the_pages_figures_of_vllm_on_an_h100_are_those_recorded(run: Run) -> None:
    log, readme = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("docs/log/gpu.md", "README.md")
    )
    rows = checks("h100-vllm-llama-3.1-8b+1b", "engine-*.json")
    compared = sum(row["rounds_compared"] for row in rows)
    iterations = sum(row["iterations"] for row in rows)
    assert f"**{compared:,} rounds and {iterations:,} iterations are the predicted ones" in log
    drafting = [row for row in rows if row["policy"] != PLAIN]
    for name, said in (("profile_", "the profile"), ("", "`--remeasure`")):
        speedups = np.abs([row[f"{name}speedup_error"] for row in drafting])
        rates = np.abs([row[f"{name}error"] for row in rows])
        [line] = [x for x in log.splitlines() if x.startswith(f"| {said}")]
        shown = [float(x) for x in re.findall(r"([\d.]+)%", line)]
        found = 100 * np.array([np.median(speedups), speedups.max(), np.median(rates)])
        assert shown == pytest.approx(found, abs=0.5)
    asked = ("--batch", "1,4", "--requests", 8, "--warmup", 0, "--policy", DRAFTING, "--json", "-")
    pair = ("--trace", "qwen-coder-cpu", "--latency", "h100/llama-3.1-8b+llama-3.2-1b")
    composed = {(r["batch"], r["policy"]): r for r in run("serve", *pair, *asked).ok().rows}
    for many in (1, 4):
        [own] = [r for r in drafting if (r["load"], r["policy"]) == (f"closed:{many}", DRAFTING)]
        requests = "1 request" if many == 1 else f"{many} requests"
        told, real = composed[many, PLAIN]["throughput_tok_s"], own["throughput_defaults"]
        line = f"{told:.0f} | {real:.0f} | {told / real - 1:+.0%}"
        assert f"| tokens/s without a drafter, {requests} | {line} |" in log
        told, real = composed[many, DRAFTING]["speedup"], own["speedup_defaults"]
        line = f"{told:.2f}x | {real:.2f}x | {told / real - 1:+.0%}"
        assert f"| `{DRAFTING}` over that, {requests} | {line} |" in log
        if many == 1:
            assert f"gave [{real:.2f}x over vLLM without a drafter]" in readme
            assert f"where composed costs promise {told:.2f}x" in readme


def test_batches_whose_passes_were_not_timed_are_named_and_left_out(run: Run) -> None:
    folder = BUNDLED / "h200-llama-3.1-8b+1b-eager"
    rows = check_recording(folder)
    assert set(rows["batch"]) == {1}
    assert list(rows.attrs["left_out"]) == [4]
    assert list(anchor_drift(folder)) == [1]
    said = run("validate", "recorded", folder.name).ok()
    why = said.said
    assert "left out h200-llama-3.1-8b+1b-eager at batch 4: these latencies know" in why
    assert "met, MISSED: median |error| up to 2%, worst up to 5%" in said.out


def test_dictated_verdicts_are_called_synthetic_acceptance(run: Run) -> None:
    said = run("simulate", "--trace", "h200-llama-3.1-8b+1b-graph", "--policy", "fixed:gamma=2")
    first = " ".join((said.out + said.err).split())
    assert "synthetic acceptance, costs of llama-3.1-8b+1b in graph, NVIDIA H200" in first
    own = run("simulate", "--trace", "h200-trained-12+3-graph", "--policy", "fixed:gamma=2").ok()
    assert "synthetic" not in own.out + own.err


def test_nobody_is_sent_to_a_synthetic_trace_for_a_pairs_acceptance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    refused = run("simulate", "--latency", "h200-llama-3.1-8b+1b-graph")
    assert "--acceptance 0.72,0.50,0.33 from your server's log (--trace " in refused.refusal


@pytest.mark.parametrize("command", ["simulate", "papers", "report"])
def test_a_refusal_recommends_options_of_its_own_command(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACE_VARIABLE, raising=False)
    told = run(command, "--latency", "h100/llama-3.1-8b+llama-3.2-1b").refusal
    known = set(re.findall(r"--[a-z-]+", run(command, "--help").out))
    assert "--acceptance" in known or "borrows that pair's acceptance" in told
    assert set(re.findall(r"--[a-z-]+", told)) <= known


def test_composed_latencies_carried_over_to_the_gpu_are_near_what_was_measured() -> None:
    """Operators that others timed on an H100, against compiled passes on the H200.

    Nothing was fitted to the H200.  The bounds are the intervals that the carried table states.
    """
    composed = find_latency("h100/llama-3.1-8b+llama-3.2-1b")
    carried = carry_over(composed, DEVICES["h200"])
    measured = find_latency("h200-llama-3.1-8b+1b-compiled")

    def of(table: LatencyTable, model: str, width: int) -> float:
        return float(table.seconds(model, "forward", batch=1, new_tokens=width, context=128))

    for model, width in (("target", 1), ("target", 9), ("draft", 1)):
        assert of(carried, model, width) == pytest.approx(of(measured, model, width), rel=0.08)
    for model, width, factor in (("draft", 1, 1.15), ("target", 9, 1.07)):
        ratios = [of(t, model, width) / of(t, "target", 1) for t in (carried, measured)]
        assert 1 / factor < ratios[0] / ratios[1] < factor


def test_replay_of_the_trained_pair_takes_the_rounds_that_the_gpu_took() -> None:
    """Except where the two largest logits were a unit of bfloat16 apart: on one prompt."""
    rows = check_recording(BUNDLED / "h200-trained-12+3-graph")
    assert (rows["rounds_differ"] <= 1).all()
    assert (rows["rounds_differ"] == 0).sum() == 7


def test_wide_layers_in_graphs_are_timed_at_the_shortest_context_alone() -> None:
    pair = PAIRS["llama-3.1-8b+1b"].miniature()
    model = pair.target.build(torch.device("cpu"), torch.float32)
    runner = LayerRunner(model, 80)
    for graphs, wide in ((True, {(3, 16)}), (False, {(3, 16), (3, 48)})):
        blocks = layer_blocks(runner, "target", (1, 3), (16, 48), graphs=graphs)
        steps = [block.rounds[0][0] for block in blocks]
        timed = {(step.new_tokens, step.context) for step in steps if step.phase == "layer"}
        assert timed == {(1, 16), (1, 48)} | wide
