"""Trains a pair in minutes: a target on the Python sources of this machine, a draft after it."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pandas
import scipy
import torch
import transformers
from torch import Tensor

from profiler.architectures import Architecture
from profiler.loading import Pair, describe_model
from profiler.pair.models import VOCABULARY, train_tokenizer
from profiler.pair.prompts import cut_prompt
from profiler.pair.text import CATEGORIES, Document, load_documents, stable_hash
from profiler.pair.training import Stream, optimisers, prediction_loss, update
from profiler.prompts import Prompt
from profiler.suite.environment import Workplace

ROW_TOKENS = 512
BATCH_TOKENS = 32_768
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


def source_roots(quick: bool) -> list[Path]:
    """Folders of Python sources, the standard library first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if quick:
        return [library / "email", library / "asyncio"]
    parts = [
        (torch, "nn"),
        (torch, "distributed"),
        (torch, "_inductor"),
        (transformers, "generation"),
    ]
    folders = [Path(str(module.__file__)).parent for module in (pandas, scipy, numpy)]
    folders += [Path(str(module.__file__)).parent / name for module, name in parts]
    return [library, *folders]


def read_sources(place: Workplace, seconds: float) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents of as many folders as `seconds` allow, one at least."""
    begin = time.monotonic()
    train: dict[str, Document] = {}
    held_out: dict[str, Document] = {}
    for root in source_roots(place.quick):
        if train and time.monotonic() - begin > seconds:
            break
        try:
            some, others = load_documents(root)
        except FileNotFoundError:
            continue
        train.update((d.text, d) for d in some)
        held_out.update((d.text, d) for d in others)
    place.say(f"{len(train)} documents to train on, {len(held_out)} held out")
    return list(train.values()), [d for text, d in held_out.items() if text not in train]


def held_out_prompts(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Any, count: int
) -> list[Prompt]:
    """`count` beginnings of held-out documents, in turn from each category."""
    seen = "\0".join(document.text for document in train)
    encode = partial(tokenizer.encode, verbose=False)
    ordered = sorted(held_out, key=lambda d: stable_hash(d.text))

    def cuts(category: str) -> Iterator[str]:
        texts = (cut_prompt(d.text, encode) for d in ordered if d.category == category)
        return (text for text in dict.fromkeys(texts) if text and text not in seen)

    sources = {category: cuts(category) for category in CATEGORIES}
    prompts: list[Prompt] = []
    while sources and len(prompts) < count:
        for category in list(sources):
            text = next(sources[category], None)
            if text is None:
                del sources[category]
            elif len(prompts) < count:
                prompts.append(Prompt(f"{category}-{len(prompts):03}", category, text))
    return prompts


def train_model(
    place: Workplace, model: Any, ids: Tensor, seconds: float, name: str, teacher: Any = None
) -> dict[str, float]:
    """Train in place for `seconds`; the loss is the next token's, or the teacher's distribution's.

    The rate follows the time: it rises over the first twentieth and falls to zero over the
    second half.  Returns steps and the mean loss of the last of them, nats a token.
    """
    rows = 4 if place.quick else BATCH_TOKENS // ROW_TOKENS
    length = 64 if place.quick else ROW_TOKENS
    steppers = optimisers(model, rate=0.5 if teacher is not None else 1.0)
    generator = torch.Generator(place.device).manual_seed(len(name))
    offsets = torch.arange(length + 1, device=place.device)
    losses: list[Tensor] = []
    begin = time.monotonic()
    cuda = place.device.type == "cuda"
    # An older GPU only imitates bfloat16, more slowly than it computes in float32.
    low = not cuda or torch.cuda.is_bf16_supported(False)
    while (done := (time.monotonic() - begin) / seconds) < 1:
        at = torch.randint(len(ids) - length - 1, (rows,), generator=generator, device=place.device)
        tokens = ids[at[:, None] + offsets]
        with torch.autocast(place.device.type, torch.bfloat16, enabled=low):
            loss = prediction_loss(model, tokens, teacher)
        update(model, steppers, loss, min(1.0, done * 20 + 0.01, 2 * (1 - done)))
        losses.append(loss.detach())
        if cuda and len(losses) % 8 == 0:
            torch.cuda.synchronize()  # or the host runs minutes ahead of the clock it goes by
    last = torch.stack(losses[-50:]).mean()
    result = {"steps": len(losses), "loss": float(last), "seconds": time.monotonic() - begin}
    place.say(f"{name}: {result['steps']} steps, loss {result['loss']:.3f} nats a token")
    return result


def train_pair(place: Workplace, seconds: float) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """A 12-layer target, a 3-layer draft distilled from it, held-out prompts, and the record.

    ``seconds`` are of all of it; however long reading and tokenizing take, training gets half.
    """
    begin = time.monotonic()
    documents, held_out = read_sources(place, seconds=5 if place.quick else 30)
    tokenizer = train_tokenizer(documents)
    ids = Stream(documents, tokenizer).ids.to(place.device)
    count = 8 if place.quick else 210
    prompts = held_out_prompts(documents, held_out, tokenizer, count)
    if not place.quick:
        seconds = max(seconds / 2, seconds - (time.monotonic() - begin))
    shapes = [TARGET, DRAFT]
    if place.quick:
        shapes = [_small(shape) for shape in shapes]
    torch.manual_seed(0)
    target = shapes[0].build(place.device, torch.float32).train()
    record: dict[str, Any] = {"tokens": len(ids), "documents": len(documents)}
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
