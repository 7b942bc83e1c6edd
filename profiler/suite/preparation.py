"""Training data of a pair: the Python sources of this machine, as tokens, and prompts."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pandas
import scipy
import torch
import transformers
from torch import Tensor

from profiler.prompts import Prompt
from profiler.suite.environment import Workplace
from profiler.train.documents import CATEGORIES, Document, load_documents, stable_hash
from profiler.train.pair import train_tokenizer
from profiler.train.pair_prompts import cut_prompt

SAMPLE = 5
"""One document in this many is enough for the tokenizer's merges."""
CHUNK = 1024
"""Documents encoded at a time, in parallel where there are cores."""
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
    """A tokenizer (`profiler.train.pair.train_tokenizer`) from some of the documents."""
    ordered = sorted(documents, key=lambda d: stable_hash(d.text))
    return train_tokenizer(ordered if quick else ordered[::SAMPLE])


def token_line(documents: Sequence[Document], tokenizer: Any) -> Tensor:
    """The documents as one line of token ids, int64, in a shuffled order, an EOS after each.

    As `profiler.train.pair.Stream` lays them out, without the lists that come with a batch.
    """
    texts = sorted((document.text for document in documents), key=stable_hash)
    backend = tokenizer.backend_tokenizer
    parts = [
        numpy.array([*encoding.ids, tokenizer.eos_token_id], dtype=numpy.int64)
        for at in range(0, len(texts), CHUNK)
        for encoding in backend.encode_batch_fast(texts[at : at + CHUNK], add_special_tokens=False)
    ]
    return torch.from_numpy(numpy.concatenate(parts))


def held_out_prompts(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Any, count: int
) -> list[Prompt]:
    """At most `count` beginnings of held-out documents, in turn from each category.

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
