"""Fused projections say what the plain ones do, share their weights, and compile once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from profiler.models.graphs import (
    CompiledRunner,
    Norm,
    compile_layers,
    compiled,
    compiler_missing,
    forget_compiled,
    fused,
)
from profiler.models.runner import Runner
from tests.test_graphs import SLOTS, ids, model


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
