"""Remarks, made beforehand, on what a profile keeps of its folder and what it will record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note

if TYPE_CHECKING:
    from traces.acceptance.trace import Trace

SOURCES = ("*exits*", "*starts-*", "trees-*", "sampled")
"""Recordings that a folder may hold in addition to its trace and latencies."""


def say_complete(out: Path, asked: Sequence[str]) -> None:
    """Say what a complete folder keeps, and what is to be recorded into it besides."""
    from traces.store.files import read_trace

    trace = read_trace(out / "trace.parquet")
    found = {path.stem for name in SOURCES for path in out.glob(f"{name}.parquet")}
    besides = f" (it also holds {', '.join(sorted(found))})" if found else ""
    note(
        f"{out} is complete: its trace of {prompts(len(trace.requests))} and its latencies are "
        f"kept{besides}; recorded now, where it is not there yet: {', '.join(asked)}"
    )


def say_recording(what: Collection[str], trace: Trace, asked: Iterable[str] = ()) -> None:
    """Say, before it is done, what is recorded along `trace`, and what of `asked` is kept."""
    if not what:
        return
    kept = [name for name in asked if name not in what]
    outputs = "" if trace.sampling.greedy else " sampled outputs of"
    rest = f"; kept: {', '.join(kept)}" if kept else ""
    note(f"recording {', '.join(what)} along{outputs} {prompts(len(trace.requests))}{rest}")


def prompts(count: int) -> str:
    """Return a number of prompts in words.

    >>> prompts(1), prompts(2)
    ('1 prompt', '2 prompts')
    """
    return f"{count} prompt{'s'[: count != 1]}"
