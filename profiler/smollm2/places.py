"""Where the model and its drafters are on a user's machine, and what they are called."""

from __future__ import annotations

import os
from pathlib import Path

from traces.errors import DraftsimError

NAME = "smollm2"
DRAFTERS = ("draft", "eagle", "eagle3")
NAMES = (NAME, *(f"{NAME}-{drafter}" for drafter in DRAFTERS))
"""The target, and its drafters."""
STORED = Path(__file__).parent / "weights"
"""The drafters' weights as the project holds them (see `profiler.smollm2.drafters`)."""
HEADS = "heads"
"""Folder of exit heads and parallel heads in STORED."""


def cache() -> Path:
    """``$DRAFTSIM_CACHE``, or draftsim's folder in the user's cache (XDG)."""
    if given := os.environ.get("DRAFTSIM_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftsim"


def folder(name: str) -> Path:
    """The Hugging Face folder of one of NAMES, there or not."""
    return cache() / NAME / (name.removeprefix(NAME).lstrip("-") or "target")


def fetched(name: str) -> Path:
    """The folder of one of NAMES; DraftsimError if it is not there."""
    path = folder(name)
    if not (path / "config.json").is_file():
        raise DraftsimError(f"{name} is not at {path}: bring it with `draftsim fetch {NAME}`")
    return path
