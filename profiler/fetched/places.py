"""Where fetched models and their drafters are on a user's machine, and what they are called."""

from __future__ import annotations

import os
from pathlib import Path

from profiler.fetched.models import SETS
from traces.errors import DraftsimError

NAMES = {name: known for known in SETS.values() for name in known.names}
"""The set that each name of a model or drafter belongs to."""


def cache() -> Path:
    """``$DRAFTSIM_CACHE``, or draftsim's folder in the user's cache (XDG)."""
    if given := os.environ.get("DRAFTSIM_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftsim"


def folder(name: str) -> Path:
    """The Hugging Face folder of one of NAMES, there or not."""
    known = NAMES[name]
    return cache() / known.name / (name.removeprefix(known.name).lstrip("-") or "target")


def fetched(name: str) -> Path:
    """The folder of one of NAMES; DraftsimError if it is not there."""
    path = folder(name)
    if not (path / "config.json").is_file():
        raise DraftsimError(
            f"{name} is not at {path}: bring it with `draftsim fetch {NAMES[name].name}`"
        )
    return path


def name_in_role(name: str, role: str) -> str:
    """The model that `name` means as target or draft: a set's name is also its draft's.

    >>> name_in_role("qwen-coder", "draft")
    'qwen-coder-draft'
    """
    return f"{name}-draft" if name in SETS and role == "draft" else name
