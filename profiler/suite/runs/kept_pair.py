"""A trained pair kept with a stage's unfinished work, so that a stopped stage trains once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from profiler.models.loading import Pair, load_pair
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import model_path
from profiler.suite.environment import Workplace
from profiler.suite.runs.training import train_pair
from traces.errors import DraftsimError
from traces.store.text import read_object


def trained_pair(
    place: Workplace, folder: Path, seconds: float
) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """The pair in `folder`, or one trained now for `seconds` and kept there.

    Returns the pair, the held-out prompts and the record of its training.
    """
    transformers.utils.logging.disable_progress_bar()  # it would run through our lines
    if (folder / "about.json").is_file():
        place.say("the pair was trained before the stage was stopped")
        return _read(place, folder)
    pair, prompts, record = train_pair(place, seconds)
    _write(folder, pair, prompts, record)
    return pair, prompts, record


def given_pair(
    place: Workplace, target: str, draft: str | None, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """Return a user's pair, by folder or name, a limited number of prompts, and an empty record.

    Raises DraftsimError if draft or prompts are not named, or one cannot be loaded.
    """
    if draft is None or prompts is None:
        raise DraftsimError("--target also takes --draft and --prompts: name all three")
    paths = model_path(target, "target"), model_path(draft, "draft")
    dtype = str(place.dtype).removeprefix("torch.")
    pair = load_pair(*paths, device=str(place.device), dtype=dtype)
    return pair, read_prompts(prompts, most), {}


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
