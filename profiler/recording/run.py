"""A run folder: its description (`run.json`), its writer, and its contents."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.fetched import places
from traces.errors import DraftsimError, FileError
from traces.store.header import FieldCheck, from_row, is_whole
from traces.store.identity import RUN_ID, check_folder
from traces.store.parquet import read_meta
from traces.store.text import read_object
from traces.store.writing import locked, make_folder, write_atomically

if TYPE_CHECKING:
    from profiler.models.loading import Pair

BUNDLED = Path(__file__).parents[1] / "bundled"
NAME = "run.json"
TRUST = "trust_remote_code"


@dataclass(frozen=True)
class RunInfo:
    """The pair of a run and how it was loaded."""

    target: str
    draft: str
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    run_id: str | None = field(default=None, compare=False)
    """Identity that tells this run from another of the same pair (see `traces.store.identity`)."""
    trust_remote_code: bool = field(default=False, compare=False)
    """True if code that a model brings may run: said on the command line, never by the folder."""

    def load(self) -> Pair:
        """Return the pair, as the run had it; DraftsimError if it cannot be loaded."""
        # Only now: what a run says of itself is also read where no model is to be loaded.
        from profiler.models.loading import load_pair

        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        paths = (model_path(self.target, "target"), model_path(self.draft, "draft"))
        pair = load_pair(
            *paths, device=self.device, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        if self.run_id is None:
            return pair
        return replace(pair, meta={**pair.meta, RUN_ID: self.run_id})


def model_path(name: str, role: str) -> str:
    """Return the folder or hub id of a model's name, in the role of target or draft.

    ``bundled`` is the pair that comes with the project; what `draftsim fetch` brings has names
    too (see `profiler.fetched.places`).
    """
    if name == "bundled":
        return str(BUNDLED / role)
    name = places.name_in_role(name, role)
    return str(places.fetched(name)) if name in places.NAMES else name


def shipped_heads(name: str) -> Path | None:
    """Return the folder of the project's trained heads for a target, by its name or folder."""
    folder = Path(model_path(name, "target")).resolve()
    for target, heads in (
        (BUNDLED / "target", BUNDLED / "exit_heads"),
        (places.folder(places.SMOLLM2.name), places.SMOLLM2_WEIGHTS / places.SMOLLM2_HEADS),
    ):
        if folder == target.resolve() and heads.is_dir():
            return heads
    return None


def write_info(info: RunInfo, folder: Path) -> None:
    """Keep `info` in the run folder."""
    fields = asdict(info)
    del fields[TRUST]
    write_atomically(folder / NAME, json.dumps(fields, indent=2).encode())


def read_info(folder: Path, trust_remote_code: bool = False) -> RunInfo:
    """Return the description that the run folder holds.

    Raises DraftsimError if it is no run folder, or its files are of several runs.
    """
    path = folder / NAME
    if not path.exists():
        raise DraftsimError(
            f"{folder} is not a run folder (it has no {NAME}): "
            "make one with `draftsim profile --out`"
        )
    found = read_object(path, AGAIN)
    if TRUST in found:
        raise FileError(f"{path} may not say {TRUST}: {AGAIN}")
    if "device" not in found:  # cpu by default for a pair that is loaded now, not for a recording
        raise FileError(f"{path} names no device: {AGAIN}")
    info = from_row(RunInfo, str(path), found, _FIELDS, AGAIN)
    info = replace(info, trust_remote_code=trust_remote_code)
    check_folder(folder)
    _check_recordings(folder, info)
    return info


def _check_recordings(folder: Path, info: RunInfo) -> None:
    """Raise FileError if a recording in the folder says that it is of another run than `info`."""
    own = {RUN_ID: info.run_id, "dtype": info.dtype, "threads": info.threads}
    for name in ("trace", "sampled", "latency"):
        path = folder / f"{name}.parquet"
        meta = read_meta(path) if path.is_file() else {}
        for field_of, value in own.items():
            other = meta.get(field_of)
            # Precision and threads may be left to the device.
            unsaid = value is None and field_of != RUN_ID
            if other is not None and other != value and not unsaid:
                raise FileError(
                    f"{folder / NAME} is of another run than {path}: their {field_of} is {value!r} "
                    f"and {other!r}: {AGAIN}"
                )


AGAIN = "copy it again, or profile the pair again"


def _name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


_FIELDS: Mapping[str, FieldCheck] = {
    **dict.fromkeys(("target", "draft", "device"), _name),
    "dtype": lambda value: value in (None, "float32", "bfloat16", "float16"),
    "threads": lambda value: value is None or is_whole(value, 1, 4096),
    RUN_ID: lambda value: value is None or _name(value),
}
"""The check of each field of run.json."""


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
    """Lock the folder against other writers (see `traces.store.writing`); make it if missing.

    Raises DraftsimError if another process writes there (naming it), or the folder cannot be
    written to (with the `remedy`).
    """
    made = not folder.exists()
    make_folder(folder, remedy)
    try:
        with locked(folder / LOCK, folder, remedy):
            yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # nothing came of it


def claimed(info: RunInfo, folder: Path, force: bool = False) -> RunInfo:
    """Return `info` with the identity of the run that `folder` holds, or a new one.

    Nothing is written.  With `force` the folder may hold anything.

    Raises DraftsimError if it holds another pair's run, or one of another device or dtype.
    """
    if force or not (folder / NAME).is_file():
        return replace(info, run_id=uuid.uuid4().hex[:16])
    held = read_info(folder)
    if held != info:
        raise DraftsimError(
            f"{folder} holds the run of another pair, device or dtype: name another --out, or "
            "--force to record over it"
        )
    return replace(info, run_id=held.run_id)


def begin(info: RunInfo, folder: Path, force: bool = False) -> None:
    """Write the folder's description; with `force` its recordings are removed first."""
    if force:
        for pattern in RECORDINGS:
            for path in folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_info(info, folder)


def digest_of(options: Mapping[str, Any]) -> str:
    """Return a short digest of the options a recording is made under."""
    text = json.dumps(options, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_done(path: Path, meta: Mapping[str, Any], *options: Mapping[str, Any]) -> bool:
    """Return True if the recording at `path` was made with any of the `options`.

    ``meta`` is its provenance.

    Raises DraftsimError if it was made with other options, which a run would overwrite.
    """
    if meta.get(DONE_WITH) in {digest_of(one) for one in options}:
        return True
    raise DraftsimError(
        f"{path} was recorded with other options or prompts: repeat the same, name another --out, "
        "or --force to record over it"
    )
