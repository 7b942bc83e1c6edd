"""The training of a small module on a frozen target: the target's states, and a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from profiler.models.stack import LayerRunner


class States:
    """States of a target over sequences, at the places training uses; (tokens, hidden) each."""

    def __init__(self, target: LayerRunner, text: Tensor, layers: Sequence[int] = ()) -> None:
        self.exits: list[Tensor] = []
        finals, embeds, where = [], [], []
        exits: list[list[Tensor]] = [[] for _ in layers]
        with torch.inference_mode():
            for row, ids in enumerate(text):
                count = int((ids >= 0).sum())
                hidden, at = target.embed(ids[:count]), 0
                embeds.append(hidden)
                for i, layer in enumerate(layers):
                    hidden = target.run_layers(hidden, 0, range(at, layer))
                    exits[i].append(hidden)
                    at = layer
                hidden = target.run_layers(hidden, 0, range(at, target.layers))
                finals.append(target.normed(hidden))
                at_token = torch.arange(count, device=ids.device)
                where.append(torch.stack([torch.full_like(at_token, row), at_token], 1))
        self.exits = [torch.cat(part) for part in exits]
        self.final, self.embedded = torch.cat(finals), torch.cat(embeds)
        self.where = torch.cat(where)  # (tokens, 2): sequence, index


def optimise(
    parameters: Sequence[nn.Parameter], loss: Callable[[], Tensor], *, steps: int, seconds: float,
    rate: float,
) -> float:  # fmt: skip
    """Minimise with AdamW and a cosine rate for `steps`, at most `seconds`; the last loss."""
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    begin, value = time.perf_counter(), float("nan")
    for _ in range(steps):
        optimiser.zero_grad()
        now = loss()
        now.backward()
        optimiser.step()
        schedule.step()
        value = float(now.detach())
        if time.perf_counter() - begin > seconds:
            break
    return value
