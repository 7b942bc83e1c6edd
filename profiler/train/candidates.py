"""The tokens that a training step compares: the frequent ones and a fresh sample of all others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def by_frequency(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return all ids below `vocabulary`, the most frequent of `tokens` first; ties: the lower
    first.
    """
    return tokens.long().bincount(minlength=vocabulary).argsort(descending=True, stable=True)


class Candidates:
    """`frequent` ids and `sampled` of the `others`, drawn again at every step by torch's generator.

    The logits of a sampled token are raised by the logarithm of the number of tokens that it
    represents, so a softmax over the candidates estimates the one over all (importance sampling of
    the partition function; Bengio and Senecal, 2003).
    """

    def __init__(self, frequent: Tensor, others: Tensor, sampled: int) -> None:
        self.frequent, self.others = frequent, others
        self.sampled = min(sampled, len(self.others))

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return ids (n,) and what to add to their logits (n,)."""
        if not self.sampled:
            return self.frequent, torch.zeros(len(self.frequent))
        some = torch.randint(len(self.others), (self.sampled,))
        ids = torch.cat([self.frequent, self.others[some]])
        raised = torch.zeros(len(ids))
        raised[len(self.frequent) :] = math.log(len(self.others) / self.sampled)
        return ids, raised

    def teacher(self, table: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw candidates and compute the target's logits of them in its `states` (n, hidden).

        Returns the candidates' rows of `table` (c, hidden), what to add to their logits (c,), and
        the target's logits (n, c).
        """
        ids, raised = self.draw()
        rows = table[ids]
        with torch.no_grad():
            return rows, raised, F.linear(states.to(rows.dtype), rows) + raised


def soft_loss(student: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy to the teacher's distribution (nats), and the share of equal argmaxes.

    `student`, `teacher`: (n, candidates) logits; `weights` (n,), both are means under them.
    """
    wanted = teacher.float().softmax(-1)
    losses = F.cross_entropy(student.float(), wanted, reduction="none")
    agrees = (student.argmax(-1) == teacher.argmax(-1)).float()
    total = weights.sum()
    return (losses * weights).sum() / total, (agrees * weights).sum() / total
