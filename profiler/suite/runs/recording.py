"""Records the trained pair: greedy and sampled traces, and what its early exits say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.models.graphs import GraphRunner
from profiler.models.loading import Pair
from profiler.models.stack import LayerRunner
from profiler.profile import Settings, assemble, recorded_columns
from profiler.prompts import Prompt
from profiler.recording.checkpoint import Checkpoint
from profiler.recording.trace import Recorder
from profiler.sources.exit_record import ExitRecorder, record_exits
from profiler.suite.environment import Workplace
from profiler.train.heads import default_exit_layers, train_exit_heads
from traces.acceptance.trace import Trace
from traces.sources.exits.early_exit import EarlyExit
from traces.sources.files import write_exits
from traces.store.files import write_trace

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
    recorder = ExitRecorder(runner, heads, [setting], eos=pair.eos)
    per_request, count = 0.0, 2
    while True:
        at = time.monotonic()
        some = trace.select(range(min(count, len(trace.requests))))
        recording = record_exits(recorder, some)
        write_exits(recording, path)
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
        write_exits(record_exits(recorder, some), path)
    return {
        "layers": layers, "requests": len(some.requests), "seconds": time.monotonic() - begin,
    }  # fmt: skip
