"""The training loop: optimisers, learning rates, steps, and runs that resume where they stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profiler.train.chats import Batch, Chats
from traces.errors import DraftsimError


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


Loss = Callable[[Batch], tuple[Tensor, Tensor]]
"""A batch's loss, nats, and by offset its agreement with the target's likeliest tokens."""


class Descent:
    """Gradient steps on one module.

    `apart` lists parts of parameter names: AdamW trains these parameters and all vectors, Muon
    the other matrices. Without `muon_rate` AdamW trains everything. `clip` bounds the norm of the
    gradient. `low`: compute the loss in bfloat16, about three times as fast as float32 on a CPU
    that has it.
    """

    def __init__(
        self, module: nn.Module, adam_rate: float, muon_rate: float | None = None, *,
        apart: Sequence[str] = (), betas: tuple[float, float] = (0.9, 0.95),
        clip: float = 1.0, device: str = "cpu", low: bool = True,
    ) -> None:  # fmt: skip
        self.module, self.clip, self.device, self.low = module, clip, device, low
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                is_layer = parameter.ndim == 2 and not any(part in name for part in apart)
                (others if muon_rate is None or not is_layer else matrices).append(parameter)
        self.steppers: list[torch.optim.Optimizer] = []
        if matrices and muon_rate is not None:
            self.steppers.append(torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01))
        if others:
            adam = torch.optim.AdamW(others, lr=adam_rate, betas=betas, weight_decay=0.0)
            self.steppers.append(adam)
        self._full = [[group["lr"] for group in each.param_groups] for each in self.steppers]

    def steps(
        self, loss: Callable[[int], Tensor], factors: Iterable[float], begin: int = 0
    ) -> Iterator[Tensor]:
        """Take one step for each factor of the learning rates; yield the loss of each step.

        `loss` is given the number of its step; the first one is `begin`.
        """
        for step, factor in enumerate(factors, begin):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.low):
                value = loss(step)
            self.module.zero_grad()
            torch.autograd.backward(value)
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            for stepper, rates in zip(self.steppers, self._full, strict=True):
                for group, rate in zip(stepper.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                stepper.step()
            yield value.detach()


def rise_and_fall(steps: int, warmup: int = 30) -> Iterator[float]:
    """Yield factors that rise over `warmup` steps, stay at 1 and fall to 0 in the second half."""
    for step in range(steps):
        yield min(1.0, (step + 1) / warmup, 2 * (steps - step) / steps)


def cosine(steps: int) -> Iterator[float]:
    """Yield factors that fall from 1 to 0 along half a cosine."""
    return ((1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))


def within(seconds: float, values: Iterable[Tensor]) -> list[float]:
    """Return the losses of `values` until these seconds have passed, at least one."""
    begin, losses = time.perf_counter(), []
    for value in values:
        losses.append(float(value))
        if time.perf_counter() - begin > seconds:
            break
    return losses


def fit(
    module: nn.Module, loss: Loss, chats: Chats, plan: TrainingPlan, kept: Path
) -> list[dict[str, Any]]:
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
        return loss(chats.batch(next(batches)))[0]

    factors = islice(rise_and_fall(plan.steps, plan.warmup), begin, None)
    losses: list[float] = []
    started_s = time.perf_counter()
    for done, value in enumerate(descent.steps(batch_loss, factors, begin), begin + 1):
        losses.append(value.item())
        if done % plan.report_every and done != plan.steps:
            continue
        agreement = held_out_agreement(loss, chats, plan)
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
    loss: Loss, chats: Chats, plan: TrainingPlan, batches: int = 2
) -> list[float]:
    """Return the agreement by offset over some batches of chats that training does not see."""
    order = islice(chats.order(chats.held_out, 0, plan.tokens), batches)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([loss(chats.batch(chosen))[1].float() for chosen in order])
    shares: list[float] = found.mean(0).tolist()
    return shares
