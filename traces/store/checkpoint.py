"""Checkpoints: finished parts of a long run, from which a stopped run continues."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from policies.json_text import parse_json
from traces.aliases import Columns, Say
from traces.errors import DraftsimError
from traces.store.writing import make_folder, write_atomically

_SEAL = 64
"""Bytes of a part's digest, which is in its archive's comment."""
_NO_COMMENT, _COMMENT = (0).to_bytes(2, "little"), _SEAL.to_bytes(2, "little")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Checkpoint:
    """A folder of named arrays, valid for one set of settings.

    Each part carries a digest of its content, its name and the settings.  A part that does not
    match it (damaged, or moved from another run or name) counts as missing and is made again, with
    a remark to `say`.

    Raises DraftsimError if the folder cannot be made, or holds parts of a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], say: Say = _print) -> None:
        self.folder, self._say = folder, say
        self._stamp = json.dumps(settings, sort_keys=True, default=str)
        marker = folder / "settings.json"
        content = f"{self._stamp}\n{_digest(self._stamp.encode())}\n".encode()
        if marker.exists() and (kept := marker.read_bytes()) != content:
            if _is_marker(kept):
                raise DraftsimError(
                    f"{folder} holds a stopped run with other settings: repeat it with the same "
                    "options, or remove the folder"
                )
            # What the settings were, every part tells by itself.
            say(f"{marker} is damaged: it is written again")
        make_folder(folder, "parts of the run are kept there, so choose another place for it")
        write_atomically(marker, content)

    def names(self) -> list[str]:
        """Return the names of what is kept, in alphabetical order."""
        return sorted(path.name.removesuffix(".npz") for path in self.folder.glob("*.npz"))

    def get(self, name: str, of: str = "") -> Columns | None:
        """Return the arrays kept under `name` with this `of`, or None."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            return None
        kept = path.read_bytes() if path.is_file() else b""
        content = kept[: -_SEAL - len(_COMMENT)] + _NO_COMMENT
        if kept != self._sealed(name, of, content):
            self._say(f"{path} is damaged, or of another run: its part is repeated")
            return None
        with np.load(io.BytesIO(content)) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def put(self, name: str, arrays: Mapping[str, Any], of: str = "") -> None:
        """Keep all `arrays` under `name`, or none; ``of``: what they were made from."""
        file = io.BytesIO()
        np.savez(file, **arrays)
        write_atomically(self.folder / f"{name}.npz", self._sealed(name, of, file.getvalue()))

    def _sealed(self, name: str, of: str, content: bytes) -> bytes:
        """Return an archive without a comment, with the digest as its comment."""
        digest = _digest(self._stamp.encode(), name.encode(), of.encode(), content)
        return content[: -len(_COMMENT)] + _COMMENT + digest.encode()

    def get_json(self, name: str) -> Any:
        """Return the value kept under `name` by `put_json`, or None."""
        kept = self.get(name)
        return None if kept is None else parse_json(kept["json"].tobytes())

    def put_json(self, name: str, value: Any) -> None:
        """Keep `value`, which has JSON's types and numpy's numbers, as `put` does."""
        text = json.dumps(value, default=methodcaller("item"))
        self.put(name, {"json": np.frombuffer(text.encode(), np.uint8)})

    def within(self, name: str) -> Checkpoint:
        """Return a checkpoint of other parts of the same run, dropped with this one."""
        return Checkpoint(self.folder / name, {"within": self._stamp}, self._say)

    def close(self) -> None:
        """Drop all parts, after the run's result has been written."""
        shutil.rmtree(self.folder)


def once(kept: Checkpoint | None, name: str, make: Callable[[], Any]) -> Any:
    """Return what `kept` holds under `name` (`Checkpoint.get_json`), else make and keep it."""
    found = None if kept is None else kept.get_json(name)
    if found is None:
        found = make()
        if kept is not None:
            kept.put_json(name, found)
    return found


def _is_marker(content: bytes) -> bool:
    """Return True if the settings file is complete, whatever its settings are."""
    stamp, _, digest = content.removesuffix(b"\n").rpartition(b"\n")
    return digest == _digest(stamp).encode()


def _digest(*parts: bytes) -> str:
    taken = hashlib.sha256()
    for part in parts:
        taken.update(len(part).to_bytes(8, "little") + part)
    return taken.hexdigest()
