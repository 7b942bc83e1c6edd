"""Kernels that no CPU has, for a pretended GPU: computed plainly, as particular as CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BYTES = 16
"""Bytes that vector loads are aligned to."""
ROWS = 32
"""The log-sum-exps of a kernel's rows are padded to a multiple of it."""


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten::_scaled_dot_product_efficient_attention``; RuntimeError for what CUDA's refuses."""
    assert not dropout_p
    assert not is_causal
    size = query.element_size()
    for name, tensor in (("query", query), ("key", key), ("value", value), ("bias", attn_bias)):
        if tensor is None:
            continue
        rows = [n for n, wide in zip(tensor.stride()[:-1], tensor.shape, strict=False) if wide > 1]
        rows.append(tensor.storage_offset())
        if tensor.stride(-1) != 1 or any(n * size % BYTES for n in rows) or (
            tensor.shape[-1] * size % BYTES
        ):  # fmt: skip
            raise RuntimeError(f"{name} is not correctly aligned (strides {tensor.stride()})")
    width = query.shape[-1]
    scores = (query @ key.transpose(-1, -2)).float() * (width**-0.5 if scale is None else scale)
    if attn_bias is not None:
        assert attn_bias.shape == scores.shape, (attn_bias.shape, scores.shape)
        scores = scores + attn_bias
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().to(value.dtype) @ value
    padded = pad(lse, (0, -lse.shape[-1] % ROWS), value=torch.inf)
    empty = torch.zeros((), dtype=torch.long)
    return out, padded if compute_log_sumexp else lse.new_empty(0), empty, empty.clone()


@contextmanager
def kernels() -> Iterator[None]:
    """Inside the block a CPU has the kernels."""
    library: Any = torch.library._scoped_library("aten", "IMPL")
    with library as lib:
        lib.impl("_scaled_dot_product_efficient_attention", efficient_attention, "CPU")
        yield
