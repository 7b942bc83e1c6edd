"""Measured seconds of every step of decoding, and how to read between the points.

A table is a long list of cells: the typical time of one step of one model at a batch,
a number of new tokens and a context.  Between measured points it interpolates
linearly; outside them it never extrapolates silently: the estimate comes from a
non-negative roofline-shaped fit and is flagged `EXTRAPOLATED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from traces.acceptance.trace import MOST_TOKENS
from traces.errors import DraftsimError
from traces.latency.interpolate import CellGrid

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


class LatencyKind(NamedTuple):
    """A kind of latency: what was timed, where, and what is charged for it."""

    what: str
    timed: str = ""
    """Module that times it; empty where a table has it from elsewhere alone."""
    per: str = ""
    """The part of a run that is charged for it by itself: a key of `simulator.pricing.PER`, or a
    server's "step" or "request"; empty for passes and other calls, which are counted one by one."""
    instead: tuple[str, str, str] | None = None
    """Where it was not measured: its model, or empty for any, and the (model, phase) that is read
    instead, with an empty model for the same; None: nothing."""
    given: bool = False
    """True if constant latencies may name it (``const:...,host_round=0.0003``)."""
    extra: str = ""
    """The name of what it times if only some runs do that (`simulator.pricing.extras_of`)."""


_PASSES, _HOST = "profiler/latency/passes.py", "profiler/latency/host.py"
_SOURCES, _ENGINE = "profiler/sources/latency.py", "profiler/engines/measure.py"
_SERVED = "simulator/served.py"

PHASES: dict[str, LatencyKind] = {
    "prefill": LatencyKind(
        "the prompt in one pass (new_tokens = prompt length, context = 0)", _PASSES, given=True
    ),
    "mixed": LatencyKind(
        "time that prompts add to a step that decodes (batch = decoded tokens in all, "
        "new_tokens = prompt tokens)", _ENGINE,
    ),
    "forward": LatencyKind(
        "one pass as the decoder runs it: model, argmax and cache placement", _PASSES
    ),
    "with_prompts": LatencyKind(
        "a pass over the decoding sequences of a step that also reads prompts",
        "traces/operators/compose.py",
    ),
    "pass": LatencyKind(
        "a forward pass without passes of a draft model or of layers before it in its round",
        _SOURCES, instead=("target", "", "forward"), given=True,
    ),
    "catch_up": LatencyKind(
        "a round's first draft pass, after the target's (new_tokens = tokens caught up on)",
        _PASSES, instead=("", "", "forward"),
    ),
    "along": LatencyKind(
        "a drafter's pass over the verified tokens, in an engine's step without drafts", _ENGINE
    ),
    "settling": LatencyKind(
        "one of a round's next draft passes, slower because the processor's caches still hold the "
        "target's weights (new_tokens = its place after the first)", _PASSES,
    ),
    "tree": LatencyKind(
        "a pass over nodes of a draft tree, choosing them included: a drafter's that expands them, "
        "or the target's that verifies them (new_tokens = nodes, the target's root included)",
        _SOURCES, instead=("target", "", "pass"),
    ),
    "layer": LatencyKind(
        "one transformer layer of that pass", _PASSES, instead=("exit", "target", "layer"),
        given=True,
    ),
    "head": LatencyKind(
        "final norm, output projection and argmax", _PASSES, instead=("exit", "target", "head"),
        given=True,
    ),
    "signal": LatencyKind(
        "computing one drafted token's signals and bringing them to the host", _PASSES, "read",
        given=True, extra="signal",
    ),
    "host_round": LatencyKind(
        "per round: everything around the passes (accepting, bookkeeping, policy)", _HOST, "round",
        given=True,
    ),
    "host_draft": LatencyKind(
        "per drafted token: everything around the pass", _HOST, "drafted", given=True
    ),
    "judge": LatencyKind(
        "extra time of a lossy rule's verdict over a lossless one's (new_tokens = drafted)", _HOST,
        "verdict", given=True, extra="judging",
    ),
    "judge_signals": LatencyKind(
        "the same for a rule that also reads the draft's signals", _HOST, "verdict", given=True,
        extra="judging",
    ),
    "draw": LatencyKind(
        "drawing one token from its distribution, over taking the likeliest", _HOST, "drafted",
        given=True, extra="sampling",
    ),
    "draw_top_p": LatencyKind(
        "the same with top-p", _HOST, "drafted", given=True, extra="sampling"
    ),
    "toss": LatencyKind(
        "extra time of rejection sampling over greedy matching (new_tokens = drafted)", _HOST,
        "verdict", given=True, extra="sampling",
    ),
    "toss_top_p": LatencyKind(
        "the same with top-p", _HOST, "verdict", given=True, extra="sampling"
    ),
    "rollback": LatencyKind(
        "taking rejected tokens out of the cache", per="rollback", given=True
    ),
    "request": LatencyKind(
        "time that a server (model `server`) adds to a request: from the client to the engine's "
        "queue, and from a step's end to the client (batch = running requests)", _SERVED, "request",
    ),
    "apart": LatencyKind(
        "delay between two requests at a server's engine, if several were sent at once "
        "(batch = their number)", _SERVED,
    ),
    "iteration": LatencyKind(
        "time that a server adds to a step of its engine: messages, the loop", _SERVED, "step"
    ),
}  # fmt: skip
"""The kinds of latencies.

One that rounds, steps or requests are charged for by itself (`LatencyKind.per`) needs its line here
and what times it: pricing and serving read the rest from here.
"""

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
BATCH_FREE = "batch_free"
"""Key of the metadata that says that passes are taken to cost the same at every batch."""
ANY_CONTEXT = "any_context"
"""The same for cells of one context that hold at every other (`draftsim calibrate`)."""
ASSUMED = "assumed"
BATCH_FREE_SAID = "further sequences of a batch (--assume-batch-free)"
"""Name of the part that such figures take to cost nothing."""


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
        cells = typed(self.cells, CELL_COLUMNS, "latency table")
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
        object.__setattr__(self, "cells", cells)

    def __repr__(self) -> str:
        device = self.meta.get("device", "unknown device")
        return f"<LatencyTable: {len(self.cells)} cells, {device}>"

    @classmethod
    def constant(
        cls, target: float, draft: float, verify: float | None = None, *,
        batch_free: bool = True, **others: float,
    ) -> LatencyTable:  # fmt: skip
        """Return the textbook model: every pass of a model costs the same (seconds).

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
        cells = as_cells([(m, p, 1, n, 0, float(v), 0.0, 1) for m, p, n, v in rows])
        return cls(cells, {"kind": "constant", "device": "constant", BATCH_FREE: batch_free})

    @property
    def is_constant(self) -> bool:
        """Return True if the cells hold for every batch, width and context."""
        return self.meta.get("kind") == "constant"

    @property
    def gpus(self) -> int:
        """The most GPUs that share one of the models; 1 unless the metadata says more."""
        return int(max((self.meta.get("tensor_parallel") or {"target": 1}).values()))

    @property
    def batch_free(self) -> bool:
        """Return True if passes are assumed to cost the same at every batch."""
        return bool(self.meta.get(BATCH_FREE))

    def said_batch_free(self, batch: int) -> str:
        """Return the assumption that figures at `batch` make; empty if they make none.

        A textbook model (`constant`) is batch-free by definition, and needs no word.
        """
        return BATCH_FREE_SAID if batch > 1 and self.meta.get(BATCH_FREE) == ASSUMED else ""

    def assumed_batch_free(self, model: str = "target") -> LatencyTable:
        """Return the table with passes of one batch size taken to cost the same at every other.

        Otherwise a table that knows one batch size refuses to say what another costs.  A table that
        knows several batch sizes of `model` is returned as it is.
        """
        grid = self._grids.get((model, "forward"))
        if grid is not None and not self.is_constant and len(grid.batches) > 1:
            return self
        return LatencyTable(self.cells, {**self.meta, BATCH_FREE: ASSUMED})

    @property
    def knows_batches(self) -> bool:
        """Return True if the target's passes were measured at several batch sizes."""
        grid = self._grids.get(("target", "forward"))
        return grid is not None and not self.is_constant and len(grid.batches) > 1

    @property
    def usual_batches(self) -> list[int]:
        """Powers of two up to the largest batch that both models' passes were measured at."""
        if self.is_constant:
            return [1]
        cells = self.cells[self.cells["phase"] == "forward"]
        # Other sources have forward cells as well, at one sequence.
        cells = cells[cells["model"].isin(["target", "draft"])]
        largest = min((int(part["batch"].max()) for _, part in cells.groupby("model")), default=1)
        return sorted({1 << i for i in range(min(largest, 512).bit_length())} | {largest})

    def check_sizes(
        self, model: str, phase: str, batch: npt.ArrayLike, new_tokens: npt.ArrayLike
    ) -> None:
        """Refuse sizes other than measured, if passes were measured at a single size.

        A size that was never varied is refused, because a fit would assume that it costs nothing.

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
        """Return True if the table holds any cell of this model and phase."""
        return (model, phase) in self._grids

    def grid(self, model: str, phase: str) -> CellGrid:
        """Return the cells of a step, to be read between.

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
        """Return the model whose cells hold the passes of the drafter `model`.

        A textbook table knows one drafter, whichever it is.  Raises DraftsimError if it has none.
        """
        if self.has(model, "forward"):
            return model
        if self.is_constant:
            return "draft"
        raise DraftsimError(
            f"latency table has no passes of the drafter {model!r}: `draftsim profile sources "
            f"--source {model.partition('.')[0]}:model=DIR` measures them"
        )

    def cells_for(self, model: str, phase: str) -> tuple[str, str]:
        """Return (model, phase) of the cells that price a step: its own, or the nearest measured.

        If none of them was measured, it is the last one tried.
        """
        if self.is_constant and phase == "tree":
            phase = "forward"  # a pass costs what a pass costs
        while not self.has(model, phase) and (nearest := PHASES[phase].instead) is not None:
            of, other, again = nearest
            if of not in ("", model):
                break
            model, phase = other or model, again
        return model, phase

    def first_draft_phase(self, model: str) -> str:
        """Return the phase that prices a round's first draft pass: its own if measured."""
        return self.cells_for(model, "catch_up")[1]

    def scaled(self, factors: Mapping[str, float], note: str) -> LatencyTable:
        """Return the table with each model's times multiplied, marked as scaled with `note`."""
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
        """Return seconds of a step; the three sizes broadcast against each other.

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
        """Return the seconds of `estimate`; 0 for a host phase that was not measured."""
        if phase not in ("prefill", "forward", "layer", "head") and not self.has(model, phase):
            return np.zeros(np.broadcast_shapes(*(np.shape(v) for v in sizes.values())))
        return self.estimate(model, phase, **sizes).seconds

    def settling_s(self, model: str, batch: int, passes: npt.ArrayLike) -> Floats:
        """Return the extra seconds, over ``forward``, of rounds' draft passes after the first.

        ``passes`` counts them, of any shape.  Zeros for a table without ``settling`` cells.
        """
        sums = self.settling_sums(model, batch)
        return np.asarray(sums[np.clip(passes, 0, len(sums) - 1)])

    def settling_sums(self, model: str, batch: int) -> Floats:
        """Return extra seconds of the first 0, 1, ... passes after the first, as far as measured.

        The target's pass leaves the caches full of its own weights, so the draft passes after it
        take longer, and less so from pass to pass.  Read at the nearest batch measured, as a mean
        over contexts: what comes back into the caches are weights.
        """
        known = self._settling.get(model, {})
        nearest = min(known, key=lambda size: abs(size - batch), default=None)
        return np.zeros(1) if nearest is None else known[nearest]

    @cached_property
    def _settling(self) -> dict[str, dict[int, Floats]]:
        own = self.cells[self.cells["phase"] == "settling"]
        found: dict[str, dict[int, Floats]] = {}
        for model, batch in own[["model", "batch"]].drop_duplicates().itertuples(index=False):
            part = own[(own["model"] == model) & (own["batch"] == batch)]
            later = self.seconds(model, "forward", batch=batch, context=part["context"])
            beyond = (part["median_s"] - later).groupby(part["new_tokens"]).mean()
            found.setdefault(str(model), {})[int(batch)] = np.cumsum([0.0, *beyond.sort_index()])
        return found

    @cached_property
    def _grids(self) -> dict[tuple[str, str], CellGrid]:
        engine = self.meta.get("engine")
        uniform = isinstance(engine, Mapping) and graphs_of(engine) in UNIFORM
        return {
            (str(model), str(phase)): CellGrid(
                part,
                self.is_constant,
                self.batch_free,
                bool(self.meta.get(ANY_CONTEXT)),
                widest_apart=uniform and (model, phase) == ("target", "forward"),
            )
            for (model, phase), part in self.cells.groupby(["model", "phase"], sort=False)
        }


def graphs_of(engine: Mapping[str, Any]) -> str | None:
    """Return the mode of a measured engine's CUDA graphs, from its metadata; None without any."""
    # Before `cudagraph_mode` was written, an engine that was not eager had the default.
    older: str | None = None if engine.get("eager", True) else ENGINE_MODES[0]
    found: str | None = engine.get("cudagraph_mode", older)
    return found


def as_cells(rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Return cells, given a row of `CELL_COLUMNS` for each."""
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


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
