"""Two tiny random models that disagree now and then, prompts, and their recording."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers

from policies import DraftPolicy, Round
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from profiler.recording.trace import Recorder
from traces.acceptance.trace import Request, Trace
from traces.replay.run import replay

VOCAB, NEW, GAMMA = 61, 24, 8
LENGTHS = (5, 17, 1, 9, 30, 3, 12, 2, 21)
SLOTS = max(LENGTHS) + NEW
END = frozenset({7, 11})


def llama(layers: int, seed: int) -> Any:
    """A random model, sharp enough that argmaxes are no near ties."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=sorted(END),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.eval()


@cache
def pair() -> Pair:
    """A target, and a draft that is the same model slightly disturbed."""
    torch.set_num_threads(1)
    target, draft = llama(2, 1), llama(2, 1)
    torch.manual_seed(3)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(0.12 * weights.std(unbiased=False) * torch.randn_like(weights))
    return Pair(target, draft, None, {})


@cache
def prompts() -> list[Any]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=rng) for n in LENGTHS]


@cache
def trace() -> Trace:
    """The recording of `prompts`, greedy."""
    slots = max(LENGTHS) + NEW * (GAMMA + 1)
    recorder = Recorder(
        Runner(pair().target, slots), Runner(pair().draft, slots), max_new_tokens=NEW,
        max_gamma=GAMMA, eos=END,
    )  # fmt: skip
    parts, requests = [], []
    for i, prompt in enumerate(prompts()):
        columns = recorder.record(prompt)
        tokens = columns["token"][columns["offset"] == 0]
        columns["request"] = np.full(len(columns["token"]), i, dtype=np.int32)
        ended = "eos" if int(tokens[-1]) in END else "length"
        requests.append(
            Request(str(i), "random", len(prompt), len(tokens), NEW, ended, tuple(prompt.tolist()))
        )
        parts.append(columns)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    meta = {"sampling": {"temperature": 0.0}, "eos_token_ids": sorted(END)}
    return Trace(columns, requests, GAMMA, meta)


def runners(batch: int, models: Pair | None = None) -> tuple[Runner, Runner]:
    """Both models of `pair` unless others are given, with caches of `batch` slots."""
    models = models or pair()
    return Runner(models.target, SLOTS, batch), Runner(models.draft, SLOTS, batch)


def run_lengths(trace: Trace) -> list[list[int]]:
    starts = trace.request_starts
    return [trace.run_lengths[a:b].tolist() for a, b in pairwise(starts)]


def replayed(trace: Trace, policy: DraftPolicy) -> list[list[Round]]:
    rounds = replay(trace, policy).rounds
    return [
        [
            Round(*(int(row[name]) for name in Round._fields))
            for row in rounds[rounds["request"] == i]
        ]
        for i in range(len(trace.requests))
    ]
