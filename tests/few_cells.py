"""Profiles in tests measure a few cells: what a command does with them, not what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

WIDTHS, CONTEXTS, PROMPTS = (1, 2, 5), (32, 128), (32, 128)
TREES = {"FIRST": (1, 2), "WIDTHS": (1, 2, 40), "PROMPTS": PROMPTS}
"""What is timed of rounds with trees."""


@contextmanager
def few_cells() -> Iterator[None]:
    """The grids that commands measure by default, thinned out; disturbed blocks are kept."""
    if find_spec("torch") is None:
        yield
        return
    from profiler import profile
    from profiler.latency import passes, table
    from profiler.sources import feature_latency, latency, tree_latency

    @dataclass(frozen=True)
    class Few(table.Grid):
        widths: Sequence[int] = WIDTHS
        contexts: Sequence[int] = CONTEXTS
        prompts: Sequence[int] = PROMPTS
        batch_widths: Sequence[int] = WIDTHS
        warmup: int = 0

    few: dict[str, Any] = {"widths": WIDTHS, "contexts": CONTEXTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "Grid", Few)
        patch.setattr(feature_latency, "PROMPTS", PROMPTS)
        patch.setattr(passes, "PLAIN_BLOCKS", 1)
        patch.setattr(passes, "decoding_blocks", partial(passes.decoding_blocks, untimed=0))
        for name, thinned in TREES.items():
            patch.setattr(tree_latency, name, thinned)
        for module in (passes, latency, feature_latency, tree_latency):
            for name in {"UNTIMED", "UNTIMED_PLAIN"} & {*vars(module)}:
                patch.setattr(module, name, 0)
        for owner, name, less in (
            (latency, "measure_sources", few), (latency, "SourceLatency", few),
            (feature_latency, "measure_drafters", few),
            (tree_latency, "measure_trees", {"contexts": CONTEXTS}),
            (profile, "measure_host", {"repeats": 2}), (profile, "measure_rules", {"repeats": 2}),
        ):  # fmt: skip
            patch.setattr(owner, name, partial(getattr(owner, name), **less))
        for name in ("MOST", "WARMING"):
            patch.setattr(f"profiler.machine.repeats.{name}", 0)
        yield
