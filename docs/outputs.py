"""Outputs of commands in the pages, made by running them when the pages are built or tested."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
"""Folder that the commands run in, as far as they name files."""
COLUMNS = 100

SHOWN = {
    "simulate": "simulate --policy fixed:gamma=3 --policy gammatune --policy svip --policy oracle",
    "own": "simulate --policy mine.py:StopWhenUnsure:threshold=0.4 --policy gammatune",
    "serve": "serve --policy fixed:gamma=3 --policy gammatune --batch 1,8 --requests 100",
    "recommend": "recommend --bench server/results --draft SmolLM2-EAGLE3 --method eagle3",
    "tune": "tune --engine vllm --batch 1,4,8",
    "gpu": "simulate --trace qwen-coder-cpu --latency h100/llama-3.1-8b+llama-3.2-1b "
    "--policy fixed:gamma=2 --policy fixed:gamma=4 --policy gammatune",
    "h200": "simulate --trace qwen-coder-cpu --latency h200-llama-3.1-8b+1b-compiled "
    "--policy fixed:gamma=2 --policy fixed:gamma=4 --policy gammatune",
    "devices": "list devices",
    "llamacpp": "tune --engine llamacpp --trace smollm2-cpu",
    "ratio": "breakeven --latency const:target=1,draft=0.2 --acceptance 0.5 --k 1",
    "doctor": "doctor 0.36,0.24,0.15,0.085 --against 0.72,0.475,0.295,0.17",
    "list": "list",
}
"""Commands whose output pages show, by the name that a page asks for."""
PROGRESS = re.compile(r", (?:about )?\d+:\d\d:\d\d (?:left|so far|in all)$|^draftsim compiles its ")
"""Lines that tell how far a command is, which depend on the machine."""
LINES = {"devices": 16, "serve": 14, "ratio": 7}
"""Lines of an output that a page shows, where it does not show all."""


def output(name: str) -> str:
    """Return a command and what it prints, as a block of Markdown.

    Raises
    ------
    KeyError
        If `SHOWN` has no such command.
    RuntimeError
        If the command fails.
    """
    lines = printed(SHOWN[name]).rstrip().splitlines()
    if len(lines) > (most := LINES.get(name, len(lines))):
        lines = [*lines[:most], "…"]
    return "\n".join(["```text", f"$ draftsim {SHOWN[name]}", *lines, "```"])


@cache
def printed(command: str) -> str:
    """Return what a command prints, standard error and output in their order.

    Raises
    ------
    RuntimeError
        If the command fails.
    """
    from commands.app import app

    said = io.StringIO()
    with _terminal(), redirect_stdout(said), redirect_stderr(said):
        code = app(shlex.split(command), standalone_mode=False)
    if code:
        raise RuntimeError(f"draftsim {command}: exit code {code}")
    # The trailing blanks of table cells are no part of a page.
    lines = [line.rstrip() for line in said.getvalue().splitlines()]
    return "\n".join(line for line in lines if not PROGRESS.search(line))


@contextmanager
def _terminal() -> Iterator[None]:
    """Run as in a terminal of `COLUMNS` columns, without colour, in the folder of the examples."""
    kept, folder = dict(os.environ), Path.cwd()
    os.environ |= {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    os.environ.pop("DRAFTSIM_TRACE", None)
    path = list(sys.path)
    os.chdir(EXAMPLES)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(kept)
