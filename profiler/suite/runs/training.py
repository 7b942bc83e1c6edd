"""Trains a pair in minutes: a target on the Python sources of this machine, a draft after it.

The pair is kept with its stage's unfinished work, so that a stopped stage trains once.

Weights that are not on the machine cannot always be brought: 98 MB and no network.  A model of
random weights has the same passes and so the same latencies; its drafts are accepted by chance
alone, which its name says.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pandas
import scipy
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from profiler import smollm2
from profiler.fetched import places as fetched
from profiler.models.architectures import Architecture
from profiler.models.graphs import GraphRunner
from profiler.models.loading import Pair, describe_model, load_pair
from profiler.models.stack import LayerRunner
from profiler.profile import Settings, assemble, recorded_columns
from profiler.prompts import Prompt, read_prompts
from profiler.recording.checkpoint import Checkpoint
from profiler.recording.run import BUNDLED, model_path
from profiler.recording.trace import Recorder
from profiler.sources.exit_record import ExitRecorder
from profiler.sources.start_record import record_along
from profiler.suite.environment import Workplace
from profiler.train.documents import CATEGORIES, Document, load_documents, stable_hash
from profiler.train.draft import draft_config, draft_model
from profiler.train.heads import default_exit_layers, train_exit_heads
from profiler.train.pair import (
    VOCABULARY,
    descent,
    prediction_loss,
    token_line,
    train_tokenizer,
)
from profiler.train.pair_prompts import cut_prompt
from profiler.train.stored import read_stored
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.sources.exits.early_exit import EarlyExit
from traces.store.files import write_trace
from traces.store.text import read_object

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
SAMPLE = 5
"""One document in this many is enough for the tokenizer's merges."""
HEAD_CHARS = 1600
"""Characters of a document among which a prompt and something to continue are looked for."""


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


def sample_tokenizer(documents: Sequence[Document], quick: bool = False) -> Any:
    """A tokenizer (`train_tokenizer`) from some of the documents."""
    ordered = sorted(documents, key=lambda d: stable_hash(d.text))
    return train_tokenizer(ordered if quick else ordered[::SAMPLE])


def held_out_prompts(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Any, count: int
) -> list[Prompt]:
    """Return at most `count` beginnings of held-out documents, in turn from each category.

    None occurs anywhere in the training text.  A document is cut only when its turn comes.
    """
    known = _Known(train)
    encode = partial(tokenizer.encode, verbose=False)
    ordered = sorted(held_out, key=lambda d: stable_hash(d.text))

    def cuts(category: str) -> Iterator[str]:
        found: set[str] = set()
        for document in ordered:
            if document.category != category:
                continue
            text = cut_prompt(document.text[:HEAD_CHARS], encode)
            if text and text not in found and text not in known:
                found.add(text)
                yield text

    sources = {category: cuts(category) for category in CATEGORIES}
    prompts: list[Prompt] = []
    while sources and len(prompts) < count:
        for category in list(sources):
            text = next(sources[category], None) if len(prompts) < count else None
            if text is None:
                del sources[category]
            else:
                prompts.append(Prompt(f"{category}-{len(prompts):03}", category, text))
    return prompts


class _Known:
    """A search for texts in all of the documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._all = "\0".join(document.text for document in documents)
        self._lines = {line for document in documents for line in document.text.split("\n")}

    def __contains__(self, text: str) -> bool:
        # Where it occurs, its inner lines are lines there; a search of everything takes long.
        inner = text.split("\n")[1:-1]
        return all(line in self._lines for line in inner) and text in self._all


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


def trained_pair(
    place: Workplace, folder: Path, seconds: float
) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """Return the pair in `folder`, or one trained now for `seconds` and kept there.

    With it come the held-out prompts and the record of its training.
    """
    transformers.utils.logging.disable_progress_bar()  # it would run through our lines
    if (folder / "about.json").is_file():
        place.say("the pair was trained before the stage was stopped")
        return _read(place, folder)
    pair, prompts, record = train_pair(place, seconds)
    _write(folder, pair, prompts, record)
    return pair, prompts, record


def _write(folder: Path, pair: Pair, prompts: Sequence[Prompt], record: dict[str, Any]) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(part / name)
    pair.tokenizer.save_pretrained(part / "tokenizer")
    about = {"meta": pair.meta, "prompts": [asdict(p) for p in prompts], "record": record}
    (part / "about.json").write_text(json.dumps(about))
    os.replace(part, folder)


def _read(place: Workplace, folder: Path) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    about = read_object(folder / "about.json")
    factory: Any = transformers.AutoModelForCausalLM
    target, draft = (
        factory.from_pretrained(
            folder / name, dtype=place.dtype, attn_implementation="sdpa", trust_remote_code=False
        )
        .to(place.device)
        .eval()
        for name in ("target", "draft")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "tokenizer", trust_remote_code=False
    )
    prompts = [Prompt(**prompt) for prompt in about["prompts"]]
    return Pair(target, draft, tokenizer, about["meta"]), prompts, about["record"]


RANDOM = f"{smollm2.NAME}-random"
CONFIG: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""SmolLM2-135M's, but that nothing ends an output."""
SMALL = {
    "vocab_size": 2048,  # of the bundled pair's tokenizer
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
"""Settings that miniatures have instead."""


def smollm2_pair(
    place: Workplace, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt], str]:
    """Return SmolLM2 and its draft model, at most `most` prompts, and the pair's name.

    The prompts are the project's where none are named, as a user's turns where the tokenizer has a
    template for them.  Where the models were not fetched, a pair of random weights replaces them,
    with the bundled pair's tokenizer.

    Raises DraftsimError if models that are there cannot be loaded.
    """
    texts = read_prompts(prompts or BUNDLED / "prompts.jsonl", most)
    folders = fetched.folder(smollm2.NAME), fetched.folder(f"{smollm2.NAME}-draft")
    if not all((folder / "config.json").is_file() for folder in folders):
        place.say(
            f"{smollm2.NAME} is not on this machine (`draftsim fetch {smollm2.NAME}`): random "
            "weights of its shapes, whose latencies are its own and whose acceptance is not"
        )
        return _random(place), texts, RANDOM
    pair = _load(place, *folders)
    return pair, [_turn(pair, prompt) for prompt in texts], smollm2.NAME


def given_pair(
    place: Workplace, target: str, draft: str | None, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """Return a user's pair, by folder or name, a limited number of prompts, and an empty record.

    Raises DraftsimError if draft or prompts are not named, or one cannot be loaded.
    """
    if draft is None or prompts is None:
        raise DraftsimError("--target also takes --draft and --prompts: name all three")
    pair = _load(place, model_path(target, "target"), model_path(draft, "draft"))
    return pair, read_prompts(prompts, most), {}


def _load(place: Workplace, target: str | Path, draft: str | Path) -> Pair:
    dtype = str(place.dtype).removeprefix("torch.")
    return load_pair(target, draft, device=str(place.device), dtype=dtype)


def _turn(pair: Pair, prompt: Prompt) -> Prompt:
    if pair.tokenizer.chat_template is None:
        return prompt
    turns = [{"role": "user", "content": prompt.text}]
    text = pair.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return replace(prompt, text=text)


def _random(place: Workplace) -> Pair:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        BUNDLED / "target", trust_remote_code=False
    )
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG, **(SMALL if place.quick else {})})
    target: Any = LlamaForCausalLM(config)
    if place.quick:
        draft: Any = LlamaForCausalLM(draft_config(config, 64, 2))
    else:
        settings, weights = read_stored(smollm2.STORED / "draft.safetensors")
        shape = draft_config(config, settings["hidden"], settings["layers"])
        draft = draft_model(shape, weights, target.get_input_embeddings().weight.detach())
    for model in (target, draft):
        model.config._attn_implementation = "sdpa"
        model.generation_config.eos_token_id = None
        torch.nn.Module.to(model, device=place.device, dtype=place.dtype)
        model.eval()
    meta = {
        "target": describe_model(target, RANDOM), "draft": describe_model(draft, f"{RANDOM}-draft"),
        "tokenizer": {"class": type(tokenizer).__name__, "vocab_size": len(tokenizer)},
        "attention": "sdpa", "random_weights": True, **place.meta(),
    }  # fmt: skip
    return Pair(target, draft, tokenizer, meta)


LARGEST = 16 * 10**6
"""Bytes of the largest file a stage may leave."""
ENOUGH = 200
"""Prompts that make a recording; one of fewer is unfinished."""
ROOM = 0.9
"""Share of it to fill where its size is a guess from the first requests."""


def record_trace(
    place: Workplace, pair: Pair, prompts: Sequence[Prompt], settings: Settings, until: float
) -> Trace:
    """The trace of as many prompts as are done by `until` (monotonic seconds), four at least.

    The target decodes through captured passes; tails run eagerly under their tree masks.
    Prompts recorded before the stage was stopped are read back.
    """
    encoded = [pair.encode(p.text) for p in prompts]
    slots = max(len(ids) for ids in encoded) + settings.max_new_tokens * (settings.max_gamma + 1)
    recorder = Recorder(
        GraphRunner(pair.target, slots), GraphRunner(pair.draft, slots),
        max_new_tokens=settings.max_new_tokens, max_gamma=settings.max_gamma, eos=pair.eos,
        sampling=settings.sampling, generator=torch.Generator(pair.device),
    )  # fmt: skip
    # Of other weights' outputs nothing may be taken over.
    weights = [pair.meta[role]["fingerprint"] for role in ("target", "draft")]
    kept = Checkpoint(
        place.work / f"trained-trace-{settings.sampling.temperature:g}",
        {"settings": settings, "pair": weights},
    )
    of = [repr(ids.tolist()) for ids in encoded]
    recorded = recorded_columns(recorder, encoded, of, settings, kept, until=until)
    done = len(recorded)
    place.say(f"recorded {done} of {len(prompts)} prompts, {settings.sampling.label}")
    return assemble(pair, prompts[:done], encoded[:done], recorded, settings)


def write_within(trace: Trace, path: Path, limit: int = LARGEST) -> int:
    """Write the first requests that fit into `limit` bytes, and return their number.

    Requests come in turn from each category, so that the first ones are of all of them.
    """
    count = len(trace.requests)
    while True:
        some = trace if count == len(trace.requests) else trace.select(range(count))
        write_trace(some, path)
        size = path.stat().st_size
        if size <= limit or count == 1:
            return count
        count = max(1, min(count - 1, int(0.97 * count * limit / size)))


def record_early_exits(
    place: Workplace, pair: Pair, trace: Trace, text: torch.Tensor, path: Path, seconds: float
) -> dict[str, Any]:
    """Train exit heads on the target and record what they say along some of the trace.

    ``text``: (sequences, tokens) ids to train on.  Requests are recorded until `seconds` are
    spent or the file is full.  Returns what was done.
    """
    begin = time.monotonic()
    setting = EarlyExit().setting(8)
    layers = default_exit_layers(int(pair.target.config.num_hidden_layers))
    longest = trace.longest
    slots = max(ExitRecorder.slots_needed(longest, 8), text.shape[1])
    runner = LayerRunner(pair.target, slots)
    steps = 5 if place.quick else 120
    heads = train_exit_heads(runner, text, layers, steps=steps, seconds=seconds / 3)
    recorder = ExitRecorder(runner, heads, [setting])
    per_request, count = 0.0, 2
    while True:
        at = time.monotonic()
        some = trace.select(range(min(count, len(trace.requests))))
        record_along(recorder, some).write(path)
        size = path.stat().st_size / len(some.requests)
        per_request = (time.monotonic() - at) / len(some.requests)
        room = min(ROOM * LARGEST / size, (seconds - (time.monotonic() - begin)) / per_request)
        if count >= min(room, len(trace.requests)) or count > 2:
            break
        count = int(min(room, len(trace.requests)))
    while path.stat().st_size > LARGEST and len(some.requests) > 1:
        # The first requests said too little of the others' size.
        share = 0.8 * LARGEST / path.stat().st_size
        some = some.select(range(max(1, int(share * len(some.requests)))))
        record_along(recorder, some).write(path)
    return {
        "layers": layers, "requests": len(some.requests), "seconds": time.monotonic() - begin,
    }  # fmt: skip
