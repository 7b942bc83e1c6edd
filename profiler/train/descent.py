"""Gradient steps with AdamW and Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


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
