"""Exit heads, parallel heads and Kangaroo's adapter, distilled from the target's chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training.chats import Batch
from benchmarks.training.fit import Candidates, InTraining
from profiler.features.heads import Adapter, ExitHeads, ParallelHeads

EXIT_RANK, PARALLEL_RANK = 32, 32
AHEAD = {"blockwise": 4, "specdec": 4, "medusa": 2}
"""Heads of a kind; each of Medusa's takes 0.7 MB of what the project may store."""


def new_exit_heads(target: Any, depths: tuple[int, ...]) -> ExitHeads:
    """Return heads after these layers that begin as the logit lens."""
    heads = ExitHeads(depths, target.config.hidden_size, EXIT_RANK)
    return heads.start_from(target.model.norm.weight.detach().float())


def new_parallel_heads(target: Any, kind: str) -> ParallelHeads:
    """Return AHEAD heads of a kind that begin by repeating the target's own next token."""
    return ParallelHeads(kind, AHEAD[kind], target.config.hidden_size, PARALLEL_RANK)


def new_adapter(target: Any, layer: int) -> Adapter:
    """Return Kangaroo's adapter after `layer`; it begins as the logit lens."""
    config = target.config
    adapter = Adapter(layer, config.hidden_size, config.num_attention_heads, config.head_dim)
    return adapter.start_from(target.model.norm.weight.detach().float())


class Distilled(InTraining):
    """Heads in training: each is compared with the target's prediction at the head's token.

    `table` (vocabulary, hidden) is the target's tied embedding.
    """

    def __init__(
        self, heads: ExitHeads | ParallelHeads, table: Tensor, candidates: Candidates
    ) -> None:
        super().__init__(table, candidates)
        self.heads = heads

    def foreseen(
        self, batch: Batch, row: Tensor, column: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places and states of each head; see `InTraining.foreseen`."""
        if isinstance(self.heads, ExitHeads):
            assert batch.features is not None
            parts = batch.features.unflatten(-1, (-1, self.heads.width))
            every = torch.ones_like(row, dtype=torch.bool)
            count = len(self.heads.layers)
            for index in range(count):
                depth = parts.shape[2] - count + index
                yield every, self.heads.states(index, parts[row, column, depth])
            return
        for index, block in enumerate(self.heads.blocks):
            # The head reads the state from which the target itself gives an earlier token.
            some = column > index
            at = row[some], column[some] - 1 - index
            normed = batch.states[at].float()
            following = F.embedding(batch.tokens[at[0], at[1] + 1], self.table).float()
            seen = torch.cat([normed, following], -1) if self.heads.kind == "specdec" else normed
            yield some, block(normed, seen)


class DistilledAdapter(InTraining):
    """Kangaroo's adapter in training, on the first of the depths whose states are kept.

    `target`: gives the tied embedding and the rotary positions.
    """

    def __init__(self, adapter: Adapter, target: Any, candidates: Candidates) -> None:
        super().__init__(target.get_input_embeddings().weight.detach(), candidates)
        self.adapter = adapter
        self._rotary = [target.model.rotary_emb]  # in a list: not a part of this module

    def foreseen(
        self, batch: Batch, row: Tensor, column: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every place and the adapter's states there; see `InTraining.foreseen`."""
        assert batch.features is not None
        length = batch.tokens.shape[1]
        hidden = batch.features[..., : self.table.shape[1]]
        positions = torch.arange(length)[None]
        cos, sin = (part[0].float() for part in self._rotary[0](self.table[:1].float(), positions))
        query, keys, values = self.adapter.projected(hidden, cos, sin)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        # Rotation gives float32 under autocast, where the values are bfloat16.
        found = self.adapter.attended(hidden, query, keys, values.to(query.dtype), mask)
        yield torch.ones_like(row, dtype=torch.bool), found[row, column]
