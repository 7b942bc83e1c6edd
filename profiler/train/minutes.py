"""A pair trained in minutes: a target on the Python sources of this machine, a draft after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy
import pandas
import scipy
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from profiler.models.architectures import DecoderShape
from profiler.models.loading import Pair, describe_model
from profiler.prompts import Prompt
from profiler.train.documents import (
    CATEGORIES,
    LIBRARY,
    Document,
    Known,
    cuts,
    load_documents,
    stable_hash,
)
from profiler.train.heads import Descent
from traces.aliases import Say

EOS, PAD = "<|endoftext|>", "<|pad|>"  # EOS separates documents, so it is BOS as well
VOCABULARY, POSITIONS = 2048, 1024
_CHUNK = 1024  # documents encoded at a time
ROW_TOKENS = 512
BATCH_TOKENS = 32_768
TARGET = DecoderShape(
    "trained-12", "trained by profiler.suite", 12, 768, 2048, 12, 12, 64, VOCABULARY,
    tied=True, positions=POSITIONS,
)  # fmt: skip
DRAFT = replace(TARGET, name="trained-3", layers=3)

Trained = tuple[Pair, list[Prompt], dict[str, Any]]
"""A pair, held-out prompts, and the record of the training."""


def read_sources(
    seconds: float, say: Say, quick: bool = False
) -> tuple[list[Document], list[Document]]:
    """Return (training, held-out) documents of Python sources, the standard library's first.

    As many folders are read as `seconds` allow, one at least.
    """
    packages = [Path(str(module.__file__)).parent for module in (pandas, scipy, numpy)]
    torch_root, generation = Path(torch.__file__).parent, Path(transformers.__file__).parent
    parts = [torch_root / name for name in ("nn", "distributed", "_inductor")]
    roots = [LIBRARY, *packages, *parts, generation / "generation"]
    begin = time.monotonic()
    first, *others = [LIBRARY / "email", LIBRARY / "asyncio"] if quick else roots
    in_time = takewhile(lambda _: time.monotonic() - begin <= seconds, others)
    train, held_out = load_documents(chain([first], in_time))
    say(f"{len(train)} documents to train on, {len(held_out)} held out")
    return train, held_out


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of VOCABULARY tokens; encoding adds no special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[EOS, PAD], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator((document.text for document in documents), trainer)
    # The class's constructor has no type hints; a typed name for it keeps the check strict.
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=bpe, bos_token=EOS, eos_token=EOS, pad_token=PAD,
        model_max_length=POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def sample_tokenizer(documents: Sequence[Document], quick: bool = False) -> Any:
    """Return a tokenizer (`train_tokenizer`) from one document in five, which is enough."""
    ordered = sorted(documents, key=lambda d: stable_hash(d.text))
    return train_tokenizer(ordered if quick else ordered[::5])


def token_line(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the documents as one line of token ids, int64, in a shuffled order, an EOS after each.

    Documents are encoded some at a time, in parallel where there are cores.
    """
    texts = sorted((document.text for document in documents), key=stable_hash)
    backend: Any = tokenizer.backend_tokenizer
    parts = [
        numpy.array([*encoding.ids, tokenizer.eos_token_id], dtype=numpy.int64)
        for at in range(0, len(texts), _CHUNK)
        for encoding in backend.encode_batch_fast(texts[at : at + _CHUNK], add_special_tokens=False)
    ]
    return torch.from_numpy(numpy.concatenate(parts))


def held_out_prompts(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Any, count: int
) -> list[Prompt]:
    """Return at most `count` beginnings of held-out documents, in turn from each category.

    None occurs anywhere in the training text.  A document is cut only when its turn comes.
    """
    known, encode = Known(train), partial(tokenizer.encode, verbose=False)
    # In the order of whole documents: their heads, which prompts are taken from, may be alike.
    whole = sorted(held_out, key=lambda document: stable_hash(document.text))
    ordered = [replace(document, text=document.text[:1600]) for document in whole]
    sources = {category: cuts(ordered, category, known, encode) for category in CATEGORIES}
    prompts: list[Prompt] = []
    while sources and len(prompts) < count:
        for category in list(sources):
            text = next(sources[category], None) if len(prompts) < count else None
            if text is None:
                del sources[category]
            else:
                prompts.append(Prompt(f"{category}-{len(prompts):03}", category, text))
    return prompts


def descent(model: torch.nn.Module, rate: float = 1.0, **settings: Any) -> Descent:
    """Return Muon for the layers' matrices, AdamW for embedding and norms, at `rate` times theirs.

    Muon makes a run of minutes enough: at the same number of steps AdamW alone ended above it by
    one nat a token. `settings`: as `Descent` takes them.
    """
    return Descent(model, 0.01 * rate, 0.03 * rate, apart=("embed",), **settings)


def prediction_loss(model: Any, tokens: Tensor, teacher: Any | None = None) -> Tensor:
    """Return cross-entropy, nats a token, to the next token, or to the teacher's distribution.

    `tokens` is int64 (rows, length + 1): the first `length` of each row are read.
    """
    inputs = tokens[:, :-1]
    logits = model(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
    if teacher is None:
        return F.cross_entropy(logits, tokens[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(input_ids=inputs, use_cache=False).logits.float().softmax(-1)
    return F.cross_entropy(logits, wanted.flatten(0, 1))


def train_model(
    model: Any, ids: Tensor, seconds: float, name: str, say: Say, *, teacher: Any = None,
    quick: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Train in place for `seconds`; the loss is the next token's, or the teacher's distribution's.

    The rate follows the time: it rises over the first twentieth and falls to zero over the
    second half.  Returns steps and the mean loss of the last of them, nats a token.
    """
    device, length = ids.device, 64 if quick else ROW_TOKENS
    rows = 4 if quick else BATCH_TOKENS // ROW_TOKENS
    generator = torch.Generator(device).manual_seed(len(name))
    offsets = torch.arange(length + 1, device=device)
    cuda = device.type == "cuda"
    begin = time.monotonic()

    def loss(_: int) -> Tensor:
        at = torch.randint(len(ids) - length - 1, (rows,), generator=generator, device=device)
        return prediction_loss(model, ids[at[:, None] + offsets], teacher)

    def factors() -> Iterator[float]:
        yield 0.01  # a step, however little time there is
        while (done := (time.monotonic() - begin) / seconds) < 1:
            yield min(1.0, done * 20 + 0.01, 2 * (1 - done))

    # An older GPU only imitates bfloat16, more slowly than it computes in float32.
    low = not cuda or torch.cuda.is_bf16_supported(False)
    steps = descent(model, 0.5 if teacher is not None else 1.0, device=device.type, low=low)
    losses: list[Tensor] = []
    for value in steps.steps(loss, factors()):
        losses.append(value)
        if cuda and len(losses) % 8 == 0:
            torch.cuda.synchronize()  # or the host runs minutes ahead of the clock it goes by
    last = torch.stack(losses[-50:]).mean()
    result = {"steps": len(losses), "loss": float(last), "seconds": time.monotonic() - begin}
    say(f"{name}: {result['steps']} steps, loss {result['loss']:.3f} nats a token")
    return result


def train_pair(
    seconds: float, device: torch.device, dtype: torch.dtype, say: Say, *, prompts: int,
    quick: bool = False,
) -> Trained:  # fmt: skip
    """Train a 12-layer target and a 3-layer draft distilled from it; with held-out `prompts`.

    ``seconds`` are of all of it; however long reading and tokenizing take, training gets half.
    The record says how long they took (``preparation_s``).  ``quick``: miniatures.
    """
    begin = time.monotonic()
    documents, held_out = read_sources(5 if quick else 30, say, quick)
    tokenizer = sample_tokenizer(documents, quick)
    ids = token_line(documents, tokenizer).to(device)
    texts = held_out_prompts(documents, held_out, tokenizer, prompts)
    spent = time.monotonic() - begin
    say(f"{len(ids)} tokens, {len(texts)} prompts: prepared in {spent:.0f} s")
    if not quick:
        seconds = max(seconds / 2, seconds - spent)
    shapes = [TARGET, DRAFT]
    if quick:
        shapes = [
            replace(shape, hidden=32, inner=64, heads=2, kv_heads=2, head_dim=16, layers=layers)
            for shape, layers in zip(shapes, (2, 1), strict=True)
        ]
    torch.manual_seed(0)
    target = shapes[0].build(device, torch.float32).train()
    record: dict[str, Any] = {"tokens": len(ids), "documents": len(documents)}
    record["preparation_s"] = spent
    record["target"] = train_model(target, ids, 0.68 * seconds, "target", say, quick=quick)
    target.eval()
    draft = shapes[1].build(device, torch.float32).train()
    # The target's own first layers: the draft starts out saying much of what it says.
    draft.load_state_dict(target.state_dict(), strict=False)
    record["draft"] = train_model(
        draft, ids, 0.32 * seconds, "draft", say, teacher=target, quick=quick
    )
    models = [lowered(model, dtype) for model in (target, draft)]
    meta = {
        "target": describe_model(models[0], shapes[0].name),
        "draft": describe_model(models[1], shapes[1].name),
        "tokenizer": {"class": type(tokenizer).__name__, "vocab_size": len(tokenizer)},
        "attention": "sdpa",
        "training": record,
    }
    return Pair(models[0], models[1], tokenizer, meta), texts, record


def lowered(model: Any, dtype: torch.dtype) -> Any:
    """Lower a model to `dtype` for inference; buffers (rotary frequencies) stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()
