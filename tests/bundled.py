"""The bundled pair, loaded once per test session, its first layers, and what they record.

Tests of rounds, files and commands decode with the first layers: their text is like that of the
whole target, is accepted about as often, and a pass takes a third of its time.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch

from profiler.models.loading import Pair, load_pair
from profiler.models.runner import Runner
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import BUNDLED
from profiler.recording.trace import Recorder
from tests.shared import made_once
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Request, Trace
from traces.store.files import read_trace, write_trace

MAX_NEW = 24
MAX_GAMMA = 24
SLOTS = 1500
LAYERS = 2
"""Layers of the shortened target, of the whole one's eight."""


@cache
def whole() -> Pair:
    """The pair that comes with the project, which its heads were trained for."""
    torch.set_num_threads(1)
    return load_pair(BUNDLED / "target", BUNDLED / "draft")


def folder() -> Path:
    """Where ``target`` and ``draft`` of the shortened pair lie."""

    def make(folder: Path) -> None:
        shutil.copytree(BUNDLED / "draft", folder / "draft")
        shutil.copytree(BUNDLED / "target", folder / "target")
        target = load_pair(BUNDLED / "target", BUNDLED / "draft").target
        target.model.layers = target.model.layers[:LAYERS]
        target.config.num_hidden_layers = LAYERS
        target.save_pretrained(folder / "target")

    return made_once(f"bundled-{LAYERS}", make)


def named() -> tuple[str, ...]:
    """The options of commands that name it."""
    models = folder()
    return "--target", str(models / "target"), "--draft", str(models / "draft")


@cache
def pair() -> Pair:
    """The draft model and the first layers of the target."""
    torch.set_num_threads(1)
    return load_pair(folder() / "target", folder() / "draft")


@cache
def runners() -> tuple[Runner, Runner]:
    return Runner(pair().target, SLOTS), Runner(pair().draft, SLOTS)


@cache
def prompts(count: int = 6) -> list[Prompt]:
    return read_prompts(BUNDLED / "prompts.jsonl", count)


@cache
def record(
    count: int,
    sampling: Sampling = GREEDY,
    max_new: int = MAX_NEW,
    *,
    eos: bool = True,
    seed: int = 0,
) -> Trace:
    """A trace of the first prompts of each category, recorded by the real recorder: once."""
    sampled = f"{sampling.temperature:g}-{sampling.top_p:g}-{seed}"
    name = f"recorded-{count}-{max_new}-{sampled}{'' if eos else '-on'}"

    def make(folder: Path) -> None:
        trace = _recorded(count, sampling, max_new, eos=eos, seed=seed)
        write_trace(trace, folder / "trace.parquet")

    return read_trace(made_once(name, make) / "trace.parquet")


def _recorded(count: int, sampling: Sampling, max_new: int, *, eos: bool, seed: int) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    stop = pair().eos if eos else frozenset[int]()
    recorder = Recorder(
        *runners(), max_new_tokens=max_new, max_gamma=MAX_GAMMA, eos=stop,
        sampling=sampling, generator=generator,
    )  # fmt: skip
    columns, requests = [], []
    for i, prompt in enumerate(prompts(count)):
        ids = pair().encode(prompt.text)
        part = recorder.record(ids)
        part["request"] = np.full(len(part["match"]), i, dtype=np.int32)
        output = part["token"][part["offset"] == 0]
        columns.append(part)
        requests.append(
            Request(
                prompt.id, prompt.category, len(ids), len(output), max_new,
                "eos" if int(output[-1]) in stop else "length", tuple(ids.tolist()),
            )
        )  # fmt: skip
    merged = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    meta = {"eos_token_ids": sorted(stop), "sampling": sampling.meta}
    return Trace(merged, requests, MAX_GAMMA, meta)


greedy_trace = cache(lambda: record(6))
"""Greedy recording of six prompts, shared by the tests that only read it."""
