"""Small recordings of other draft sources drawn at random, of every shape a replay can meet."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.outputs import trace_of
from traces.acceptance.trace import Trace
from traces.sources.exit_recording import ExitRecording, ExitSetting
from traces.sources.recording import LOGITS, Recordings
from traces.sources.starts.sources import StartRecording
from traces.sources.starts.trees import TREE_SIGNALS, TreeRecording

EOS = 0
VOCABULARY = 5
LAYERS = 7
OMEGAS = (0.0, 0.3)
OFFSETS = 3


def random_outputs(seed: int, limit: int = 24) -> Trace:
    """Prompts and outputs over a small vocabulary, some of which end with EOS."""
    rng = np.random.default_rng(seed)
    prompts, outputs = [], []
    for _ in range(4):
        prompts.append(rng.integers(1, VOCABULARY, rng.integers(1, 9)).tolist())
        tokens = limit if rng.random() < 0.5 else int(rng.integers(1, limit))
        output = rng.integers(1, VOCABULARY, tokens).tolist()
        if tokens < limit:
            output[-1] = EOS
        outputs.append(output)
    return trace_of(outputs, limit, prompts, [EOS])


def _signals(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Any]:
    top2 = rng.normal(size=shape)
    top1 = top2 + rng.exponential(2.0, shape)
    rest = np.logaddexp(top1, top2) + rng.exponential(0.3, shape)
    values = (top1, top2, rest, rng.exponential(1.5, shape))
    return {n: v.astype(np.float32) for n, v in zip(LOGITS, values, strict=True)}


def random_exits(
    trace: Trace, seed: int, exits: tuple[int, ...], gamma_max: int, missing: float
) -> ExitRecording:
    """Return exits' predictions along the outputs and after wrong exits; some are missing."""
    rng = np.random.default_rng(seed)
    right = float(rng.random())
    true = np.asarray(trace.columns["token"])
    nodes: list[tuple[int, int, int, int]] = []
    starts = trace.request_starts
    for i, one in enumerate(trace.requests):
        nodes += [(i, -1, t, 0) for t in range(one.tokens)]
    argmax = [
        [int(t) if rng.random() < right else int(rng.integers(0, VOCABULARY)) for _ in exits]
        for t in true
    ]
    newest = [(node, {t for t in argmax[node] if t != true[node]}) for node in range(len(true))]
    for _ in range(gamma_max - 1):
        grown = []
        for parent, wrong in newest:
            request, _, position, _ = nodes[parent]
            for token in sorted(wrong - {EOS}):
                if rng.random() < missing:
                    continue
                drafted = rng.integers(0, VOCABULARY, len(exits)).tolist()
                grown.append((len(nodes), set(drafted)))
                nodes.append((request, parent, position + 1, token))
                argmax.append(drafted)
        newest = grown
    columns = zip(("request", "parent", "position", "token"), np.array(nodes).T, strict=True)
    shape = (len(nodes), len(exits))
    log_confidence = np.log(rng.random((*shape, len(OMEGAS))))
    arrays = {
        **{name: values.astype(np.int32) for name, values in columns},
        "argmax": np.array(argmax, np.int32),
        "log_confidence": log_confidence.astype(np.float32), **_signals(rng, shape),
    }  # fmt: skip
    settings = (ExitSetting(0.5, 0.3, 0.5, None, gamma_max),)
    return ExitRecording(arrays, tuple(int(s) for s in starts), {}, exits, LAYERS, OMEGAS, settings)


def random_starts(trace: Trace, seed: int, meta: dict[str, Any]) -> StartRecording:
    """Chains of `OFFSETS` tokens from every start, some cut by EOS."""
    rng = np.random.default_rng(seed)
    right = float(rng.random())
    true, shape = np.asarray(trace.columns["token"]), (len(trace.columns["token"]), OFFSETS)
    ahead = np.minimum(np.arange(len(true))[:, None] + np.arange(OFFSETS), len(true) - 1)
    drafted = np.where(rng.random(shape) < right, true[ahead], rng.integers(0, VOCABULARY, shape))
    over = np.cumsum(drafted == EOS, axis=1) - (drafted == EOS) > 0
    token = np.where(over, -1, drafted).astype(np.int32)
    starts = tuple(int(s) for s in trace.request_starts)
    rank = np.zeros(shape, np.int32)
    return StartRecording({"token": token, "rank": rank, **_signals(rng, shape)}, starts, meta)


def random_trees(trace: Trace, seed: int) -> TreeRecording:
    """Ranks of true tokens in trees of `OFFSETS` layers; below a missing one there is none."""
    rng = np.random.default_rng(seed)
    count = len(trace.columns["token"])
    rank = rng.integers(0, 12, (count, OFFSETS, OFFSETS)).cumsum(axis=1).astype(np.int32)
    there = np.minimum.accumulate(rng.random(rank.shape) < 0.8, axis=1)
    rank[~(there & np.triu(np.ones((OFFSETS, OFFSETS), bool)))] = -1
    signals = {
        # Logarithms of probabilities, but for the entropy.
        name: (rng.exponential(1.0, (count, OFFSETS)) * (1 if name == "entropy" else -1)).astype(
            "f4"
        )
        for name in TREE_SIGNALS
    }
    starts = tuple(int(s) for s in trace.request_starts)
    rank = rank[:, *np.triu_indices(OFFSETS)]
    return TreeRecording({"rank": rank, **signals}, starts, {"topk": 3})


def random_recordings(
    trace: Trace, seed: int, gamma_max: int = 5, missing: float = 0.02, *, exits: bool = True
) -> Recordings:
    """Return recordings of all sources that are recorded, or of all but early exit."""
    heads = {
        n: random_starts(trace, seed + i, {})
        for n, i in (("medusa", 0), ("space", 1), ("hydra", 9))
    }
    skipping = random_starts(trace, seed + 2, {"layers": 4, "skip": [2]})
    drafter = {"kind": "eagle", "modules": 1, "model": "eagle"}
    several = {"kind": "mtp", "modules": OFFSETS, "model": "mtp"}
    parallel = {"kind": "p-eagle", "modules": 1, "model": "one"}
    starts = {
        **heads, "layer-skip": skipping, "eagle.eagle": random_starts(trace, seed + 3, drafter),
        "eagle.mtp": random_starts(trace, seed + 4, several),
        "parallel.one": random_starts(trace, seed + 8, parallel),
    }  # fmt: skip
    early = {
        "early-exit": random_exits(trace, seed + 5, (2, 4), gamma_max, missing),
        "kangaroo": random_exits(trace, seed + 6, (2,), gamma_max, missing),
    }
    return {**(early if exits else {}), **starts, "eagle2.eagle": random_trees(trace, seed + 7)}
