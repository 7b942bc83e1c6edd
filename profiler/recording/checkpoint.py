"""Finished pieces of a long run, kept so that a stopped run goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from policies.json_text import parse_json
from traces.errors import DraftsimError

Arrays = dict[str, "np.ndarray[Any, Any]"]


class Checkpoint:
    """A folder of named arrays, valid for one set of settings.

    Raises DraftsimError if the folder holds pieces of a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        stamp = json.dumps(settings, sort_keys=True, default=str)
        marker = folder / "settings.json"
        if marker.exists() and marker.read_text() != stamp:
            raise DraftsimError(
                f"{folder} holds a stopped run with other settings: repeat it with the same "
                "options, or remove the folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _write(marker, stamp.encode())

    def names(self) -> list[str]:
        """What is kept, in alphabetical order."""
        return sorted(path.name.removesuffix(".npz") for path in self.folder.glob("*.npz"))

    def get(self, name: str) -> Arrays | None:
        """The arrays kept under `name`, or None."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as kept:
            return {key: kept[key] for key in kept.files}

    def put(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Keep `arrays` under `name`; all of them or, if interrupted, none."""
        path = self.folder / f"{name}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(part, path)

    def get_json(self, name: str) -> Any:
        """The value kept under `name` by `put_json`, or None."""
        kept = self.get(name)
        return None if kept is None else parse_json(kept["json"].tobytes())

    def put_json(self, name: str, value: Any) -> None:
        """Keep `value`, of what JSON has words for and numpy's numbers, as `put` does."""
        text = json.dumps(value, default=methodcaller("item"))
        self.put(name, {"json": np.frombuffer(text.encode(), np.uint8)})

    def within(self, name: str) -> Checkpoint:
        """A checkpoint of other pieces of the same run, gone with this one."""
        return Checkpoint(self.folder / name, {})

    def close(self) -> None:
        """Drop all pieces: the run's result is written."""
        shutil.rmtree(self.folder)


def once(kept: Checkpoint | None, name: str, make: Callable[[], Any]) -> Any:
    """What `kept` holds under `name` (`Checkpoint.get_json`), else what `make` gives, then kept."""
    found = None if kept is None else kept.get_json(name)
    if found is None:
        found = make()
        if kept is not None:
            kept.put_json(name, found)
    return found


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
