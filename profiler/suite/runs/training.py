"""The pair of stage ``trained``, trained or given, and its recordings.

A trained pair is kept with its stage's unfinished work, so that a stopped stage trains once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import transformers

from profiler.models.graphs import GraphRunner
from profiler.models.loading import Pair, load_pair
from profiler.profile import Settings, recorded_trace
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import model_path
from profiler.recording.trace import slots_needed
from profiler.suite.environment import Workplace
from profiler.train.minutes import Trained, train_pair
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.files import write_trace
from traces.store.text import read_object

PROMPTS = 210
"""Prompts to record, a few more than a recording needs (`ENOUGH`)."""
QUICK_PROMPTS = 4
"""Likewise, in miniatures."""


def trained_pair(place: Workplace, folder: Path, seconds: float) -> Trained:
    """Return the pair in `folder`, or one trained now for `seconds` and kept there."""
    transformers.utils.logging.disable_progress_bar()  # it would run through our lines
    if (folder / "about.json").is_file():
        place.say("the pair was trained before the stage was stopped")
        return _read(place, folder)
    most = QUICK_PROMPTS if place.quick else PROMPTS
    pair, prompts, record = train_pair(
        seconds, place.device, place.dtype, place.say, prompts=most, quick=place.quick
    )
    pair = replace(pair, meta={**pair.meta, **place.meta()})
    _write(folder, pair, prompts, record)
    return pair, prompts, record


def _write(folder: Path, pair: Pair, prompts: Sequence[Prompt], record: dict[str, Any]) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(part / name)
        pair.tokenizer.save_pretrained(part / name)
    about = {"meta": pair.meta, "prompts": [asdict(p) for p in prompts], "record": record}
    (part / "about.json").write_text(json.dumps(about))
    os.replace(part, folder)


def _read(place: Workplace, folder: Path) -> Trained:
    about = read_object(folder / "about.json")
    pair = replace(_load(place, folder / "target", folder / "draft"), meta=about["meta"])
    return pair, [Prompt(**prompt) for prompt in about["prompts"]], about["record"]


def _load(place: Workplace, target: str | Path, draft: str | Path) -> Pair:
    dtype = str(place.dtype).removeprefix("torch.")
    return load_pair(target, draft, device=str(place.device), dtype=dtype)


def given_pair(
    place: Workplace, target: str, draft: str | None, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt]]:
    """Return a user's pair, by folder or name, and a limited number of prompts.

    Raises DraftsimError if draft or prompts are not named, or one cannot be loaded.
    """
    if draft is None or prompts is None:
        raise DraftsimError("--target also takes --draft and --prompts: name all three")
    pair = _load(place, model_path(target, "target"), model_path(draft, "draft"))
    return pair, read_prompts(prompts, most)


LARGEST = 16 * 10**6
"""Bytes of the largest file a stage may leave."""
ENOUGH = 200
"""Fewest prompts of a finished recording."""


def record_trace(
    place: Workplace, pair: Pair, prompts: Sequence[Prompt], settings: Settings, until: float
) -> Trace:
    """Record as many prompts as are done by `until` (monotonic seconds), four at least.

    The target decodes through captured passes; tails run eagerly under their tree masks.
    Prompts recorded before the stage was stopped are read back.
    """
    encoded = [pair.encode(p.text, settings.chat) for p in prompts]
    longest = max(len(ids) for ids in encoded)
    slots = slots_needed(longest, settings.max_new_tokens, settings.max_gamma)
    runners = GraphRunner(pair.target, slots), GraphRunner(pair.draft, slots)
    # Of other weights' outputs nothing may be taken over.
    weights = [pair.meta[role]["fingerprint"] for role in ("target", "draft")]
    kept = Checkpoint(
        place.work / f"trained-trace-{settings.sampling.temperature:g}",
        {"settings": settings, "pair": weights},
    )
    trace = recorded_trace(pair, runners, prompts, encoded, settings, kept, until=until)
    done = len(trace.requests)
    place.say(f"recorded {done} of {len(prompts)} prompts, {settings.sampling.label}")
    return trace


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
