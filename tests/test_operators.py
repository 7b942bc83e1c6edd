"""Passes composed from operators: sums, what is read from near sizes, and names for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from commands.common.drafted import latencies
from simulator.papers.ours import Ours
from simulator.papers.settings import setting_rows
from tests.conftest import Run
from traces.errors import DraftsimError
from traces.latency.graphs import CAPTURED, CUDAGraphs
from traces.latency.interpolate import EXTRAPOLATED
from traces.latency.table import LatencyTable
from traces.operators.attention import AttentionOperators, Heads, heads_of
from traces.operators.compose import Composer, kv_blocks
from traces.operators.dense import (
    LAUNCH_S,
    MEASURED,
    NEAR,
    DenseOperators,
    experts_reached,
    moved_per_token,
)
from traces.operators.devices import DATA, DEVICES
from traces.operators.shapes import ARCHITECTURES, Placed, find_architecture
from traces.operators.table import OperatorTable, rows_of
from traces.store.operators import (
    at_depths,
    bundled_operators,
    coverage,
    find_composed,
    timed_devices,
    write_operators,
)
from traces.store.recordings import find_latency, find_trace

EIGHT = find_architecture("llama-3.1-8b")
EVERY = tuple(range(1, 513))
"""Captured sizes that pad nothing."""


def one(values: float) -> npt.NDArray[np.float64]:
    return np.array([float(values)])


def made(**changed: float) -> OperatorTable:
    """A GPU on which every operator takes a round number of microseconds."""
    per_layer = {"norm": 2, "qkv": 1, "rope": 1, "o": 1, "gate_up": 1, "act": 1, "down": 1}
    once = {"embedding": 0, "final_norm": 0, "lm_head": 0, "sampler": 0}
    micro = {
        "norm": 2.0, "qkv": 50.0, "rope": 3.0, "o": 40.0, "gate_up": 250.0, "act": 4.0,
        "down": 125.0, "embedding": 5.0, "final_norm": 2.0, "lm_head": 1000.0, "sampler": 25.0,
        **changed,
    }  # fmt: skip
    rows = []
    for name, count in {**per_layer, **once}.items():
        rows += [(name, count, t, micro[name] * (1 + t / 1000)) for t in (1, 64, 1024)]
    operator, counts, tokens, seconds = zip(*rows, strict=True)
    frame = rows_of(
        device="rtx-4090", model=EIGHT.name, operator=list(operator), per_layer=list(counts),
        tokens=list(tokens), seconds=[s * 1e-6 for s in seconds], source="made up",
    )  # fmt: skip
    return OperatorTable(frame, {})


def test_a_pass_is_the_sum_of_its_operators() -> None:
    composer = Composer(made(), "rtx-4090", CUDAGraphs(EVERY))
    heads = heads_of(EIGHT, 1)
    for batch, context in ((1, 0), (20, 700), (64, 3000)):
        grown = 1 + batch / 1000
        layer = (2 * 2 + 50 + 3 + 40 + 250 + 4 + 125) * 1e-6 * grown
        once = (5 + 2 + 1000 + 25) * 1e-6 * grown
        attended = composer.attention.split_s(heads, one(batch), one(context + 1))[0]
        expected = 32 * (layer + attended) + once
        assert float(composer.pass_s(Placed(EIGHT), batch, 1, context)) == pytest.approx(expected)


def test_captured_sizes_pad_all_but_attention() -> None:
    plain, padded = (Composer(made(), "rtx-4090", CUDAGraphs(sizes)) for sizes in (EVERY, CAPTURED))
    at = {n: float(padded.pass_s(Placed(EIGHT), n, 1, 500)) for n in (33, 40, 41)}
    assert padded.graphs.padded([1.0, 3, 33, 512, 513]).tolist() == [1, 4, 40, 512, 513]
    bare = float(plain.pass_s(Placed(EIGHT), 40, 1, 500))
    assert at[40] == pytest.approx(bare)
    less = 32 * np.subtract(
        *(plain.attention.split_s(heads_of(EIGHT, 1), one(n), one(501))[0] for n in (40, 33))
    )
    head = 1027e-6 * 7 / 1000
    assert at[40] - at[33] == pytest.approx(less + head, rel=1e-6)
    assert at[41] > at[40]


def test_near_sizes_predict_each_of_vidurs_models() -> None:
    """A model's products, from the other models of its GPU alone."""
    tokens = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    for device in ("a100-80gb", "h100"):
        rows = bundled_operators(device).of(source="microsoft/vidur")
        whole = DenseOperators(OperatorTable(rows, {}), DEVICES[device])
        medians = []
        for name in sorted({model for model, _ in whole.models}):
            model = ARCHITECTURES[name]
            alike = [m.name for m in ARCHITECTURES.values() if m.layer_shape == model.layer_shape]
            rest = OperatorTable(rows[~rows["model"].isin(alike)], {})
            others = DenseOperators(rest, DEVICES[device])
            for shared in [n for m, n in whole.models if m == name]:
                sums = []
                for of, origin in ((whole, MEASURED), (others, NEAR)):
                    parts = [of.part(product, model, shared) for product in model.matrices]
                    assert {part.origin for part in parts} == {origin}
                    sums.append(sum(part.curve.at(tokens) for part in parts if part.curve))
                medians.append(np.median(np.abs(sums[1] / sums[0] - 1)))
        assert np.median(medians) < 0.05
        assert max(medians) < 0.2


def test_a_draft_costs_less_than_its_target_and_more_than_its_bytes() -> None:
    for device in ("a100-80gb", "h100", "rtx-3090", "rtx-4090", "rtx-a6000", "rtx-pro-6000"):
        composer = Composer(bundled_operators(device), device)
        seconds = [
            float(composer.pass_s(Placed(find_architecture(name)), 1, 1, 500))
            for name in ("llama-68m", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b")
        ]
        assert sorted(seconds) == seconds
        read = 2 * (EIGHT.parameters - EIGHT.head) / DEVICES[device].bandwidth
        assert 1.02 * read < seconds[-1] < 1.6 * read, device


def test_attention_by_bytes_is_near_what_was_timed() -> None:
    table = bundled_operators("rtx-4090")
    timed = AttentionOperators(table, DEVICES["rtx-4090"])
    law = AttentionOperators(
        OperatorTable(table.rows[table.rows["operator"] != "attention"], {}), DEVICES["rtx-4090"]
    )
    heads = heads_of(EIGHT, 1)
    batch, context = (v.ravel() for v in np.meshgrid([1.0, 4, 16, 64, 128], [512.0, 2048, 8192]))
    error = law.split_s(heads, batch, context) / timed.split_s(heads, batch, context) - 1
    assert np.median(np.abs(error)) < 0.12
    few = np.full(len(batch), 4.0)
    wide = law.unsplit_s(heads, batch, few, context) / timed.unsplit_s(heads, batch, few, context)
    assert np.median(np.abs(wide - 1)) < 0.2


def test_verifying_costs_no_less_than_decoding_and_splits_on_hopper() -> None:
    heads = Heads(32, 8, 128)
    sizes = np.array([1.0, 8, 64]), np.full(3, 5.0), np.full(3, 4000.0)
    for device in ("a100-80gb", "h100", "rtx-4090"):
        of = AttentionOperators(bundled_operators(device), DEVICES[device])
        decode = of.pass_s(heads, sizes[0], np.ones(3), sizes[2])
        verify = of.pass_s(heads, *sizes)
        assert (verify >= decode * 0.999).all()
        assert (verify[0] < 1.1 * decode[0]) == (device == "h100")


def test_experts_reached() -> None:
    model = find_architecture("qwen3-30b-a3b")
    reached = experts_reached(model, np.array([1.0, 2, 10_000]))
    assert reached.tolist() == pytest.approx([8, 128 * (1 - (15 / 16) ** 2), 128])
    concentrated = find_architecture("qwen3-30b-a3b:concentration=0.7")
    assert experts_reached(concentrated, np.array([2.0, 10_000])).tolist() == pytest.approx(
        [0.7 * 15.5, 0.7 * 128]
    )
    assert experts_reached(concentrated, np.array([1.0])).tolist() == [8]
    composer = Composer(bundled_operators("rtx-pro-6000"), "rtx-pro-6000")
    one_s, two_s, full_s = composer.dense.experts_s(model, 1, np.array([1.0, 2, 2048]))
    assert 1.3 < two_s / one_s < 2.7
    assert full_s == pytest.approx(1066.6e-6, rel=0.01)


def test_a_gpu_holds_at_least_one_key_value_head() -> None:
    """If more GPUs share a model than it has such heads, each still computes and holds one."""
    few, many = find_architecture("llama-2-70b"), find_architecture("llama-2-70b:kv_heads=4")
    for model in (few, many):
        for shared in (1, 2, 4):
            assert model.products_on(shared)["qkv"] == model.products["qkv"] / shared
            assert model.parameters_on(shared) == model.parameters / shared
    # At 8 GPUs a model with 4 such heads has as many on each as one with 8.
    assert many.products_on(8) == few.products_on(8)
    assert moved_per_token("rope", many, 8) == moved_per_token("rope", few, 8)
    copied = 80 * 4 * 2 * 8192 * 128 / 8
    assert many.parameters_on(8) == many.parameters / 8 + copied == few.parameters_on(8)
    dense = Composer(bundled_operators("rtx-4090"), "rtx-4090").dense
    tokens = np.array([1.0, 64])
    assert (dense.layer_s(many, 8, tokens) == dense.layer_s(few, 8, tokens)).all()


def test_a_block_of_experts_is_known_without_its_timings() -> None:
    """The figures of docs/log/operators.md: the block of the RTX PRO 6000, with and without."""
    table, model = bundled_operators("rtx-pro-6000"), find_architecture("qwen3-30b-a3b")
    hidden = OperatorTable(table.rows[table.rows["operator"] != "moe"], table.meta)
    dense = Composer(hidden, "rtx-pro-6000").dense
    block = table.rows[table.rows["operator"] == "moe"]
    tokens, reached = (block[name].to_numpy(float) for name in ("tokens", "experts"))
    errors = dense.grouped_s(model, 1, tokens, reached) / block["seconds"].to_numpy() - 1
    # The weights of 8 experts, 75 MB, stay in this GPU's cache between two repeats of the timing.
    read = reached > 8
    assert read.sum() == 38
    assert np.median(np.abs(errors[read])) < 0.03
    assert np.abs(errors[read]).max() < 0.1
    assert np.abs(errors).max() < 0.4
    tokens = 2.0 ** np.arange(11)
    timed_s = Composer(table, "rtx-pro-6000").dense.experts_s(model, 1, tokens)
    assert (np.abs(dense.experts_s(model, 1, tokens) / timed_s - 1)[1:] < 0.08).all()
    for device in ("h100", "a100", "rtx-3090", "rtx-4090"):
        own = Composer(bundled_operators(device), device).dense
        seconds = own.experts_s(model, 1, tokens)
        assert (np.diff(seconds) > 0).all()
        # At least the weights of the experts reached are read, by at least eight kernels.
        weights = 2 * 3 * model.hidden * model.inner * experts_reached(model, tokens)
        assert (seconds > weights / own.device.bandwidth + 8 * LAUNCH_S / 2).all()


def test_long_prompts_and_contexts_are_composed_and_not_extrapolated() -> None:
    """Attention of a prompt grows with the square of it, which no fit to short ones knows."""
    table = find_latency("a100/llama-3.1-8b")
    composer, placed = Composer(bundled_operators("a100"), "a100-80gb"), Placed(EIGHT)
    for width, context in ((24_000.0, 0.0), (120_000.0, 0.0), (1.0, 100_000.0), (5.0, 50_000.0)):
        phase = "forward" if context else "prefill"
        found = table.estimate("target", phase, new_tokens=width, context=context)
        rows = one(width if context else 1)
        exact = composer.factors.of(
            composer.parts(placed, one(1), one(width), one(context), rows)
        ).item()
        assert found.seconds.item() == pytest.approx(exact, rel=0.1)
        assert found.origin.item() != EXTRAPOLATED


def test_a_batch_whose_caches_do_not_fit_is_said(run: Run) -> None:
    """64 requests of 2,100 tokens take 17 GB next to 16 GB of weights, on 24 GB."""
    plain = ("serve", "--policy", "autoregressive", "--latency", "rtx-4090/llama-3.1-8b")
    load = ("--prompt", 2000, "--output", 200, "--requests", 12, "--batch")
    said = run(*plain, *load, 64).ok().said
    assert (
        "64 requests of 2,100 tokens each take 8,448 blocks of cache, and about 2,663 fit" in said
    )
    assert "fit next to the weights on" not in run(*plain, *load, 4).ok().said
    bounded = run(*plain, *load, 64, "--kv-blocks", "auto").ok().said
    assert "fit next to the weights on" not in bounded
    tuned = run("tune", "--engine", "vllm", "--acceptance", "0.8,0.6", "--resamples", 4, "--batch",
                "4,256", "--latency", "rtx-4090/llama-3.1-8b+llama-3.2-1b").ok()  # fmt: skip
    assert "256 requests of 384 tokens each take 6,144 blocks of cache" in tuned.said


def test_caches_of_requests_that_never_run_together_raise_no_alarm(run: Run) -> None:
    """Two in all at a low rate were said to be 64; weights that leave no cache got two remedies."""
    plain = ("serve", "--policy", "autoregressive", "--prompt", 2000, "--output", 20, "--latency")
    few = run(*plain, "rtx-4090/llama-3.1-8b", "--rate", 0.05, "--requests", 2).ok().said
    assert "fit next to the weights on" not in few
    many = run(*plain, "rtx-4090/llama-3.1-8b", "--rate", 0.5, "--requests", 40).ok().said
    assert "40 requests of 2,010 tokens each take 5,040 blocks of cache" in many
    assert "bounds the cache, if all of them run at a time" in many
    full = run(*plain, "rtx-4090/llama-3.1-8b+llama-3.2-3b", "--batch", 2, "--requests", 4).ok()
    assert "share the target between more GPUs" in full.said
    assert "bounds the cache" not in full.said


def test_a_pass_that_fills_a_cuda_graph_is_not_priced_between_two() -> None:
    """16 tokens were read between 13, which fill the same graph, and 17, which need the next."""
    table = find_latency("rtx-pro-6000/qwen3-30b-a3b")
    composer = Composer(bundled_operators("rtx-pro-6000"), "rtx-pro-6000")
    placed = Placed(find_architecture("qwen3-30b-a3b"))
    widths = np.array([14.0, 15.0, 16.0, 24.0, 32.0])
    exact = composer.pass_s(placed, 1, widths, 512)
    found = table.seconds("target", "forward", new_tokens=widths, context=512)
    assert found == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("device", ["a100-80gb", "h100", "rtx-3090", "rtx-4090", "rtx-pro-6000"])
def test_attention_of_long_prompts_computes_near_the_gpu_s_peak(device: str) -> None:
    """Never above it, and not far below.

    Chunks longer than those timed were taken in proportion, at 20 times the RTX 4090's peak; laws
    of short ones had an H100 compute at 0.16 of its own.
    """
    attention = Composer(bundled_operators(device), device).attention
    tokens = 2.0 ** np.arange(13, 18)
    seconds = attention.pass_s(heads_of(EIGHT, 1), tokens / tokens, tokens, 0 * tokens)
    share = 2 * EIGHT.heads * EIGHT.head_dim * tokens**2 / seconds / DEVICES[device].flops
    assert (share < 1).all()
    assert (share[1:] > 0.4).all()
    # Two chunks one after the other take what the whole takes.
    half = attention.pass_s(heads_of(EIGHT, 1), tokens / tokens, tokens / 2, tokens / 2)
    parts = half + attention.pass_s(heads_of(EIGHT, 1), tokens / tokens, tokens / 2, 0 * tokens)
    assert parts == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("device", "name", "shared", "origin"),
    [
        ("h100", "mixtral-8x7b", 4, MEASURED),
        *(("rtx-pro-6000", "qwen3-30b-a3b", shared, NEAR) for shared in (2, 4, 8)),
    ],
)
def test_a_gpu_reads_its_slice_of_the_experts(
    device: str, name: str, shared: int, origin: str
) -> None:
    """Timed whole, one by one or as a block, experts are divided as their products are."""
    table, model = bundled_operators(device), find_architecture(name)
    whole = ["moe", "expert_gate", "expert_up", "expert_down", "expert_act"]
    hidden = OperatorTable(table.rows[~table.rows["operator"].isin(whole)], table.meta)
    tokens = 2.0 ** np.arange(12)
    timed, products = (Composer(one, device).dense for one in (table, hidden))
    timed_s, products_s = (one.experts_s(model, shared, tokens) for one in (timed, products))
    assert np.median(np.abs(products_s / timed_s - 1)) < 0.2
    # Weights of the experts reached, by the memory's bandwidth.
    bytes_read = 2 * 3 * model.hidden * model.inner * experts_reached(model, tokens) / shared
    assert (timed_s > bytes_read / DEVICES[device].bandwidth).all()
    assert timed.experts_origin(model, shared) == origin


def test_verifying_reaches_more_experts() -> None:
    """Two tokens reach nearly twice the experts of one: a verification is no longer free."""
    names = {
        "rtx-pro-6000:operators": ("qwen3-30b-a3b", "qwen3-30b-a3b:concentration=0.7", "qwen3-4b"),
        "h100": ("mixtral-8x7b@tp4", "mixtral-8x7b:experts=16,experts_per_token=4@tp4"),
    }
    ratio = {}
    for device, models in names.items():
        for model in models:
            table = find_latency(f"{device}/{model}")
            seconds = table.seconds("target", "forward", new_tokens=[1, 4], context=500)
            ratio[model] = seconds[1] / seconds[0]
    routed, concentrated, dense, mixtral, more = ratio.values()
    assert 1.2 < concentrated < routed < 3
    assert dense < 1.2 < mixtral
    assert more > 1.2


def test_names_of_composed_latencies(tmp_path: Path) -> None:
    table = find_latency("a100/llama-2-70b@tp4+llama-2-7b")
    assert table.meta["tensor_parallel"] == {"target": 4, "draft": 1}
    assert table.meta["origins"]["target"]["qkv"] == MEASURED
    assert table.has("draft", "prefill")
    assert {"forward", "prefill", "layer", "head", "with_prompts"} <= set(table.cells["phase"])
    passes = [table.seconds(m, "forward", context=500).item() for m in ("target", "draft")]
    layer = table.seconds("target", "layer", context=512).item()
    head = table.seconds("target", "head").item()
    whole = table.seconds("target", "forward", context=512).item()
    assert passes[1] < passes[0]
    assert 80 * layer + head == pytest.approx(whole, rel=0.01)
    # A file of operators, and one of several GPUs.
    path = tmp_path / "ops.parquet"
    rows = bundled_operators("rtx-3090").rows
    write_operators(OperatorTable(rows, {}), path)
    own = find_composed(f"{path}/llama-3.1-8b")
    assert own is not None
    assert own.cells.equals(find_latency("rtx-3090/llama-3.1-8b").cells)
    both = pd.concat([rows, bundled_operators("a6000").rows], ignore_index=True)
    write_operators(OperatorTable(both, {}), path)
    with pytest.raises(DraftsimError, match=r"name one, as in .*:rtx-3090/llama-3.1-8b"):
        find_composed(f"{path}/llama-3.1-8b")
    assert find_composed(f"{path}:a6000/llama-3.1-8b") is not None
    for name in (f"{path}:a6000/llama-3.1-8b", f"{path}:a6000:operators/llama-3.1-8b"):
        found = latencies([name])
        assert found[name].meta["composed"].startswith(f"{path}:a6000")
    messages = bundled_operators("a100").of(operator="all_reduce")
    write_operators(OperatorTable(messages, {}), path)
    with pytest.raises(DraftsimError, match="no layer's operators were timed on a100-80gb"):
        find_composed(f"{path}/llama-3.1-8b")
    assert find_composed("runs/mine") is None
    assert find_composed("smollm2-cpu") is None


def test_h800_is_h100_within_one_gpu_and_slower_between_several() -> None:
    for models, slower in (("llama-2-7b+vicuna-68m", False), ("llama-2-70b@tp8", True)):
        h100, h800 = (find_latency(f"{name}/{models}") for name in ("h100", "h800"))
        wide = [t.seconds("target", "forward", new_tokens=64).item() for t in (h100, h800)]
        assert (wide[1] > wide[0]) == slower
        if not slower:
            assert h100.cells.equals(h800.cells)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)])
def test_gpt_oss_has_its_published_sizes_and_says_what_is_not_composed(
    name: str, billions: float
) -> None:
    model = find_architecture(f"openai/{name}")
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.1)
    said = str(find_latency(f"h100/{name}@tp4").meta["said"])
    assert "experts in 4 bits" in said
    assert "experts in 4 bits" not in str(find_latency("h100/llama-3.1-8b").meta["said"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("l4/llama-2-7b+vicuna-68m", "no operators were timed on l4"),
        ("a100/lama-2-7b", "did you mean 'llama-2-7b'"),
        ("a100/llama-2-70b", "the weights take 138 GB of one a100-80gb, which has 80"),
        ("a100/gpt-oss-120b", "share the target, as in gpt-oss-120b@tp4"),
        ("a100/llama-3.2-1b+llama-3-70b", "share the draft, as in llama-3-70b@tp2"),
        ("a100/llama-2-70b@tp3", "its 64 heads cannot be shared by 3 GPUs"),
        ("a100/llama-2-7b@4", "expected a model and @tpN"),
        ("a100/llama-2-7b+vicuna-68m+vicuna-68m", "names 3 models"),
        ("a100/llama-2-7b:width=3", "has no size 'width': choose from layers"),
        ("h100/mixtral-8x7b:experts=1@tp4", "expected 1 to 1 experts_per_token, and a conc"),
        ("h100/mixtral-8x7b:experts_per_token=0@tp4", "expected 1 to 8 experts_per_token, and a"),
        ("a100/llama-2-7b:experts=8", "expected 1 to 8 experts_per_token, and a concentration"),
        ("a100/llama-2-7b:kv_heads=5", "32 heads are no multiple of 5 kv_heads"),
        ("a100/llama-3.2-3b@tp3", "its 8 key-value heads cannot be shared by 3 GPUs"),
        ("h100/mixtral-8x7b:experts=many@tp4", "experts is 'many', no number"),
        ("a100/llama-2-7b:layers=0", "layers is 0, too small"),
        (
            "h100/llama-3.1-8b+eagle3",
            "no head such as eagle3 was timed on h100: give `draftsim rec",
        ),
        ("z100/llama-2-7b+vicuna-68m", "has no data-sheet entry"),
    ],
)
def test_what_no_table_covers_is_refused(name: str, said: str, run: Run) -> None:
    ran = run("simulate", "--latency", name)
    assert said in ran.refusal


def test_the_first_line_says_what_is_measured(run: Run) -> None:
    ran = run(
        "serve", "--latency", "rtx-4090/llama-3.1-8b+llama-3.2-1b", "--policy", "fixed:gamma=2",
        "--batch", "4", "--requests", "20", "--json", "-",
    ).ok()  # fmt: skip
    # After the line that says whose acceptance it is.
    said = "rtx-4090/llama-3.1-8b+llama-3.2-1b: composed from operators"
    [line] = [line for line in ran.err.splitlines() if line.startswith(said)]
    assert "target measured: norm" in line
    assert "draft by the bytes moved" in line


def test_devices_say_what_is_measured(run: Run) -> None:
    rows = {row["name"]: row for row in run("list", "devices", "--json", "-").rows}
    assert rows["l4"]["latencies"] == "roofline (--gpu)"
    assert rows["h800"]["measured"].startswith("operators of h100")
    assert "llama-2-70b (TP 1, 2, 4, 8)" in rows["a100-80gb"]["measured"]
    assert "whole steps of llama-3.1-8b" in rows["rtx-pro-6000"]["measured"]
    assert "attention, by bytes" in rows["rtx-3090"]["composed"]
    assert coverage("rtx-4090")["latencies"] == "measured, composed"


def test_bundled_operators_name_their_source_and_are_small() -> None:
    assert len(timed_devices()) == 6
    for name, path in timed_devices().items():
        assert path.stat().st_size < 100_000
        sources = bundled_operators(name).meta["sources"]
        assert all("MIT licence" in said and " at " in said for said in sources.values())
    assert {p.suffix for p in DATA.iterdir()} == {".csv", ".parquet"}


def test_blocks_beside_the_weights() -> None:
    def held(target: str, draft: str | None = None) -> dict[str, Any]:
        models = {"target": target} | ({} if draft is None else {"draft": draft})
        return {
            "composed": "", "device": "rtx-4090", "models": models,
            "tensor_parallel": dict.fromkeys(models, 1),
        }  # fmt: skip

    found = kv_blocks(held("llama-3.1-8b"))
    assert found.blocks == 2663
    # A vLLM 0.19 server with this model on this card has 2,588.
    assert found.blocks == pytest.approx(2588, rel=0.05)
    assert found.least < 2588 < found.most
    less = kv_blocks(held("llama-3.1-8b", "llama-3.2-1b"))
    weights = 2 * find_architecture("llama-3.2-1b").parameters
    token = 2 * 2 * 64 * 8 * 16  # keys and values of 8 heads of 64 in 16 layers
    gone = found.blocks - (less.blocks * (131072 + token) + weights / 16) / 131072
    assert gone == pytest.approx(0, abs=2)
    with pytest.raises(DraftsimError, match="leave no memory for a cache on rtx-4090"):
        kv_blocks(held("llama-2-13b"))
    with pytest.raises(DraftsimError, match="expected a share"):
        kv_blocks(held("llama-3.1-8b"), utilisation=1.5)


def test_serve_counts_blocks_and_every_request(run: Run, tmp_path: Path) -> None:
    arrivals = tmp_path / "a.csv"
    lines = [f"{i / 50},900,200" for i in range(60)]
    arrivals.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    common = (
        "serve", "--latency", "rtx-4090/llama-3.1-8b", "--arrivals", arrivals, "--policy",
        "autoregressive", "--max-batch", "256", "--json", "-",
    )  # fmt: skip
    ran = run(*common, "--kv-blocks", "auto:0.85", "--warmup", "0")
    [row] = ran.rows
    assert row["warmup_requests"] == 0
    assert "blocks of 16 tokens" in ran.err
    assert row["preemptions"] > 0
    for option, said in (
        (("--kv-blocks", "many"), "expected a whole number or auto"),
        (("--latency", "const:target=0.01,draft=0.001", "--kv-blocks", "auto"), "composed"),
        (("--warmup", "1"), "warmup is 1"),
    ):
        refused = run(*common, *option)
        assert refused.code == 2
        assert said in refused.err.splitlines()[-1]


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
    ran = run(*asked, "--policy", "specbound").ok()
    assert "recorded of a target with 30 and are priced as the same share of 32" in ran.err
    [found] = [row for row in ran.rows if row["policy"] == "specbound"]
    assert 0.5 < found["speedup"] < 3
    skipped = run(*asked, "--source", "layer-skip", "--policy", "fixed:gamma=2").ok()
    assert skipped.err.count("priced as the same share of 32") == 1
    [row] = [row for row in skipped.rows if row["policy"] == "fixed:gamma=2"]
    assert 0.3 < row["speedup"] < 2


def test_layer_skip_is_served_and_swept_in_batches(run: Run) -> None:
    asked = ("--trace", ONE, "--latency", OTHER, "--source", "layer-skip", "--policy",
             "fixed:gamma=1")  # fmt: skip
    run("serve", *asked, "--batch", "1,4", "--requests", 8, "--json", "-").ok()
    run("sweep", *asked, "--batch", "1,4", "--resamples", 0, "--json", "-").ok()


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
