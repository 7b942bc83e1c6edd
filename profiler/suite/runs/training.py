"""Trains a pair in minutes: a target on the Python sources of this machine, a draft after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profiler.models.architectures import Architecture
from profiler.models.loading import Pair, describe_model
from profiler.prompts import Prompt
from profiler.suite.environment import Workplace
from profiler.suite.preparation import (
    held_out_prompts,
    read_sources,
    sample_tokenizer,
    token_line,
)
from profiler.train.pair import VOCABULARY, descent, prediction_loss

ROW_TOKENS = 512
BATCH_TOKENS = 32_768
PROMPTS = 210
"""Prompts to record, a few more than a recording needs (`recording.ENOUGH`)."""
QUICK_PROMPTS = 4
"""Likewise, in miniatures."""
TARGET = Architecture(
    "trained-12",
    "trained by profiler.suite",
    768,
    2048,
    12,
    12,
    12,
    VOCABULARY,
    1024,
    tied=True,
)
DRAFT = Architecture(
    "trained-3",
    "trained by profiler.suite",
    768,
    2048,
    3,
    12,
    12,
    VOCABULARY,
    1024,
    tied=True,
)


def train_model(
    place: Workplace, model: Any, ids: Tensor, seconds: float, name: str, teacher: Any = None
) -> dict[str, float]:
    """Train in place for `seconds`; the loss is the next token's, or the teacher's distribution's.

    The rate follows the time: it rises over the first twentieth and falls to zero over the
    second half.  Returns steps and the mean loss of the last of them, nats a token.
    """
    rows = 4 if place.quick else BATCH_TOKENS // ROW_TOKENS
    length = 64 if place.quick else ROW_TOKENS
    generator = torch.Generator(place.device).manual_seed(len(name))
    offsets = torch.arange(length + 1, device=place.device)
    cuda = place.device.type == "cuda"
    begin = time.monotonic()

    def loss(_: int) -> Tensor:
        at = torch.randint(len(ids) - length - 1, (rows,), generator=generator, device=place.device)
        return prediction_loss(model, ids[at[:, None] + offsets], teacher)

    def factors() -> Iterator[float]:
        while (done := (time.monotonic() - begin) / seconds) < 1:
            yield min(1.0, done * 20 + 0.01, 2 * (1 - done))

    # An older GPU only imitates bfloat16, more slowly than it computes in float32.
    low = not cuda or torch.cuda.is_bf16_supported(False)
    steps = descent(model, 0.5 if teacher is not None else 1.0, device=place.device.type, low=low)
    losses: list[Tensor] = []
    for value in steps.steps(loss, factors()):
        losses.append(value)
        if cuda and len(losses) % 8 == 0:
            torch.cuda.synchronize()  # or the host runs minutes ahead of the clock it goes by
    last = torch.stack(losses[-50:]).mean()
    result = {"steps": len(losses), "loss": float(last), "seconds": time.monotonic() - begin}
    place.say(f"{name}: {result['steps']} steps, loss {result['loss']:.3f} nats a token")
    return result


def train_pair(place: Workplace, seconds: float) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """A 12-layer target, a 3-layer draft distilled from it, held-out prompts, and the record.

    ``seconds`` are of all of it; however long reading and tokenizing take, training gets half.
    The record says how long they took (``preparation_s``).
    """
    begin = time.monotonic()
    documents, held_out = read_sources(place, seconds=5 if place.quick else 30)
    tokenizer = sample_tokenizer(documents, place.quick)
    ids = token_line(documents, tokenizer).to(place.device)
    most = QUICK_PROMPTS if place.quick else PROMPTS
    prompts = held_out_prompts(documents, held_out, tokenizer, most)
    spent = time.monotonic() - begin
    place.say(f"{len(ids)} tokens, {len(prompts)} prompts: prepared in {spent:.0f} s")
    if not place.quick:
        seconds = max(seconds / 2, seconds - spent)
    shapes = [TARGET, DRAFT]
    if place.quick:
        shapes = [_small(shape) for shape in shapes]
    torch.manual_seed(0)
    target = shapes[0].build(place.device, torch.float32).train()
    record: dict[str, Any] = {
        "tokens": len(ids), "documents": len(documents), "preparation_s": spent,
    }  # fmt: skip
    record["target"] = train_model(place, target, ids, 0.68 * seconds, "target")
    target.eval()
    draft = shapes[1].build(place.device, torch.float32).train()
    # The target's own first layers: the draft starts out saying much of what it says.
    draft.load_state_dict(target.state_dict(), strict=False)
    record["draft"] = train_model(place, draft, ids, 0.32 * seconds, "draft", teacher=target)
    models = [lowered(model, place.dtype) for model in (target, draft)]
    meta = {
        "target": describe_model(models[0], shapes[0].name),
        "draft": describe_model(models[1], shapes[1].name),
        "tokenizer": {"class": type(tokenizer).__name__, "vocab_size": len(tokenizer)},
        "attention": "sdpa",
        "training": record,
        **place.meta(),
    }
    return Pair(models[0], models[1], tokenizer, meta), prompts, record


def lowered(model: Any, dtype: torch.dtype) -> Any:
    """`model` in `dtype` for inference; its buffers (rotary frequencies) stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def _small(shape: Architecture) -> Architecture:
    layers = 2 if shape.layers > 3 else 1
    return replace(shape, hidden_size=32, intermediate_size=64, heads=2, kv_heads=2, layers=layers)
