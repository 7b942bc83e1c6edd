"""Attention in blocks against the same masks laid out densely."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiler.models.attention import TokenBlock, dense_mask
from profiler.models.runner import Runner


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
