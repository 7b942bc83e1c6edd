"""Attention functions of ours, put into a model for the passes that gain from them.

*Grouped*: with a mask, transformers first copies every key and value head to each of its
query heads, which at batch 16 moves several times more memory than the weights do.  Here the
query heads of a group become further queries of one head instead, and where that leaves few
heads, their keys are cut into parts (`profiler.models.split_attention`).

*In blocks*: in a pass over many branches of a tree nearly every pair of tokens is masked out.
Here whole branches attend a few at a time, to the path and to each other alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from profiler.models.split_attention import split_attention


class Block(NamedTuple):
    """Consecutive tokens of a pass, and what they attend to.

    ``path`` slots from the first, then the tokens of the block itself; ``mask`` to add,
    (tokens, path + tokens).
    """

    tokens: slice
    path: int
    mask: Tensor


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
    """An attention function in transformers' sense; takes a mask of `split_mask` alone.

    ``query`` (batch, heads, new_tokens, width); ``key``, ``value`` (batch, kv_heads, ...).  A
    mask in more parts than one asks for `split_attention`.
    """
    del module, kwargs
    assert attention_mask is not None
    batch, heads, count, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared * count, width)
    if attention_mask.shape[1] > 1:
        out = split_attention(grouped, key, value, attention_mask, scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )  # (batch, kv_heads, group * new_tokens, width)
    out = out.reshape(batch, heads, count, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def dense_mask(blocks: Sequence[Block], start: int) -> Tensor:
    """Return the mask to add for `blocks` that cover a pass: (tokens, start + tokens)."""
    count = blocks[-1].tokens.stop
    whole = blocks[0].mask.new_full((count, start + count), -torch.inf)
    for tokens, path, mask in blocks:
        whole[tokens, :path] = mask[:, :path]
        whole[tokens, start + tokens.start : start + tokens.stop] = mask[:, path:]
    return whole


def block_attention(blocks: Sequence[Block]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function in transformers' sense for one sequence that attends in `blocks`.

    It takes the place of the mask, whatever mask the model was given.
    """

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        del module, attention_mask, kwargs
        start = key.shape[2] - query.shape[2]
        parts = []
        for tokens, path, mask in blocks:
            own = slice(start + tokens.start, start + tokens.stop)
            keys, values = (torch.cat([s[:, :, :path], s[:, :, own]], 2) for s in (key, value))
            parts.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, tokens], keys, values, attn_mask=mask[None, None],
                    dropout_p=dropout, scale=scaling, enable_gqa=key.shape[1] != query.shape[1],
                )
            )  # fmt: skip
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None

    return attend


@contextmanager
def in_blocks(model: Any, blocks: Sequence[Block]) -> Iterator[None]:
    """Inside the block, `model` attends through `block_attention`."""
    with attending(model, "draftsim_blocks", block_attention(blocks)):
        yield


@contextmanager
def attending(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `model` attends through `function`, known to transformers as `name`."""
    AttentionInterface.register(name, function)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
