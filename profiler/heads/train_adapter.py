"""Trains Kangaroo's adapter on a frozen target."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.heads.adapter import Adapter
from profiler.heads.training import States, optimise
from profiler.models.stack import LayerRunner


def train_adapter(
    target: LayerRunner, text: Tensor, layer: int, *, steps: int = 150, seconds: float = 30.0,
    seed: int = 0, batch: int = 8,
) -> Adapter:  # fmt: skip
    """Kangaroo's adapter distilled from the target's final distribution over `text`.

    ``text``: (sequences, tokens) ids, -1 beyond a sequence's end; ``layer``: the exit it reads;
    ``batch``: whole sequences per step.
    """
    torch.manual_seed(seed)
    states = States(target, text, (layer,))
    config = target.model.config.get_text_config()
    cos, sin = (t[0, : text.shape[1]].float().clone() for t in target.rotary)
    width = states.final.shape[1]
    adapter = Adapter(layer, width, config.num_attention_heads, cos.shape[-1]).to(text.device)
    adapter.start_from(target.model.model.norm.weight.detach())
    weight = target.model.get_output_embeddings().weight.detach().float()
    row, at = states.where.T
    exits, finals = (torch.zeros(*text.shape, width, device=text.device) for _ in range(2))
    exits[row, at], finals[row, at] = states.exits[0].float(), states.final.float()
    there = text >= 0
    mask = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).tril()

    def loss() -> Tensor:
        some = torch.randint(len(text), (batch,), device=text.device)
        hidden, known = exits[some], there[some]
        query, keys, values = adapter.projected(hidden, cos, sin)
        found = adapter.attended(hidden, query, keys, values, mask)[known]
        teacher = torch.log_softmax(finals[some][known] @ weight.T, -1)
        student = torch.log_softmax(found @ weight.T, -1)
        return (teacher.exp() * (teacher - student)).sum(-1).mean()

    optimise(list(adapter.parameters()), loss, steps=steps, seconds=seconds, rate=4e-3)
    return adapter.eval()
