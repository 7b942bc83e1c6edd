"""CUDA graphs and compiled layers give the logits and rounds of plain passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from policies.core import speculate
from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from policies.together import PerRequest
from profiler.decoding.batch import BatchedDecoder, Stream, enter, speculate_batch
from profiler.decoding.single import ModelDecoder
from profiler.models.graphs import (
    WIDEST,
    CompiledRunner,
    GraphRunner,
    Norm,
    compile_layers,
    compiled,
    compiler_missing,
    forget_compiled,
    fused,
)
from profiler.models.runner import Runner
from traces.acceptance.sampling import GREEDY, Sampling
from traces.errors import DraftsimError

SLOTS = 200


def model(layers: int, seed: int, kv_heads: int = 2) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=256,
        initializer_range=0.4, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(61, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_static_passes_give_the_logits_of_plain_ones(kv_heads: int) -> None:
    plain, static = (make(model(2, 1, kv_heads), SLOTS) for make in (Runner, GraphRunner))
    prompt = ids(70)
    for width, start in ((70, 0), (1, 70), (2, 71), (5, 70), (WIDEST, 75), (1, 127), (3, 126)):
        tokens = prompt if start == 0 else ids(width, start)
        for keep in (0, 1):
            torch.testing.assert_close(
                static.forward(tokens, start, keep=keep),
                plain.forward(tokens, start, keep=keep), rtol=1e-4, atol=1e-4,
            )  # fmt: skip


def test_static_batches_give_the_logits_of_plain_ones() -> None:
    plain, static = (make(model(2, 1), SLOTS, 3) for make in (Runner, GraphRunner))
    prompts = torch.stack([ids(20, i) for i in range(3)])
    places = torch.arange(20).expand(3, 20)
    for runner in (plain, static):
        runner.forward_batch(prompts, places, 20)
    tokens = ids(9, 7).reshape(3, 3)
    ragged = torch.tensor([[20, 21, 22], [20, -1, -1], [10, 11, -1]])
    a, b = (r.forward_batch(tokens, ragged, 23) for r in (plain, static))
    real = ragged >= 0
    torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-4)
    # Two of the three sequences: their rows are padded, the third's cache is left alone.
    a, b = (r.forward_batch(tokens[:2], ragged[:2], 23) for r in (plain, static))
    torch.testing.assert_close(a[real[:2]], b[real[:2]], rtol=1e-4, atol=1e-4)
    # The rejected slots written above stay hidden from a shorter sequence.
    again = torch.tensor([[20], [21], [11]])
    a, b = (r.forward_batch(tokens[:, :1], again, 22) for r in (plain, static))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_logits_outlive_the_next_pass_of_their_shape() -> None:
    runner = GraphRunner(model(1, 3), SLOTS)
    runner.forward(ids(10), 0)
    first = runner.forward(ids(1, 1), 10)
    copy = first.clone()
    runner.forward(ids(1, 2), 11)
    torch.testing.assert_close(first, copy, rtol=0, atol=0)


def test_decoding_and_rounds_are_those_of_the_plain_runner() -> None:
    target, draft = model(3, 1), model(1, 2)
    for text in ("fixed:gamma=4", "gammatune", "svip"):
        outcomes = []
        for make in (Runner, GraphRunner):
            runners = make(target, SLOTS), make(draft, SLOTS)
            decoder = ModelDecoder(*runners, ids(33), 60, watch_eos=False)
            rounds = list(speculate(decoder, parse_policy(text, max_gamma=24)))
            outcomes.append((rounds, decoder.output))
        assert outcomes[0] == outcomes[1], text


def test_batched_decoding_is_that_of_the_plain_runner() -> None:
    target, draft = model(2, 1), model(1, 2)
    outputs = []
    for make in (Runner, GraphRunner):
        decoder = BatchedDecoder(make(target, SLOTS, 3), make(draft, SLOTS, 3), watch_eos=False)
        style = PerRequest(Fixed(3))
        streams = [Stream(i, ids(12 + i, i), 30) for i in range(3)]
        enter(decoder, style, streams)
        list(speculate_batch(decoder, style))
        outputs.append([s.output for s in streams])
    assert outputs[0] == outputs[1]


def test_shapes_are_few_and_capturing_one_leaves_the_others_slots_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = GraphRunner(model(1, 1), 20_000)
    for stop in (1, 500, 3000, 17_001):
        assert stop <= wide.bucket(stop) <= max(stop + 127, stop * 1.07)
    monkeypatch.setattr("profiler.models.graphs.GRANULARITY", 64)
    runner = GraphRunner(model(1, 1), SLOTS)
    assert runner.cache.slots == 256
    assert [runner.bucket(s) for s in (1, 64, 65, 256)] == [64, 64, 128, 256]
    runner.forward(ids(40), 0)
    before = runner.forward(ids(2, 5), 40)
    runner.forward(ids(7), 40 + 150)
    seen = runner.captured
    torch.testing.assert_close(runner.forward(ids(2, 5), 40), before, rtol=0, atol=0)
    runner.forward(ids(7), 40 + 151)
    assert runner.captured == seen
    assert runner.model.config._attn_implementation == "sdpa"


def test_passes_that_do_not_fit_are_refused() -> None:
    runner = GraphRunner(model(1, 1), 100)
    with pytest.raises(DraftsimError, match="130 tokens do not fit the cache of 128 slots"):
        runner.forward(ids(30), 100)


def test_prompts_and_lone_tokens_need_no_mask() -> None:
    """As on a GPU: transformers is asked for no mask where a pass is causal without one."""
    plain, bare = Runner(model(2, 1), SLOTS), Runner(model(2, 1), SLOTS)
    bare._maskless = True
    for tokens, start in ((ids(30), 0), (ids(1), 30), (ids(3), 31)):
        torch.testing.assert_close(
            bare.forward(tokens, start), plain.forward(tokens, start), rtol=1e-4, atol=1e-4
        )


def test_one_transfer_per_round_whatever_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that read no signal let the draft run ahead: the host waits once a round."""
    waits = 0

    def counted(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def wrapper(self: torch.Tensor, *args: Any) -> Any:
            nonlocal waits
            waits += 1
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, wrapper)

    target, draft = GraphRunner(model(2, 1), SLOTS), GraphRunner(model(1, 2), SLOTS)
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
        counted(name)
    for sampling in (GREEDY, Sampling(1.0), Sampling(1.0, 0.9)):
        generator = torch.Generator().manual_seed(0)
        decoder = ModelDecoder(
            target, draft, ids(10), 40, watch_eos=False, sampling=sampling, generator=generator,
        )  # fmt: skip
        waits = 0
        rounds = len(list(speculate(decoder, Fixed(4))))
        assert waits == rounds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_passes_give_the_logits_of_eager_ones() -> None:
    big = model(3, 1).to("cuda", torch.float32)
    plain, graphed = Runner(big, SLOTS), GraphRunner(big, SLOTS)
    prompt = ids(70).cuda()
    for width, start in ((70, 0), (1, 70), (5, 70), (1, 70), (2, 126), (5, 70)):
        tokens = prompt if start == 0 else ids(width, start).cuda()
        torch.testing.assert_close(
            graphed.forward(tokens, start), plain.forward(tokens, start), rtol=1e-3, atol=1e-3
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_one_wait_a_round() -> None:
    """As `tests.test_device` has it of a pretended one."""
    for make in (Runner, GraphRunner):
        runners = [make(model(n, n).to("cuda", torch.float32), SLOTS) for n in (3, 1)]
        for waits_counted in (False, True):  # the first run makes what the second one finds
            decoder = ModelDecoder(*runners, ids(20).cuda(), 30, watch_eos=False)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if waits_counted else "default")
                try:
                    rounds = list(speculate(decoder, Fixed(4)))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        assert sum("synchronizing" in str(w.message) for w in seen) == len(rounds)


def qwen() -> Any:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.4, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [lambda: model(2, 1), lambda: model(2, 1, 4), qwen])
def test_fused_passes_give_the_logits_of_plain_ones(make: Any) -> None:
    plain = Runner(make(), SLOTS)
    own = make()
    runner = CompiledRunner(own, SLOTS)
    for width, start in ((70, 0), (1, 70), (5, 71), (1, 127)):
        tokens = ids(width, start)
        torch.testing.assert_close(
            runner.forward(tokens, start), plain.forward(tokens, start), rtol=1e-4, atol=1e-4
        )
    # The model itself computes as before, and there is one copy of the weights.
    again = Runner(own, SLOTS)
    torch.testing.assert_close(
        again.forward(ids(9), 0), plain.forward(ids(9), 0), rtol=1e-5, atol=1e-5
    )
    before = {t.untyped_storage().data_ptr() for t in own.parameters()}
    assert {t.untyped_storage().data_ptr() for t in compiled(own).parameters()} == before
    assert sum(isinstance(part, Norm) for part in runner.model.modules()) == 5
    forget_compiled()
    assert compiled(own) is not runner.model


def test_layers_compile_once_for_all_widths_contexts_and_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        del examples
        graphs.append(graph)
        return graph.forward

    def passes(layers: int) -> int:
        plain = Runner(model(layers, 1), 700)
        twin = fused(model(layers, 1))
        compile_layers(twin, backend)  # type: ignore[arg-type]
        monkeypatch.setattr("profiler.models.graphs.compiled", lambda own: twin)
        runner = CompiledRunner(None, 700)
        for width, start in ((40, 0), (1, 40), (3, 41), (5, 300), (1, 500), (2, 600), (9, 10)):
            tokens = ids(width, start)
            torch.testing.assert_close(
                runner.forward(tokens, start), plain.forward(tokens, start), rtol=1e-4, atol=1e-4
            )
        return len(graphs)

    torch.compiler.reset()
    # What the compiler keeps of sizes that it does not know takes longer to keep than to find.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        few = passes(2)
        assert 0 < few <= 20  # some pieces of a layer, for one token and for more
        assert passes(3) == few  # more layers are served by the same
    torch.compiler.reset()


def test_a_cpu_compiles_nothing() -> None:
    assert compiler_missing(torch.device("cpu")) is None
