"""Measured seconds of every step of decoding, and how to read between the points.

A table is a long list of cells: the typical time of one step of one model at a batch,
a number of new tokens and a context.  Between measured points it interpolates
linearly; outside them it never extrapolates silently: the estimate comes from a
non-negative roofline-shaped fit and is flagged `EXTRAPOLATED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED, Floats, Grid

__all__ = [
    "CELL_COLUMNS",
    "EXTRAPOLATED",
    "INTERPOLATED",
    "MEASURED",
    "PHASES",
    "Estimate",
    "LatencyTable",
]

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
    "mixed": "what whole prompts add to a pass that decodes (batch = tokens it decodes in all, "
    "new_tokens = those of the prompts)",
    "forward": "one pass as the decoder runs it: model, argmax and cache placement",
    "pass": "the same where no passes of a draft model or of layers precede it in its round",
    "catch_up": "a round's first draft pass, after the target's (new_tokens = tokens caught up on)",
    "along": "a drafter's pass over what was verified, in an engine's iteration without drafts",
    "settling": "a draft pass soon behind a round's first, while the processor's caches still turn "
    "from the target's weights to the draft's (new_tokens = its place behind the first)",
    "layer": "one transformer layer of that pass",
    "head": "final norm, output projection and argmax",
    "signal": "computing one drafted token's signals and bringing them to the host",
    "host_round": "per round: everything around the passes (accepting, bookkeeping, policy)",
    "host_draft": "per drafted token: everything around the pass",
    "judge": "what a lossy rule's verdict takes beyond a lossless one (new_tokens = drafted)",
    "judge_signals": "the same of a rule that also reads the draft's signals",
    "rollback": "taking rejected tokens out of the cache",
}


BATCH_FREE = "batch_free"
"""Key of the meta that says that passes are taken to cost the same at every batch."""
ASSUMED = "assumed"
BATCH_FREE_SAID = "further sequences of a batch (--assume-batch-free)"
"""What such figures take to cost nothing."""


class Estimate(NamedTuple):
    """Seconds with their origin, element by element."""

    seconds: Floats
    origin: npt.NDArray[np.int8]
    """MEASURED, INTERPOLATED or EXTRAPOLATED."""


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Latency cells (columns as in `CELL_COLUMNS`) and where they were measured.

    Raises
    ------
    DraftsimError
        On missing or mistyped columns, unknown phases, repeated cells, sizes below
        their bounds, or times that are negative or not finite.
    """

    cells: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cells = _typed(self.cells)
        object.__setattr__(self, "cells", cells)
        if unknown := sorted(set(cells["phase"]) - set(PHASES)):
            raise DraftsimError(f"latency table has unknown phase(s) {', '.join(unknown)}")
        key = ["model", "phase", "batch", "new_tokens", "context"]
        if (repeated := cells[cells.duplicated(key)]).shape[0]:
            cell = ", ".join(str(value) for value in repeated[key].iloc[0])
            raise DraftsimError(f"latency table repeats the cell ({cell})")
        for name, least in (("batch", 1), ("new_tokens", 0), ("context", 0), ("repeats", 0)):
            if (cells[name] < least).any():
                value = int(cells[name].min())
                raise DraftsimError(f"latency table column {name!r} holds {value}, not >= {least}")
        for name in ("median_s", "spread_s"):
            times = cells[name].to_numpy(float)
            if not np.isfinite(times).all() or (times < 0).any():
                raise DraftsimError(
                    f"latency table column {name!r} holds a negative or non-finite time"
                )

    def __repr__(self) -> str:
        device = self.meta.get("device", "unknown device")
        return f"<LatencyTable: {len(self.cells)} cells, {device}>"

    @classmethod
    def constant(
        cls, target: float, draft: float, verify: float | None = None, *,
        batch_free: bool = True, **others: float,
    ) -> LatencyTable:  # fmt: skip
        """The textbook model: every pass of a model costs the same (seconds).

        ``verify`` is the target's pass over two or more tokens (default: ``target``);
        ``others`` gives further single-cell phases of the target by name (``host_round``).
        Without ``batch_free``, they are those of one sequence alone, see `assumed_batch_free`.
        """
        rows = [("target", "forward", 1, target), ("draft", "forward", 1, draft)]
        if verify is not None:
            rows.append(("target", "forward", 2, verify))
        rows += [("target", phase, 1, value) for phase, value in others.items()]
        for name, _, _, value in rows:
            if not np.isfinite(value) or value < 0:
                raise DraftsimError(f"constant latency of {name} is {value}, expected >= 0 seconds")
        frame = pd.DataFrame(
            [(m, p, 1, n, 0, float(v), 0.0, 1) for m, p, n, v in rows], columns=list(CELL_COLUMNS)
        )
        meta = {"kind": "constant", "device": "constant", BATCH_FREE: batch_free}
        return cls(frame, meta)

    @property
    def is_constant(self) -> bool:
        """Whether the cells stand for every batch, width and context."""
        return self.meta.get("kind") == "constant"

    @property
    def batch_free(self) -> bool:
        """Whether passes are taken to cost the same at every batch, because somebody said so."""
        return bool(self.meta.get(BATCH_FREE))

    def said_batch_free(self, batch: int) -> str:
        """What figures at `batch` take to cost nothing on somebody's word; empty for no such.

        A textbook model (`constant`) is batch-free by definition, and needs no word.
        """
        return BATCH_FREE_SAID if batch > 1 and self.meta.get(BATCH_FREE) == ASSUMED else ""

    def assumed_batch_free(self, model: str = "target") -> LatencyTable:
        """The table with passes of one batch size taken to cost the same at every other.

        Without, a table that knows one batch size refuses to say what another costs; one that
        knows several, of `model`, is returned as it is.
        """
        grid = self._grids.get((model, "forward"))
        if grid is not None and not self.is_constant and len(grid.batches) > 1:
            return self
        return LatencyTable(self.cells, {**self.meta, BATCH_FREE: ASSUMED})

    @property
    def knows_batches(self) -> bool:
        """Whether the target's passes were measured at several batch sizes."""
        grid = self._grids.get(("target", "forward"))
        return grid is not None and not self.is_constant and len(grid.batches) > 1

    def check_sizes(
        self, model: str, phase: str, batch: npt.ArrayLike, new_tokens: npt.ArrayLike
    ) -> None:
        """Refuse sizes along which a pass was measured at one size alone.

        What was never varied tells nothing: a fit would take it to cost nothing.

        Raises
        ------
        DraftsimError
            Saying what to measure, or to assume.
        """
        if phase != "forward" or model not in ("target", "draft"):
            return
        grid = self._grids[model, phase]
        if len(grid.batches) == 1 and not self.batch_free:
            own, asked = grid.batches[0], float(np.max(batch))
            if asked != own:
                raise DraftsimError(
                    f"these latencies know the {model}'s passes at batch {own:g} alone, and batch "
                    f"{asked:g} is asked: measure it (`draftsim profile --batch 1,4,16,64`), ask "
                    f"for batch {own:g}, or take every batch to cost the same with "
                    "--assume-batch-free"
                )
        if model == "target" and not self.is_constant and len(grid.widths) == 1:
            own, asked = grid.widths[0], float(np.max(new_tokens))
            if asked != own:
                raise DraftsimError(
                    f"these latencies know the target's passes over {own:g} token(s) alone, and "
                    f"{asked:g} are asked: measure verification (`draftsim profile`), or give "
                    "const:target=...,draft=...,verify=..."
                )

    def has(self, model: str, phase: str) -> bool:
        """Whether the table holds any cell of this model and phase."""
        return (model, phase) in self._grids

    def grid(self, model: str, phase: str) -> Grid:
        """The cells of a step, to be read between.

        Raises
        ------
        DraftsimError
            If nothing was measured for this model and phase.
        """
        grid = self._grids.get((model, phase))
        if grid is None:
            have = ", ".join(sorted({m for m, p in self._grids if p == phase})) or "no model"
            raise DraftsimError(
                f"latency table has no {phase!r} cells of {model!r} (it has them of {have}): "
                "profile that model, or use const:target=...,draft=..."
            )
        return grid

    def drafter(self, model: str) -> str:
        """The model whose cells hold the passes of the drafter `model`.

        A textbook table knows one drafter, whichever it is.  Raises DraftsimError if it has none.
        """
        if self.has(model, "forward"):
            return model
        if self.is_constant:
            return "draft"
        raise DraftsimError(
            f"latency table has no passes of the drafter {model!r}: `draftsim profile --source "
            "eagle:model=DIR` measures them"
        )

    def first_draft_phase(self, model: str) -> str:
        """Phase that prices a round's first draft pass: its own, where it was measured."""
        return "catch_up" if self.has(model, "catch_up") else "forward"

    def scaled(self, factors: Mapping[str, float], note: str) -> LatencyTable:
        """The table with each model's times multiplied, marked as scaled with `note`."""
        cells = self.cells.copy()
        factor = cells["model"].map(dict(factors)).fillna(1.0).to_numpy(float)
        cells["median_s"] *= factor
        cells["spread_s"] *= factor
        return LatencyTable(cells, {**self.meta, "scaled": note})

    def estimate(
        self,
        model: str,
        phase: str,
        *,
        batch: npt.ArrayLike = 1,
        new_tokens: npt.ArrayLike = 1,
        context: npt.ArrayLike = 0,
    ) -> Estimate:
        """Seconds of a step; the three sizes broadcast against each other.

        Raises
        ------
        DraftsimError
            If nothing was measured for this model and phase.
        """
        grid = self.grid(model, phase)
        self.check_sizes(model, phase, batch, new_tokens)
        given = (np.asarray(v, dtype=float) for v in (batch, new_tokens, context))
        sizes = np.broadcast_arrays(*given)
        flat = [v.ravel() for v in sizes]
        seconds, origin = grid.read(*flat)
        return Estimate(seconds.reshape(sizes[0].shape), origin.reshape(sizes[0].shape))

    def seconds(self, model: str, phase: str, **sizes: npt.ArrayLike) -> Floats:
        """The seconds of `estimate` alone, zero for a host phase nobody measured."""
        if phase not in ("prefill", "forward", "layer", "head") and not self.has(model, phase):
            return np.zeros(np.broadcast_shapes(*(np.shape(v) for v in sizes.values())))
        return self.estimate(model, phase, **sizes).seconds

    @cached_property
    def _grids(self) -> dict[tuple[str, str], Grid]:
        return {
            (str(model), str(phase)): Grid(part, self.is_constant, self.batch_free)
            for (model, phase), part in self.cells.groupby(["model", "phase"], sort=False)
        }


def _typed(cells: pd.DataFrame) -> pd.DataFrame:
    if missing := [c for c in CELL_COLUMNS if c not in cells.columns]:
        raise DraftsimError(f"latency table lacks the column(s) {', '.join(missing)}")
    typed: dict[str, Any] = {}
    for name, (dtype, _) in CELL_COLUMNS.items():
        try:
            column = cells[name]
            typed[name] = [str(v) for v in column] if dtype == "str" else column.to_numpy(dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise DraftsimError(f"latency table column {name!r} is not of type {dtype}") from error
    return pd.DataFrame(typed)
