"""What a search found: the document an engine reads, and the evidence for it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.batch import BatchPolicy
from policies.core import DraftPolicy
from simulator.tune.formats import CHECKS, check_settings
from traces.errors import FileError

ENGINES = tuple(CHECKS)

TUNE_COLUMNS = (
    "engine", "batch", "context", "setting", "throughput_tok_s", "default", "gain", "gain_lo",
    "gain_hi", "within_slo", "outside", "held_out", "served_gain", "scaled",
    "warnings",
)  # fmt: skip
"""Columns of `Tuned.rows`: tokens per second of decoding over the whole batch (SGLang's, which
are served, include prompts); the gain is a ratio to
the default, with its bootstrap interval over prompts; ``outside`` is the share of passes
read outside the measured cells, ``held_out`` whether the gain is one of prompts that the
choice was not made on; ``served_gain`` is the rate of the whole of vLLM's table, served at that
batch, over that of the best fixed K there (None for other engines); ``scaled`` says that the
latencies were carried over from another device."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """Settings for an engine.

    Attributes
    ----------
    engine:
        One of `ENGINES`.
    document:
        What the engine reads; it has passed `check_settings`.
    policy:
        The same decisions as a policy, for replay and `serve`.
    rows:
        One record per batch and context searched (columns `TUNE_COLUMNS`).
    warnings:
        Where the evidence is thin, in words.
    longest:
        Longest draft of `policy`, where that does not name it.
    """

    engine: str
    document: Mapping[str, Any]
    policy: DraftPolicy | BatchPolicy
    rows: Sequence[Mapping[str, Any]]
    warnings: Sequence[str] = field(default_factory=tuple)
    longest: int | None = None

    def __post_init__(self) -> None:
        check_settings(self.engine, self.document)


def write_settings(tuned: Tuned, path: str | os.PathLike[str]) -> None:
    """Write the document as JSON: whole, or not at all.

    Raises
    ------
    SettingsError
        If the engine would refuse it.
    FileError
        If the file cannot be written.
    """
    check_settings(tuned.engine, tuned.document)
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_laid_out(tuned.document) + "\n")
        # mkstemp makes files private; a configuration is read by another user's server.
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise FileError(f"cannot write {target}: {error.strerror}") from None


def _laid_out(document: Mapping[str, Any]) -> str:
    """JSON with a line per key and per row of a table, as people write these files."""
    lines = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], list):
            text = "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"
