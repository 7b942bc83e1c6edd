"""transformers' own assisted generation, to compare the number of passes with ours."""

from __future__ import annotations

from typing import Any

import torch

from profiler.machine import timed
from profiler.models.loading import Pair
from profiler.models.seq2seq import decoder_prefix, is_seq2seq


def assisted_generation(
    pair: Pair, prompt: torch.Tensor, max_new_tokens: int, **settings: Any
) -> tuple[list[int], int, float]:
    """Run transformers' own assisted generation: return (output ids, target passes, wall seconds).

    ``settings`` go to the draft's generation config: ``num_assistant_tokens``,
    ``num_assistant_tokens_schedule``, ``assistant_confidence_threshold``.
    """
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    config = pair.draft.generation_config
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    handle = pair.target.register_forward_pre_hook(count)
    try:
        with torch.inference_mode(), timed(pair.device) as seconds:
            out = pair.target.generate(
                input_ids=prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                assistant_model=pair.draft,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
    finally:
        handle.remove()
        for name, value in before.items():
            setattr(config, name, value)
    # An encoder-decoder's sequence begins with its start token, not with the prompt.
    fed = len(decoder_prefix(pair.target)) if is_seq2seq(pair.target) else prompt.shape[0]
    return out[0, fed:].tolist(), passes, seconds()
