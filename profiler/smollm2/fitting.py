"""A training run of fixed steps that goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profiler.smollm2.chats import Batch, Chats
from traces.errors import DraftsimError


@dataclass(frozen=True)
class Plan:
    """Optimiser steps over batches of up to `tokens` tokens; learning rates of both optimisers."""

    steps: int
    tokens: int = 4096
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 2e-3
    warmup: int = 20
    report_every: int = 25


Loss = Callable[[Batch], tuple[Tensor, Tensor]]
"""A batch's loss, nats, and by offset its agreement with the target's likeliest tokens."""


def optimisers(module: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for norms and for what is named `projection`."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_layer = parameter.ndim == 2 and "projection" not in name
            (matrices if is_layer else others).append(parameter)
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=plan.muon_rate, weight_decay=0.01))
    if others:
        betas = (0.9, 0.95)
        made.append(torch.optim.AdamW(others, lr=plan.adam_rate, betas=betas, weight_decay=0.0))
    return made


def fit(
    module: nn.Module, loss: Loss, chats: Chats, plan: Plan, kept: Path
) -> list[dict[str, Any]]:
    """Trains `module` in place; the curve, one row every `report_every` steps.

    The rate rises over `warmup` steps, stays, and falls to zero over the second half.  The state
    of a stopped run is in `kept`, and the same call goes on from it; a run of another plan there
    is an error.
    """
    steppers = optimisers(module, plan)
    full = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    curve: list[dict[str, Any]] = []
    begin = 0
    if kept.is_file():
        state = torch.load(kept)
        if state["plan"] != asdict(plan):
            raise DraftsimError(f"{kept} holds a run of another plan: remove it to start again")
        module.load_state_dict(state["module"])
        for stepper, values in zip(steppers, state["steppers"], strict=True):
            stepper.load_state_dict(values)
        curve, begin = state["curve"], state["step"]
    losses: list[float] = []
    started_s = time.perf_counter()
    order = islice(chats.order(chats.training, plan.seed, plan.tokens), begin, plan.steps)
    for step, chosen in enumerate(order, begin):
        # What a step draws depends on its number alone, so a resumed run draws the same.
        torch.manual_seed(plan.seed * 1_000_003 + step)
        factor = min(1.0, (step + 1) / plan.warmup, 2 * (plan.steps - step) / plan.steps)
        # bfloat16 is about three times as fast as float32 on CPUs that have it.
        with torch.autocast("cpu", torch.bfloat16):
            value, _ = loss(chats.batch(chosen))
        module.zero_grad()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for stepper, rates in zip(steppers, full, strict=True):
            for group, rate in zip(stepper.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            stepper.step()
        losses.append(value.item())
        if (step + 1) % plan.report_every == 0 or step + 1 == plan.steps:
            agreement = held_out_agreement(loss, chats, plan)
            curve.append(
                {"step": step + 1, "loss": sum(losses) / len(losses), "held_out": agreement}
            )
            losses.clear()
            state = {
                "plan": asdict(plan), "module": module.state_dict(), "step": step + 1,
                "steppers": [stepper.state_dict() for stepper in steppers], "curve": curve,
            }  # fmt: skip
            torch.save(state, kept.with_suffix(".part"))
            kept.with_suffix(".part").rename(kept)
            spent_s = time.perf_counter() - started_s
            left_s = spent_s / (step + 1 - begin) * (plan.steps - step - 1)
            shown = ", ".join(f"{share:.3f}" for share in agreement)
            print(
                f"step {step + 1}/{plan.steps}: loss {curve[-1]['loss']:.3f}, held-out agreement "
                f"{shown}, {left_s / 60:.0f} min left",
                flush=True,
            )
    return curve


@torch.no_grad()
def held_out_agreement(loss: Loss, chats: Chats, plan: Plan, batches: int = 2) -> list[float]:
    """By offset, over some batches of chats that training does not see."""
    order = islice(chats.order(chats.held_out, 0, plan.tokens), batches)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack([loss(chats.batch(chosen))[1].float() for chosen in order])
    shares: list[float] = found.mean(0).tolist()
    return shares
