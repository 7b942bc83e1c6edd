"""Outputs of a target alone, as the tests of other draft sources replay them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from tests.shared import made_once
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Request, Trace

if TYPE_CHECKING:
    from profiler.models.loading import Pair
    from profiler.models.stack import LayerRunner

LIMIT = 24
"""Tokens of an output of the bundled target."""


def greedy(target: Any, prompt: Any, limit: int, eos: frozenset[int]) -> list[int]:
    """The target's own greedy output, one token at a time: the reference."""
    output: list[int] = []
    feed, start = target.begin(prompt), 0
    while len(output) < limit and not (output and output[-1] in eos):
        logits = target.forward(feed, start, keep=1)
        start += feed.shape[0]
        feed = logits.argmax(-1)
        output.append(int(feed))
    return output


def trace_of(
    outputs: Sequence[Sequence[int]],
    limit: int,
    prompts: Sequence[Sequence[int]] | None = None,
    eos: Sequence[int] = (),
) -> Trace:
    """A trace of prompts and outputs alone; a prompt is one token unless given."""
    lengths = [len(o) for o in outputs]
    columns = {
        "request": np.repeat(np.arange(len(outputs)), lengths),
        "position": np.concatenate([np.arange(n) for n in lengths]),
        "offset": np.zeros(sum(lengths), int),
        "match": np.zeros(sum(lengths), int),
        "token": np.concatenate(outputs),
    }
    prompts = prompts or [(1,)] * len(outputs)
    requests = [
        Request(str(i), "all", len(prompts[i]), n, limit,
                "eos" if outputs[i][-1] in eos else "length", tuple(prompts[i]))
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return Trace(columns, requests, None, {"eos_token_ids": list(eos)})


def drawn_trace(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    limit: int,
    eos: int,
) -> Trace:
    """As `trace_of`, of outputs drawn from the target `model`: a token of each at a time."""
    import torch

    from profiler.models.sampling import draw, probs

    generator = torch.Generator().manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in prompts]
    growing = list(range(len(prompts)))
    while growing:
        texts = [[*prompts[i], *outputs[i]] for i in growing]
        longest = max(map(len, texts))
        with torch.inference_mode():  # no token sees the padding after it
            rows = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
            logits = model(input_ids=rows).logits
        ends = logits[range(len(texts)), [len(text) - 1 for text in texts]]
        drawn = draw(probs(ends, sampling), generator).tolist()
        for i, token in zip(growing, drawn, strict=True):
            outputs[i].append(token)
        growing = [i for i in growing if len(outputs[i]) < limit and eos not in outputs[i]]
    trace = trace_of(outputs, limit, prompts, [eos])
    return Trace(trace.columns, trace.requests, None, {**trace.meta, "sampling": sampling.meta})


class Decoded(NamedTuple):
    """The bundled pair, its target layer by layer, and what that said to `prompts`."""

    pair: Pair
    target: LayerRunner
    prompts: list[Any]
    outputs: list[list[int]]
    trace: Trace


@cache
def decoded(slots: int, count: int = 4) -> Decoded:
    """The first `count` bundled prompts, decoded greedily with a cache of `slots` tokens."""
    pytest.importorskip("torch")
    from profiler.models.stack import LayerRunner
    from profiler.prompts import read_prompts
    from profiler.recording.run import BUNDLED
    from tests import bundled

    pair = bundled.whole()
    prompts = [pair.encode(p.text) for p in read_prompts(BUNDLED / "prompts.jsonl")[:count]]
    target = LayerRunner(pair.target, slots)

    def make(folder: Path) -> None:
        said = [greedy(target, ids, LIMIT, pair.eos) for ids in prompts]
        (folder / "outputs.json").write_text(json.dumps(said), encoding="utf-8")

    outputs = json.loads((made_once(f"outputs-{count}", make) / "outputs.json").read_text())
    trace = trace_of(outputs, LIMIT, [ids.tolist() for ids in prompts], sorted(pair.eos))
    return Decoded(pair, target, prompts, outputs, trace)
