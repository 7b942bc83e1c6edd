"""Training a small model out of its loops: unlikelihood of its own repetitions.

A small model's greedy text repeats itself for ever, because a phrase just written makes the same
phrase likely again, and its training text never shows it its own loops. So some training steps
write text greedily and lower the probability of each token that completed a repeated 4-gram
(Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training", arXiv:1908.04319).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


@torch.no_grad()
def write_greedily(model: LlamaForCausalLM, prompts: Tensor, new: int) -> Tensor:
    """Return `prompts`, int64 (rows, tokens), each with `new` greedy tokens; EOS ends nothing."""
    cache = DynamicCache(config=model.config)
    written = [prompts]
    for _ in range(new):
        logits = model(input_ids=written[-1], past_key_values=cache, logits_to_keep=1).logits
        written.append(logits[:, -1:].argmax(-1))
    return torch.cat(written, dim=1)


def repeats(rows: Tensor, prompt: int, eos: int) -> Tensor:
    """Bool (rows, tokens): tokens past the first `prompt` that complete a 4-gram seen before.

    Only tokens up to the first EOS past the prompt count: a new document begins after it.
    """
    found = torch.zeros_like(rows, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(4, len(row) + 1):
            gram = tuple(row[end - 4 : end])
            if end > prompt:
                found[i, end - 1] = gram in seen
                if gram[-1] == eos:
                    break
            seen.add(gram)
    return found


def unlikelihood(logits: Tensor, rows: Tensor, repeated: Tensor) -> Tensor:
    """Mean -log(1 - p) of the repeated tokens, a scalar; 0 where none is repeated.

    `logits`, float (rows, tokens - 1, vocabulary), are those at all but the last of `rows`.
    """
    chosen = logits.softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    loss = -torch.log((1 - chosen).clamp(min=1e-6))
    mask = repeated[:, 1:]
    return (loss * mask).sum() / mask.sum().clamp(min=1)
