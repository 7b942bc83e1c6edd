"""A run folder while it is written: whose it is, who writes it, and what it already holds."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler.recording.run import NAME, RunInfo, read_run, write_run
from traces.errors import DraftsimError
from traces.store.lock import locked

LOCK = ".lock"
RECORDINGS = (
    "trace.parquet", "sampled.parquet", "latency.parquet", "latency-check.parquet",
    "measured*.parquet", "exits*.parquet", "*starts-*.parquet", "trees-*.parquet", "rounds",
    "exit_heads", ".trace", ".sampled", ".latency", ".validate-*",
    ".validated-*",
)  # fmt: skip
"""Files that a run leaves in its folder."""
DONE_WITH = "recorded_with"
"""Field of a recording's provenance: a digest of the options it was made under."""


@contextmanager
def only_writer(folder: Path, remedy: str = "name another") -> Iterator[None]:
    """Hold the folder against other writers (see `traces.store.lock`); made if it is not there.

    Raises
    ------
    DraftsimError
        If another process writes there (naming it), or the folder cannot be written to (with
        the `remedy`).
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise DraftsimError(f"{folder}: cannot be written to ({reason}): {remedy}") from None
    try:
        with locked(folder / LOCK, folder, remedy):
            yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # nothing came of it


def claimed(info: RunInfo, folder: Path, force: bool = False) -> RunInfo:
    """`info` with the identity of the run that `folder` holds, or a new one.

    Nothing is written.  With `force` what the folder holds does not matter.

    Raises
    ------
    DraftsimError
        If it holds another pair's run, or one of another device or dtype.
    """
    if force or not (folder / NAME).is_file():
        return replace(info, run_id=uuid.uuid4().hex[:16])
    held = read_run(folder)
    if held != info:
        raise DraftsimError(
            f"{folder} holds the run of another pair, device or dtype: name another --out, or "
            "--force to record over it"
        )
    return replace(info, run_id=held.run_id)


def begin(info: RunInfo, folder: Path, force: bool = False) -> None:
    """Write what the folder is of; with `force` its recordings are removed first."""
    if force:
        for pattern in RECORDINGS:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_run(info, folder)


def digest_of(options: Mapping[str, Any]) -> str:
    """A short digest of the options a recording is made under."""
    text = json.dumps(options, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_done(path: Path, meta: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return True if the recording at `path`, with provenance `meta`, was made with `options`.

    Raises
    ------
    DraftsimError
        If it was made with other options, which a run would overwrite.
    """
    if meta.get(DONE_WITH) == digest_of(options):
        return True
    raise DraftsimError(
        f"{path} was recorded with other options or prompts: repeat the same, name another --out, "
        "or --force to record over it"
    )
