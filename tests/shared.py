"""Folders shared by all workers of one test run, each filled by the first that asks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

SHARED = "DRAFTSIM_TESTS"
"""Environment variable with the run's folder, set before its first test."""


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name`, which `make` fills: once for all workers that share the tests."""
    from filelock import FileLock

    base = Path(os.environ[SHARED])
    folder, made = base / name, base / f"{name}.made"
    with FileLock(base / f"{name}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
