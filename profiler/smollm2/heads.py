"""Distils exit heads, parallel heads and Kangaroo's adapter from the target's states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiler.heads.adapter import Adapter
from profiler.heads.modules import ExitHeads, ParallelHeads
from profiler.smollm2.candidates import Candidates, soft_loss
from profiler.smollm2.chats import Batch

EXIT_RANK, PARALLEL_RANK = 32, 32
AHEAD = {"blockwise": 4, "specdec": 4, "medusa": 2}
"""Heads of a kind; each of Medusa's takes 0.7 MB of what the project may store."""


def new_exit_heads(target: Any, depths: tuple[int, ...]) -> ExitHeads:
    """Return heads after these layers that begin as the logit lens."""
    heads = ExitHeads(depths, target.config.hidden_size, EXIT_RANK)
    return heads.start_from(target.model.norm.weight.detach().float())


def new_parallel_heads(target: Any, kind: str) -> ParallelHeads:
    """AHEAD heads of a kind that begin by repeating the target's own next token."""
    return ParallelHeads(kind, AHEAD[kind], target.config.hidden_size, PARALLEL_RANK)


def new_adapter(target: Any, layer: int) -> Adapter:
    """Return Kangaroo's adapter after `layer`; it begins as the logit lens."""
    config = target.config
    adapter = Adapter(layer, config.hidden_size, config.num_attention_heads, config.head_dim)
    return adapter.start_from(target.model.norm.weight.detach().float())


class Distilled(nn.Module):
    """Heads in training: each is compared with what the target says where its token stands.

    `table`: the target's tied embedding, (vocabulary, hidden).
    """

    def __init__(self, heads: ExitHeads | ParallelHeads, table: Tensor, cand: Candidates) -> None:
        super().__init__()
        self.heads, self.table, self.candidates = heads, table, cand

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum over heads, and the agreement of each."""
        ids, raised = self.candidates.draw()
        rows = self.table[ids]
        row, column = (batch.weights > 0).nonzero().T
        wanted, weights = batch.states[row, column], batch.weights[row, column]
        with torch.no_grad():
            teacher = F.linear(wanted.to(rows.dtype), rows) + raised
        value = torch.zeros(())
        agreements = []
        for index in range(self._count):
            some, found = self._states(batch, index, row, column)
            student = F.linear(found, rows.float()) + raised
            loss, agreement = soft_loss(student, teacher[some], weights[some])
            value = value + loss
            agreements.append(agreement)
        return value, torch.stack(agreements)

    @property
    def _count(self) -> int:
        return len(self.heads.layers) if isinstance(self.heads, ExitHeads) else self.heads.k

    def _states(
        self, batch: Batch, index: int, row: Tensor, column: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which of the places head `index` can foresee, and what the projection reads there."""
        if isinstance(self.heads, ExitHeads):
            assert batch.features is not None
            parts = batch.features.unflatten(-1, (-1, self.heads.width))
            every = torch.ones_like(row, dtype=torch.bool)
            depth = parts.shape[2] - self._count + index
            return every, self.heads.states(index, parts[row, column, depth])
        # The head reads the state from which the target itself gives an earlier token.
        some = column > index
        at = row[some], column[some] - 1 - index
        normed = batch.states[at].float()
        following = F.embedding(batch.tokens[at[0], at[1] + 1], self.table).float()
        seen = torch.cat([normed, following], -1) if self.heads.kind == "specdec" else normed
        found: Tensor = self.heads.blocks[index](normed, seen)
        return some, found


class DistilledAdapter(nn.Module):
    """Kangaroo's adapter in training, on the first of the depths whose states are kept.

    `target`: gives the tied embedding and the rotary positions.
    """

    def __init__(self, adapter: Adapter, target: Any, candidates: Candidates) -> None:
        super().__init__()
        self.adapter, self.candidates = adapter, candidates
        self.table: Tensor = target.get_input_embeddings().weight.detach()
        self._rotary = [target.model.rotary_emb]  # in a list: not a part of this module

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean over positions, and the agreement."""
        assert batch.features is not None
        ids, raised = self.candidates.draw()
        rows = self.table[ids]
        there = batch.weights > 0
        with torch.no_grad():
            teacher = F.linear(batch.states[there].to(rows.dtype), rows) + raised
        length = batch.tokens.shape[1]
        hidden = batch.features[..., : rows.shape[1]]
        cos, sin = (
            part[0].float() for part in self._rotary[0](rows.float(), torch.arange(length)[None])
        )
        query, keys, values = self.adapter.projected(hidden, cos, sin)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        # Rotation gives float32 under autocast, where the values are bfloat16.
        found = self.adapter.attended(hidden, query, keys, values.to(query.dtype), mask)[there]
        student = F.linear(found, rows.float()) + raised
        value, agreement = soft_loss(student, teacher, batch.weights[there])
        return value, agreement[None]
