"""Makes the folders of SmolLM2's drafters, next to the target that `profiler.fetched` brings."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from profiler.fetched.download import Say, digest
from profiler.fetched.fetch import made_from, place
from profiler.fetched.places import folder
from profiler.smollm2.places import DRAFTERS, NAME, STORED


def make_drafters(target: Path, say: Say = print) -> list[Path]:
    """Write the drafters' ordinary folders from the weights that the project holds."""
    from profiler.smollm2.drafters import write_folder

    made = []
    for name in DRAFTERS:
        stored = STORED / f"{name}.safetensors"
        if not stored.is_file():
            continue
        wanted = digest(stored)
        into = folder(f"{NAME}-{name}")
        if made_from(into) != wanted:
            place(into, wanted, partial(write_folder, stored, target))
            say(f"{NAME}-{name} is now at {into}")
        made.append(into)
    return made
