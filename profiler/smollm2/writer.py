"""A Llama model that writes many texts at once: one token of every row a step, rows refilled.

Every row has its own length in a preallocated cache, so a row whose text has ended begins the next
one while its neighbours go on, and a step always computes as many tokens as there are rows. The
forward is written out because a step must not copy the cache, which transformers' caches do, and
because the hidden states of the chosen depths are wanted with every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; states (rows, heads, head_dim), cos and sin (rows, 1, head_dim)."""
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat((-second, first), -1) * sin


class RowWriter:
    """`rows` texts in a cache of `positions` tokens each, after one common `prefix`.

    `depths` names the hidden states to return, as indices of `output_hidden_states`: entry i is
    the input of layer i. The model's weights are used as they are, in the model's own dtype.
    """

    def __init__(
        self, model: Any, prefix: Sequence[int], rows: int, positions: int, depths: Sequence[int]
    ) -> None:
        config = model.config
        self.config, self.rows, self.positions = config, rows, positions
        self.depths = tuple(depths)
        self.embedding = model.model.embed_tokens.weight
        self.head = model.lm_head.weight
        self.final_norm = model.model.norm.weight
        self.eps = config.rms_norm_eps
        self.layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{n}_proj").weight for n in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv_heads
        shape = (len(self.layers), rows, self.kv_heads, positions, self.head_dim)
        # Keys stand transposed: the product with few queries is twice as fast that way round.
        self.keys = torch.zeros(shape, dtype=self.embedding.dtype).mT.contiguous()
        self.values = torch.zeros(shape, dtype=self.embedding.dtype)
        at = torch.arange(positions, dtype=torch.float32)[:, None]
        cos, sin = model.model.rotary_emb(self.embedding[:1, None], at.T)
        self.cos, self.sin = cos[0], sin[0]  # (positions, head_dim)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.row_index = torch.arange(rows)
        states = [self.step(torch.full((rows,), token)) for token in prefix]
        self.prefix_length = len(prefix)
        self.prefix_final = torch.stack([final[0] for final, _ in states])  # (prefix, hidden)
        self.prefix_features = torch.stack([kept[0] for _, kept in states])

    def restart(self, row: int) -> None:
        """Lets `row` begin a new text after the common prefix."""
        self.lengths[row] = self.prefix_length

    @torch.no_grad()
    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Reads one token of every row, (rows,) int64.

        Returns the final hidden state, after the norm, (rows, hidden), and those of `depths`,
        (rows, depths, hidden).
        """
        at = self.lengths
        used = int(at.max()) + 1
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        hidden_from = (torch.arange(used) > at[:, None])[:, None, None, :]  # (rows, 1, 1, used)
        kept = []
        hidden = self.embedding[tokens]  # (rows, hidden)
        heads = self.kv_heads * self.group
        for index, (norm_in, qkv, out, norm_mid, gate_up, down) in enumerate(self.layers):
            if index in self.depths:
                kept.append(hidden)
            mixed = F.linear(_norm(hidden, norm_in, self.eps), qkv)
            query, key, value = mixed.view(self.rows, -1, self.head_dim).split(
                [heads, self.kv_heads, self.kv_heads], 1
            )
            keys, values = self.keys[index], self.values[index]
            keys[self.row_index, :, :, at] = _turn(key, cos, sin)
            values[self.row_index, :, at] = value
            # The query heads of a group read one key head: they are laid out as positions.
            query = _turn(query, cos, sin).view(self.rows, self.kv_heads, self.group, -1)
            scores = query @ keys[..., :used] * self.head_dim**-0.5  # (rows, kv heads, group, used)
            weights = scores.masked_fill(hidden_from, -torch.inf).softmax(-1)
            attended = weights @ values[:, :, :used]
            hidden = hidden + F.linear(attended.reshape(self.rows, -1), out)
            gate, up = F.linear(_norm(hidden, norm_mid, self.eps), gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        self.lengths = at + 1
        return _norm(hidden, self.final_norm, self.eps), torch.stack(kept, 1)

    def logits(self, final: Tensor) -> Tensor:
        """(rows, vocabulary) in float32, of final hidden states (rows, hidden)."""
        return F.linear(final, self.head).float()
