"""Attention that reads a shared key/value head once for all the query heads it serves.

With a mask, transformers first copies every key and value head to each of its query heads,
which at batch 16 moves several times more memory than the weights do.  Here the query heads
of a group become further queries of one head instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "draftsim_grouped"


def grouped_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of `grouped_attention`: (batch, 1, group * new_tokens, visible).

    ``seen`` (batch, new_tokens, visible) booleans.  Additive, since a boolean mask would be
    made additive again in every layer.
    """
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    hidden.masked_fill_(~seen, -torch.inf)
    return hidden.repeat(1, group, 1)[:, None]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function in transformers' sense; takes a mask of `grouped_mask` alone.

    ``query`` (batch, heads, new_tokens, width); ``key``, ``value`` (batch, kv_heads, ...).
    """
    del module, kwargs
    batch, heads, count, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared * count, width)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )  # (batch, kv_heads, group * new_tokens, width)
    out = out.reshape(batch, heads, count, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def grouped_queries(model: Any) -> Iterator[None]:
    """Inside the block, `model` attends through `grouped_attention`."""
    if NAME not in AttentionInterface().valid_keys():
        AttentionInterface.register(NAME, grouped_attention)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
