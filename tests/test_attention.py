"""Attention: branches in blocks, and keys in parts, against one dense mask."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.models.attention import (
    ALIGNED,
    LEAST_KEYS,
    TokenBlock,
    dense_mask,
    fused_part,
    has_fused_part,
    parts_of,
    split_attention,
    split_mask,
)
from profiler.models.graphs import GraphRunner
from profiler.models.runner import Runner
from tests.pretend_gpu import pretended
from tests.test_graphs import ids, model


@pytest.mark.parametrize("shared", [4, 2], ids=["own heads", "shared heads"])
def test_branches_in_blocks_equal_one_dense_mask(shared: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=shared, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    runner = Runner(model, 64)
    runner.forward(torch.randint(0, 64, (9,)), 0)
    blocks = []
    for tokens, path in ((slice(0, 3), 4), (slice(3, 8), 9)):
        count = tokens.stop - tokens.start
        hidden = torch.rand(count, path + count) < 0.4
        hidden[:, 0] = False
        blocks.append(
            TokenBlock(tokens, path, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf))
        )
    fed, positions = torch.randint(0, 64, (8,)), torch.randint(3, 20, (8,))
    ours = runner.forward_blocks(fed, 9, blocks, positions)
    again = runner.forward(fed, 9, mask=dense_mask(blocks, 9), positions=positions)
    torch.testing.assert_close(ours, again, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def states(
    batch: int, heads: int, rows: int, visible: int, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values as a cache shows them: the first slots of larger buffers."""
    seeded = torch.Generator().manual_seed(visible)
    query = torch.randn(batch, heads, rows, 16, generator=seeded)
    buffers = torch.randn(2, batch, heads, slots, 16, generator=seeded)
    return query, buffers[0, :, :, :visible], buffers[1, :, :, :visible]


@pytest.mark.parametrize(("batch", "rows", "parts", "last"), [
    (1, 4, 2, 255), (1, 12, 4, 30), (3, 2, 8, 100), (2, 1, 16, 0)
])  # fmt: skip
def test_parts_together_are_the_whole(batch: int, rows: int, parts: int, last: int) -> None:
    """Also where whole parts are hidden: only slots up to `last` are seen."""
    query, key, value = states(batch, 2, rows, 256, 300)
    seen = (torch.arange(256) <= last).expand(batch, rows, 256)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None]
    )
    mask = split_mask(seen, 1, torch.float32, parts)
    assert mask.shape == (batch, parts, rows, 256 // parts)
    torch.testing.assert_close(
        split_attention(query, key, value, mask), whole, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("visible", [128, 1024, 1664, 4224, 16896])
@pytest.mark.parametrize("heads", [1, 8, 32, 132, 512])
def test_parts_fill_the_device_and_no_more(visible: int, heads: int) -> None:
    parts = parts_of(visible, heads, 4, 132)
    assert visible % parts == 0
    assert parts == 1 or visible // parts >= LEAST_KEYS
    assert parts == 1 or visible // parts % ALIGNED == 0
    assert heads * (parts - 1) < 132
    if visible >= 4096 and heads <= 66:
        assert heads * parts > min(132, heads * visible // LEAST_KEYS) / 2
    assert parts_of(visible, heads, 4, 0) == 1


def test_static_passes_in_parts_give_the_logits_of_plain_ones() -> None:
    plain, static = (make(model(2, 1), 700) for make in (Runner, GraphRunner))
    static._processors = 132
    for width, start in ((600, 0), (1, 600), (5, 601), (32, 500)):
        tokens = ids(width, start)
        torch.testing.assert_close(
            static.forward(tokens, start), plain.forward(tokens, start), rtol=1e-4, atol=1e-4
        )


def test_the_kernel_of_a_gpu_is_used_where_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    has_fused_part.cache_clear()
    with pretended():
        cuda = torch.device("cuda", 0)
        assert has_fused_part(cuda, torch.bfloat16, 64)
        assert not has_fused_part(cuda, torch.bfloat16, 12)  # rows that no vector load takes
        lone, mask = (torch.zeros(1, 1, 1, n, device=cuda) for n in (8, 1))
        with pytest.raises(RuntimeError, match="aligned"):
            fused_part(lone, lone, lone, mask, 1.0)
    has_fused_part.cache_clear()
    assert not has_fused_part(torch.device("cpu"), torch.float32, 64)
