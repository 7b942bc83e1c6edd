"""The small draft model in training: its embedding is a trained projection of the target's.

The matrix and the layers are all there is to train. `profiler.fetched.smollm2.draft_model`
multiplies out an ordinary Llama.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from benchmarks.training.chats import Batch
from benchmarks.training.fit import Candidates, InTraining


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


class ProjectedDraft(InTraining):
    """The draft in training: a Llama without an embedding, and the projection of the target's."""

    def __init__(self, config: LlamaConfig, embedding: Tensor, candidates: Candidates) -> None:
        super().__init__(embedding, candidates)
        self.config = config
        # The body's own table is never read.
        unused = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        body = LlamaConfig(**{**config.to_dict(), **unused})
        body._attn_implementation = "sdpa"
        self.body = LlamaModel(body)
        del self.body.embed_tokens
        self.projection = nn.Parameter(torch.empty(embedding.shape[1], config.hidden_size))

    def states(self, tokens: Tensor) -> Tensor:
        """Map (rows, length) ids -> (rows, length, hidden), what the tied head reads."""
        embedded = F.embedding(tokens, self.table).to(self.projection.dtype) @ self.projection
        out: Tensor = self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return out

    def foreseen(
        self, batch: Batch, row: Tensor, column: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every place and its state; see `InTraining.foreseen`."""
        yield torch.ones_like(row, dtype=torch.bool), self.states(batch.tokens)[row, column]

    def logits(self, found: Tensor, rows: Tensor) -> Tensor:
        """Return logits of states, by the projection of the target's rows."""
        return F.linear(found, rows.float() @ self.projection)

    def stored(self) -> dict[str, Tensor]:
        """Return the repository's tensors: layers, final norm and projection, in float16."""
        return {name: value.half().contiguous() for name, value in self.state_dict().items()}
