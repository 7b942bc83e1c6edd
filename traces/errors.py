"""Errors a person can act on: every message says what, where and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec

from policies.errors import DraftsimError as DraftsimError  # noqa: PLC0414

EXTRAS = {
    "profile": ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
    "smollm2": ("gguf", "accelerate"),
    "cluster": ("dask", "distributed"),
    "quality": ("sacrebleu",),
}
"""Packages that draftsim can do without, by the extra that installs them."""


def missing(packages: Sequence[str], what: str) -> DraftsimError:
    """Return the error that `what` needs packages that are not installed, with their extra."""
    extras = [extra for extra, names in EXTRAS.items() if set(names) & set(packages)]
    return DraftsimError(
        f"{what} needs {' and '.join(packages)}, not installed here: run "
        f"`pip install '.[{','.join(extras)}]'` in draftsim's folder"
    )


def missing_for(error: Exception) -> list[str]:
    """Return the optional packages whose absence `error` may come from; none for other errors."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and any(name in names for names in EXTRAS.values()):
        return [name]
    # Without one that they need, torch and transformers are imported and fail later, in many ways.
    if isinstance(error, ImportError) or "transformers" in sys.modules:
        return [package for package in EXTRAS["profile"] if find_spec(package) is None]
    return []


def nearest(name: str, names: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the hint of a message about an unknown name; empty if none of `names` is near."""
    close = get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


class FileError(DraftsimError):
    """A file that is missing, truncated, corrupted, of another schema or inconsistent."""


class TailError(DraftsimError):
    """A policy drafted past what the trace recorded off the path."""


class SignalError(DraftsimError):
    """A policy or rule reads a signal that the trace does not hold."""
