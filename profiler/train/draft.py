"""The small draft model: its embedding is the target's, seen through a trained projection.

A draft of this size is mostly vocabulary: 49,152 rows of 256 numbers are four times its layers.
Here row i is the target's row i times one matrix (576 x 256), so the matrix and the layers are all
there is to store and to train, and `draft_model` multiplies out an ordinary Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from profiler.train.candidates import Candidates, soft_loss
from profiler.train.chats import Batch


def draft_config(target: Any, hidden: int, layers: int) -> LlamaConfig:
    """Return a Llama of `layers` layers of width `hidden` over the vocabulary of a target's config.

    Head size as the target's, two query heads to a key head, a feed-forward of 2.75 widths.
    """
    heads = max(2, hidden // int(target.head_dim))
    taken = (
        "vocab_size", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=True,
        **{name: getattr(target, name) for name in taken},
    )  # fmt: skip


def principal_directions(embedding: Tensor, counts: Tensor, width: int) -> Tensor:
    """Return the `width` principal directions of the rows, weighted by their counts: (hidden,
    width).

    One is added to every count, so that a token never seen still weighs something.
    """
    weights = (counts.float() + 1)[:, None]
    rows = embedding.float()
    _, vectors = torch.linalg.eigh(rows.T @ (rows * weights))
    directions: Tensor = vectors[:, -width:].flip(1).contiguous()
    return directions


class ProjectedDraft(nn.Module):
    """The draft in training: a Llama without an embedding, and the projection of the target's."""

    def __init__(self, config: LlamaConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding  # (vocabulary, target's hidden), not trained
        # The body's own table is never read.
        unused = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        body = LlamaConfig(**{**config.to_dict(), **unused})
        body._attn_implementation = "sdpa"
        self.body = LlamaModel(body)
        del self.body.embed_tokens
        self.projection = nn.Parameter(torch.empty(embedding.shape[1], config.hidden_size))

    def states(self, tokens: Tensor) -> Tensor:
        """Map (rows, length) ids -> (rows, length, hidden), what the tied head reads."""
        embedded = F.embedding(tokens, self.embedding).to(self.projection.dtype) @ self.projection
        out: Tensor = self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return out

    def loss(self, batch: Batch, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return the loss of distilling the target's distribution at every position that weighs
        something.
        """
        there = batch.weights > 0
        rows, raised, teacher = candidates.teacher(self.embedding, batch.states[there])
        student = F.linear(self.states(batch.tokens)[there], rows.float() @ self.projection)
        value, agreement = soft_loss(student + raised, teacher, batch.weights[there])
        return value, agreement[None]

    def stored(self) -> dict[str, Tensor]:
        """Return the repository's tensors: layers, final norm and projection, in float16."""
        return {name: value.half().contiguous() for name, value in self.state_dict().items()}


def draft_model(
    config: LlamaConfig, stored: Mapping[str, Tensor], embedding: Tensor
) -> LlamaForCausalLM:
    """Return the ordinary Llama of stored weights and the target's embedding, in float16."""
    model = LlamaForCausalLM(config)
    weights = {
        name.replace("body.", "model.", 1): value.float()
        for name, value in stored.items()
        if name.startswith("body.")
    }
    table = embedding.float() @ stored["projection"].float()
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = table
    model.load_state_dict(weights)
    torch.nn.Module.to(model, torch.float16)
    return model
