"""Profiles in tests measure a few cells: what a command does with them, not what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest

WIDTHS, CONTEXTS, PROMPTS = (1, 2, 5), (32, 128), (32, 128)
TREES = {"FIRST": (1, 2), "TREE_WIDTHS": (1, 2, 40), "PROMPTS": PROMPTS}
"""Cells timed of rounds with trees."""
GAMMAS = (0, 1, 4)
"""Draft lengths over which the host's time is fitted, and which rules judge."""


def given(call: Callable[..., Any], **less: Any) -> Callable[..., Any]:
    """`call` with these arguments, whatever the caller gives for them."""
    names = signature(call)

    def called(*args: Any, **named: Any) -> Any:
        bound = names.bind(*args, **named)
        bound.arguments |= less
        return call(*bound.args, **bound.kwargs)

    return called


def untimed_none(patch: pytest.MonkeyPatch) -> None:
    """No pass runs before those that are timed."""
    from profiler.latency import passes
    from profiler.sources import latency

    for module in (passes, latency):
        for name in {"UNTIMED", "UNTIMED_PLAIN"} & {*vars(module)}:
            patch.setattr(module, name, 0)


@contextmanager
def few_cells() -> Iterator[None]:
    """The grids that commands measure by default, thinned out; disturbed blocks are kept."""
    if find_spec("torch") is None:
        yield
        return
    from profiler import profile
    from profiler.latency import host, passes, table
    from profiler.sources import latency, run

    @dataclass(frozen=True)
    class Few(table.Grid):
        widths: Sequence[int] = WIDTHS
        contexts: Sequence[int] = CONTEXTS
        prompts: Sequence[int] = PROMPTS
        batch_widths: Sequence[int] = WIDTHS
        warmup: int = 0

        def __post_init__(self) -> None:
            object.__setattr__(self, "repeats", 1)

    few: dict[str, Any] = {"widths": WIDTHS, "contexts": CONTEXTS, "repeats": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "Grid", Few)
        patch.setitem(table.Sweeps.__init__.__kwdefaults__, "warmup", 0)
        patch.setattr(host, "HOST_GAMMAS", GAMMAS)
        patch.setattr(latency, "PROMPTS", PROMPTS)
        patch.setattr(passes, "PLAIN_BLOCKS", 1)
        for name, thinned in TREES.items():
            patch.setattr(latency, name, thinned)
        untimed_none(patch)
        for owner, name, less in (
            (run, "measure_sources", few), (run, "SourceLatency", few),
            (latency, "measure_drafters", few),
            (profile, "measure_host", {"repeats": 1}),
            (profile, "measure_batch_host", {"repeats": 1, "tokens": 8}),
            (profile, "measure_choosing", {"repeats": 1, "drafted": GAMMAS}),
        ):  # fmt: skip
            patch.setattr(owner, name, given(getattr(owner, name), **less))
        for name in ("MOST", "WARMING"):
            patch.setattr(f"profiler.machine.{name}", 0)
        yield
