"""Columns of a latency table's cells, the steps that they time, and their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from traces.acceptance.trace import MOST_TOKENS
from traces.errors import DraftsimError

CELL_COLUMNS: dict[str, tuple[str, str]] = {
    "model": ("str", "target, draft, or another part that runs by itself"),
    "phase": ("str", "the step that was timed, see PHASES"),
    "batch": ("int32", "sequences in the step"),
    "new_tokens": ("int32", "tokens fed per sequence"),
    "context": ("int32", "tokens already in the cache, per sequence"),
    # The name is that of the first tables, which held medians; those of a GPU still do.
    "median_s": ("float64", "the repeats' mean or median, seconds (`estimator` in the metadata)"),
    "spread_s": ("float64", "half the interquartile range over the repeats, seconds"),
    "repeats": ("int32", "timed repeats"),
}

PHASES: dict[str, str] = {
    "prefill": "the prompt in one pass (new_tokens = prompt length, context = 0)",
    "mixed": "time that prompts add to a step that decodes (batch = decoded tokens in all, "
    "new_tokens = prompt tokens)",
    "forward": "one pass as the decoder runs it: model, argmax and cache placement",
    "with_prompts": "a pass over the decoding sequences of a step that also reads prompts",
    "pass": "a forward pass without passes of a draft model or of layers before it in its round",
    "catch_up": "a round's first draft pass, after the target's (new_tokens = tokens caught up on)",
    "along": "a drafter's pass over the verified tokens, in an engine's step without drafts",
    "settling": "one of a round's next draft passes, slower because the processor's caches still "
    "hold the target's weights (new_tokens = its place after the first)",
    "tree": "a pass over nodes of a draft tree, choosing them included: a drafter's that expands "
    "them, or the target's that verifies them (new_tokens = nodes, the target's root included)",
    "layer": "one transformer layer of that pass",
    "head": "final norm, output projection and argmax",
    "signal": "computing one drafted token's signals and bringing them to the host",
    "host_round": "per round: everything around the passes (accepting, bookkeeping, policy)",
    "host_draft": "per drafted token: everything around the pass",
    "judge": "extra time of a lossy rule's verdict over a lossless one's (new_tokens = drafted)",
    "judge_signals": "the same for a rule that also reads the draft's signals",
    "rollback": "taking rejected tokens out of the cache",
    "request": "time that a server (model `server`) adds to a request: from the client to the "
    "engine's queue, and from a step's end to the client (batch = running requests)",
    "apart": "delay between two requests at a server's engine, if several were sent at once "
    "(batch = their number)",
    "iteration": "time that a server adds to a step of its engine: messages, the loop",
}

RENAMED_PHASES = {"beside": "with_prompts"}
"""Phases of tables that were written before, by their names there."""
ENGINE_MODES = ("FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE")
"""CUDA graphs of an engine (vLLM's ``cudagraph_mode``, its default first).

A full graph is a whole pass; a piecewise one is a pass whose parts between attention operators the
host starts one by one.
"""
UNIFORM = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
"""Modes in which only steps that verify the longest draft of all requests are full graphs."""
SERVER = "server"
"""The model of the cells that say what a server adds to its engine."""


def graphs_of(engine: Mapping[str, Any]) -> str | None:
    """Return the mode of a measured engine's CUDA graphs, from its metadata; None without any."""
    # Before `cudagraph_mode` was written, an engine that was not eager had the default.
    older: str | None = None if engine.get("eager", True) else ENGINE_MODES[0]
    found: str | None = engine.get("cudagraph_mode", older)
    return found


def checked_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` with the columns of `CELL_COLUMNS` alone, in their types.

    Raises DraftsimError on missing or mistyped columns, unknown phases, repeated cells, sizes below
    their bounds, or times that are negative or not finite.
    """
    cells = typed(cells, CELL_COLUMNS, "latency table")
    cells["phase"] = cells["phase"].replace(RENAMED_PHASES)
    if unknown := sorted(set(cells["phase"].unique()) - set(PHASES)):
        raise DraftsimError(f"latency table has unknown phase(s) {', '.join(unknown)[:80]}")
    key = ["model", "phase", "batch", "new_tokens", "context"]
    if (repeated := cells[cells.duplicated(key)]).shape[0]:
        cell = ", ".join(str(value) for value in repeated[key].iloc[0])
        raise DraftsimError(f"latency table repeats the cell ({cell})")
    largest = int(cells[["batch", "new_tokens", "context"]].to_numpy().max(initial=0))
    if largest > MOST_TOKENS:
        raise DraftsimError(f"latency table holds a size of {largest}, beyond {MOST_TOKENS}")
    for name, least in (("batch", 1), ("new_tokens", 0), ("context", 0), ("repeats", 0)):
        if (cells[name] < least).any():
            value = int(cells[name].min())
            raise DraftsimError(f"latency table column {name!r} holds {value}, not >= {least}")
    return cells


def cells_of(
    model: str, phase: str, batch: Floats, new_tokens: Floats, context: Floats, seconds: Floats,
    repeats: npt.ArrayLike = 0,
) -> pd.DataFrame:  # fmt: skip
    """Return cells of a step at many sizes; times count as not repeated by default."""
    values = (
        model, phase, batch.astype(int), new_tokens.astype(int), context.astype(int), seconds, 0.0,
        np.broadcast_to(repeats, len(batch)).astype(int),
    )  # fmt: skip
    return pd.DataFrame(dict(zip(CELL_COLUMNS, values, strict=True)))


def combined(*axes: npt.ArrayLike) -> list[Floats]:
    """Return all combinations of the axes' values, one array per axis; the last varies fastest."""
    return [v.ravel().astype(float) for v in np.meshgrid(*map(np.asarray, axes), indexing="ij")]


def typed(frame: pd.DataFrame, columns: Mapping[str, tuple[str, str]], what: str) -> pd.DataFrame:
    """Return the `columns` of a frame alone, in their types; floats are times.

    Raises DraftsimError on missing or mistyped columns, or times that are negative or not finite.
    """
    if missing := [c for c in columns if c not in frame.columns]:
        raise DraftsimError(f"{what} lacks the column(s) {', '.join(missing)}")
    found: dict[str, Any] = {}
    for name, (dtype, _) in columns.items():
        try:
            column = frame[name]
            # As a list first: a column of text gives one value at a time slowly.
            texts = dtype == "str"
            found[name] = [*map(str, column.tolist())] if texts else column.to_numpy(dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise DraftsimError(f"{what} column {name!r} is not of type {dtype}") from error
        if dtype == "float64" and not (np.isfinite(found[name]) & (found[name] >= 0)).all():
            raise DraftsimError(f"{what} column {name!r} holds a negative or non-finite time")
    return pd.DataFrame(found)
