"""Attention functions of ours, put into a model for the passes that gain from them.

A decoding pass has a handful of queries a head, so a kernel that gives each head's queries to one
block of threads leaves most of a GPU idle: 8 blocks on 132 multiprocessors for an 8B model.  Here
every part of the keys is a head of its own.  Each part's softmax is over its own keys, and the
parts are put together by their log-sum-exps, as FlashDecoding does (Dao et al. 2023).

*Grouped*: with a mask, transformers first copies every key and value head to each of its
query heads, which at batch 16 moves several times more memory than the weights do.  Here the
query heads of a group become further queries of one head instead, and where that leaves few
heads, their keys are cut into parts (`profiler.models.attention`).

*In blocks*: in a pass over many branches of a tree nearly every pair of tokens is masked out.
Here whole branches attend a few at a time, to the path and to each other alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

ROWS = 64
"""Queries that one block of a fused kernel takes."""
LEAST_KEYS = 128
"""Fewest keys of a part: fewer are not worth a block."""
ALIGNED = 16
"""Parts begin at multiples of it, as vector loads of keys and masks ask."""
HIDDEN = -0.25
"""A masked score, in units of the dtype's largest number.

It is finite, so that a part with only masked keys has a log-sum-exp of weight zero, not NaN.
"""


def to_add(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as numbers to add to attention's scores."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def parts_of(visible: int, heads: int, rows: int, processors: int) -> int:
    """Return the number of equal parts to cut `visible` keys into; 1 if there are enough blocks.

    ``heads`` key heads of all sequences, ``rows`` queries of each, ``processors`` of the device.
    """
    blocks = heads * math.ceil(rows / ROWS)
    most = min(math.ceil(processors / blocks), visible // LEAST_KEYS)
    fits = (n for n in range(most, 1, -1) if visible % (n * ALIGNED) == 0)
    return next(fits, 1)


def split_mask(seen: Tensor, group: int, dtype: torch.dtype, parts: int) -> Tensor:
    """Return the mask to add: (batch, parts, group * new_tokens, visible / parts).

    ``seen`` (batch, new_tokens, visible) booleans.  Additive, since a boolean mask would be
    made additive again in every layer.
    """
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    hidden.masked_fill_(~seen, HIDDEN * torch.finfo(dtype).max)
    batch, new, visible = seen.shape
    cut = hidden.view(batch, new, parts, visible // parts).transpose(1, 2)
    return cut.repeat(1, 1, group, 1)


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Return attention over keys, computed in parts that are then combined.

    ``query`` (batch, kv_heads, rows, width); ``key``, ``value`` (batch, kv_heads, visible, width);
    ``mask`` as in `split_mask`, (batch, parts, rows, visible / parts).  Returns as `query`.
    """
    batch, heads, rows, width = query.shape
    parts = mask.shape[1]
    # (batch * heads, parts, length, width): views, for a cache holds its sequences one by one.
    keys, values = (s.unflatten(2, (parts, -1)).flatten(0, 1) for s in (key, value))
    queries = query.flatten(0, 1)[:, None].expand(-1, parts, -1, -1).contiguous()
    masks = mask[:, None].expand(-1, heads, -1, -1, -1).flatten(0, 1)
    scale = width**-0.5 if scale is None else scale
    each = fused_part if has_fused_part(query.device, query.dtype, width) else plain_part
    out, lse = each(queries, keys, values, masks, scale)
    shares = torch.softmax(lse, dim=1)[..., None]  # (batch * heads, parts, rows, 1)
    whole = (out * shares).sum(dim=1).to(query.dtype)
    return whole.view(batch, heads, rows, value.shape[-1])


def plain_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp (..., rows), of plain operations."""
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse


def fused_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `plain_part` with CUDA's memory-efficient kernel, which takes a mask."""
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, scale=scale
    )
    return out, lse[..., : query.shape[2]]  # its rows are padded


@cache
def has_fused_part(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return True if `fused_part` runs here with the results of `plain_part`, hidden parts too."""
    if device.type != "cuda":
        return False
    seeded = torch.Generator().manual_seed(0)
    shapes = (2, 2, 3, width), (2, 2, ALIGNED, width), (2, 2, ALIGNED, width)
    query, key, value = (torch.randn(s, generator=seeded).to(device, dtype) for s in shapes)
    seen = torch.arange(2 * ALIGNED, device=device) < ALIGNED
    mask = split_mask(seen.expand(2, 3, -1), 1, dtype, 2)

    def whole(each: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        out, lse = each(query, key, value, mask, width**-0.5)
        return (out * torch.softmax(lse, dim=1)[..., None]).sum(1).float()

    try:
        return torch.allclose(whole(fused_part), whole(plain_part), atol=0.02)
    except (RuntimeError, NotImplementedError):
        return False


class TokenBlock(NamedTuple):
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
    """Return the attention, (batch, new_tokens, heads, width), as transformers' functions do.

    ``query`` (batch, heads, new_tokens, width); ``key``, ``value`` (batch, kv_heads, ...).  The
    mask is one of `split_mask`; with several parts `split_attention` computes the result.
    """
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


def dense_mask(blocks: Sequence[TokenBlock], start: int) -> Tensor:
    """Return the mask to add for `blocks` that cover a pass: (tokens, start + tokens)."""
    count = blocks[-1].tokens.stop
    whole = blocks[0].mask.new_full((count, start + count), -torch.inf)
    for tokens, path, mask in blocks:
        whole[tokens, :path] = mask[:, :path]
        whole[tokens, start + tokens.start : start + tokens.stop] = mask[:, path:]
    return whole


def block_attention(blocks: Sequence[TokenBlock]) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function for transformers, of one sequence that attends in `blocks`.

    It ignores the mask that the model is given.
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
def attending(model: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let `model` attend, inside the block, through `function`, known to transformers as `name`."""
    AttentionInterface.register(name, function)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
