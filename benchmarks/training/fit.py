"""Distillation on the target's chats: the tokens compared, the loss, and runs that resume."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.chats import Batch, Chats
from profiler.train.heads import Descent
from traces.errors import DraftsimError


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


class InTraining(nn.Module, ABC):
    """A drafter in training. The target's distributions are its labels.

    `table` (vocabulary, hidden) is the target's output projection, which the drafter shares;
    `candidates` are the tokens that a step compares.
    """

    decay = 1.0
    """Factor of the loss from one drafted token to the next."""

    def __init__(self, table: Tensor, candidates: Candidates) -> None:
        super().__init__()
        self.table, self.candidates = table, candidates

    @abstractmethod
    def foreseen(
        self, batch: Batch, row: Tensor, column: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each drafted token, which of the places it can predict, and its states.

        `row`, `column` (places,) are positions of `batch`; the label of a place is the target's
        distribution there. The states (n, hidden) are what the output projection reads.
        """

    def logits(self, found: Tensor, rows: Tensor) -> Tensor:
        """Return logits (n, candidates) of states, given the candidates' rows of `table`."""
        return F.linear(found, rows.to(found.dtype))

    def regression(self, batch: Batch, found: Tensor, wanted: Tensor) -> Tensor | float:
        """Return a regression of its states to the target's, added to a drafted token's loss."""
        del batch, found, wanted
        return 0.0

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum over drafted tokens, nats a place, and the agreement of each."""
        row, column = (batch.weights > 0).nonzero().T
        weights, wanted = batch.weights[row, column], batch.states[row, column]
        rows, raised, teacher = self.candidates.teacher(self.table, wanted)
        value, agreements = torch.zeros(()), []
        for step, (some, found) in enumerate(self.foreseen(batch, row, column)):
            student = self.logits(found, rows) + raised
            loss, agreement = soft_loss(student, teacher[some], weights[some])
            loss = loss + self.regression(batch, found, wanted[some])
            value = value + self.decay**step * loss
            agreements.append(agreement)
        return value, torch.stack(agreements)


@dataclass(frozen=True)
class TrainingPlan:
    """A training plan: optimiser steps, batches of up to `tokens` tokens, and learning rates."""

    steps: int
    tokens: int = 4096
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    warmup: int = 20
    report_every: int = 25


def rise_and_fall(steps: int, warmup: int = 30) -> Iterator[float]:
    """Yield factors that rise over `warmup` steps, stay at 1 and fall to 0 in the second half."""
    for step in range(steps):
        yield min(1.0, (step + 1) / warmup, 2 * (steps - step) / steps)


def fit(module: InTraining, chats: Chats, plan: TrainingPlan, kept: Path) -> list[dict[str, Any]]:
    """Train `module` in place; return the curve, one row every `report_every` steps.

    The state of a stopped run is in `kept`, and the same call resumes from it.

    Raises
    ------
    DraftsimError
        If `kept` holds a run of another plan.
    """
    descent = Descent(module, plan.adam_rate, plan.muon_rate, apart=("projection",))
    curve: list[dict[str, Any]] = []
    begin = 0
    if kept.is_file():
        state = torch.load(kept)
        if state["plan"] != asdict(plan):
            raise DraftsimError(f"{kept} holds a run of another plan: remove it to start again")
        module.load_state_dict(state["module"])
        for stepper, values in zip(descent.steppers, state["steppers"], strict=True):
            stepper.load_state_dict(values)
        curve, begin = state["curve"], state["step"]
    batches = islice(chats.order(chats.training, plan.seed, plan.tokens), begin, None)

    def batch_loss(step: int) -> Tensor:
        # A step's random draws depend on its number alone, so a resumed run draws the same.
        torch.manual_seed(plan.seed * 1_000_003 + step)
        return module.loss(chats.batch(next(batches)))[0]

    factors = islice(rise_and_fall(plan.steps, plan.warmup), begin, None)
    losses: list[float] = []
    started_s = time.perf_counter()
    for done, value in enumerate(descent.steps(batch_loss, factors, begin), begin + 1):
        losses.append(value.item())
        if done % plan.report_every and done != plan.steps:
            continue
        agreement = held_out_agreement(module, chats, plan)
        curve.append({"step": done, "loss": sum(losses) / len(losses), "held_out": agreement})
        losses.clear()
        state = {
            "plan": asdict(plan), "module": module.state_dict(), "step": done,
            "steppers": [stepper.state_dict() for stepper in descent.steppers], "curve": curve,
        }  # fmt: skip
        torch.save(state, kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
        left_s = (time.perf_counter() - started_s) / (done - begin) * (plan.steps - done)
        shown = ", ".join(f"{share:.3f}" for share in agreement)
        print(
            f"step {done}/{plan.steps}: loss {curve[-1]['loss']:.3f}, held-out agreement "
            f"{shown}, {left_s / 60:.0f} min left",
            flush=True,
        )
    return curve


@torch.no_grad()
def held_out_agreement(
    module: InTraining, chats: Chats, plan: TrainingPlan, batches: int = 2
) -> list[float]:
    """Return the agreement by offset over some batches of chats that training does not see."""
    order = islice(chats.order(chats.held_out, 0, plan.tokens), batches)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([module.loss(chats.batch(some))[1].float() for some in order])
    shares: list[float] = found.mean(0).tolist()
    return shares
