"""Kangaroo's adapter: one attention block with its own keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiler.models.stack import LayerRunner


class Adapter(nn.Module):
    """One attention block with two norms in front of the target's output projection.

    Kangaroo (Liu et al., arXiv:2404.18911, sec. 3.1): multi-head attention and two RMS norms,
    no feed-forward part, and the target's own output projection.  Untrained it is the logit
    lens of its layer.

    Parameters
    ----------
    layer:
        The exit whose states it reads, 1 = after the first layer.
    width, heads, head_dim:
        Of the target; the rotary positions are the target's too.
    """

    def __init__(self, layer: int, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        if layer < 1:
            raise ValueError(f"layer is {layer}, expected at least 1")
        self.layer, self.width, self.heads, self.head_dim = layer, width, heads, head_dim
        self.layers = (layer,)
        self.before = nn.Parameter(torch.ones(width))
        self.after = nn.Parameter(torch.ones(width))
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, heads * head_dim, bias=False)
        self.value = nn.Linear(width, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        nn.init.zeros_(self.out.weight)

    def start_from(self, norm: Tensor) -> Adapter:
        """Set the last norm to the target's final one, (width,)."""
        self.after.data.copy_(norm)
        return self

    def projected(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (..., tokens, width) states: (..., heads, tokens, head_dim).

        ``cos``, ``sin``: (tokens, head_dim) of the tokens' positions.
        """
        seen = _norm(hidden.float(), self.before)
        shape = (*seen.shape[:-1], self.heads, self.head_dim)
        query, key, value = (
            part(seen).view(shape).transpose(-3, -2) for part in (self.query, self.key, self.value)
        )
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def attended(
        self, hidden: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Input of the output projection, (..., tokens, width).

        ``keys``, ``values`` (..., heads, seen, head_dim); ``mask`` (tokens, seen) booleans.
        """
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        joined = mixed.transpose(-3, -2).flatten(-2)
        return _norm(hidden.float() + self.out(joined), self.after)


class AdapterRunner:
    """An adapter with the keys and values of one sequence, slot for slot as its target's."""

    def __init__(self, adapter: Adapter, target: LayerRunner) -> None:
        self.adapter = adapter
        self._cos, self._sin = (t[0].float() for t in target.rotary)
        shape = (adapter.heads, target.cache.slots, adapter.head_dim)
        self._keys = torch.zeros(shape, device=target.device)
        self._values = torch.zeros(shape, device=target.device)

    @torch.inference_mode()
    def run(
        self,
        hidden: Tensor,
        start: int,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """States for the output projection, (tokens, width), of exit states (tokens, width).

        ``start``, ``mask`` and ``positions`` as in `LayerRunner.run_layers`.
        """
        count = hidden.shape[0]
        stop = start + count
        if mask is None:
            mask = torch.ones(count, stop, dtype=torch.bool, device=hidden.device).tril(start)
        at = slice(start, stop) if positions is None else positions
        query, key, value = self.adapter.projected(hidden, self._cos[at], self._sin[at])
        self._keys[:, start:stop], self._values[:, start:stop] = key, value
        keys, values = self._keys[:, :stop], self._values[:, :stop]
        return self.adapter.attended(hidden, query, keys, values, mask)


def _norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin
