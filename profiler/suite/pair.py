"""The measurement of a pair in a mode, and the kernels of a few of its rounds.

The timing code is that of `draftsim profile`: passes are timed in rounds, sweep by sweep
(`profiler.latency.table.Sweeps`).  A part of the plan is measured as a whole, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from policies.lengths.basic import Fixed
from profiler.latency.host import dictated_run, dictating_trace, host_beyond
from profiler.latency.passes import RoundPoints, measure_layers, pass_blocks
from profiler.latency.table import Grid, swept
from profiler.machine import NoTimeError
from profiler.models.architectures import PairShape
from profiler.models.graphs import CompiledRunner, GraphRunner
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner
from profiler.suite import COMPILED, EAGER, GRAPH
from profiler.suite.environment import Workplace, reason
from traces.errors import DraftsimError
from traces.latency.table import CELL_COLUMNS, LatencyTable, as_cells

WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25)
SINGLE, BATCHED, WANTED = range(3)
"""Ranks of parts: needed by every prediction, needed by batches, and more precision."""
RANKS = (SINGLE, BATCHED, WANTED)
FINDINGS = ("cells", "held_out", "limits")
"""Attributes of `PairMeasurement` that are kept."""
RUNNERS = {EAGER: Runner, GRAPH: GraphRunner, COMPILED: CompiledRunner}
"""Runner of each mode."""
GAMMA, TOKENS, PROMPT = 4, 12, 64
"""The rounds whose kernels are traced: drafted tokens, and the run that they are from."""

PartRows = tuple[list[list[Any]], list[dict[str, Any]]]
"""Rows of `traces.latency.table.CELL_COLUMNS`, and what is held out."""


@dataclass(frozen=True)
class PairGrid:
    """The points to measure of a pair.

    The batches of `grid` are in order of importance.  ``hosts``: batches at which whole runs
    measure the host's time, at the draft lengths `gammas`; ``apart``: rounds between the points of
    every batch's grid, to be held out of the table.
    """

    grid: Grid
    hosts: Sequence[int] = (1, 4, 16)
    apart: int = 4
    gammas: Sequence[int] = (0, 2, 8)
    tokens: int = 24
    prompt: int = 128


FULL = PairGrid(
    Grid(
        WIDTHS, contexts=(128, 1024, 4096, 16384), prompts=(64, 256, 1024, 4096),
        # As wide as at batch 1: policies draft as far in a batch as alone.
        batches=(1, 4, 16, 64, 2, 8, 32), batch_widths=(1, 3, 9, 17, 25), repeats=3,
    )
)  # fmt: skip
QUICK = PairGrid(
    Grid((1, 2, 4), (16, 48), (16, 64), (1, 4, 2), batch_widths=(1, 3), repeats=1, warmup=0),
    hosts=(1, 4), apart=1, gammas=(0, 2), tokens=6, prompt=16,
)  # fmt: skip
"""Grid of the miniature, which a CPU measures in seconds."""


class PairPart(NamedTuple):
    """Something measured as a whole, or not at all."""

    name: str
    rank: int
    run: Callable[[], PartRows]


class LimitError(DraftsimError):
    """A point that the device's memory or the model's context rules out."""


def pass_cells(
    place: Workplace, runners: Sequence[Runner | None], grid: Grid, batch: int, *,
    apart: RoundPoints = (), check: Callable[[], None], late: Callable[[], bool] = lambda: False,
) -> pd.DataFrame:  # fmt: skip
    """Return the cells of a pair's passes at a batch size, over a grid and at points `apart`.

    ``runners``: target's and draft's, or None.
    """
    target, draft = runners
    assert target is not None
    blocks = pass_blocks(target, draft, grid, batch, apart=apart, short=True)
    return swept(blocks, place.device, grid.repeats, warmup=grid.warmup, check=check, late=late)


class PairMeasurement:
    """Everything measured of one pair in one mode, in order of importance.

    Each part adds to `cells`.  Parts too large for the memory are named in `limits`; parts not
    measured, for lack of time or because they `failed`, are `unfinished`.  With ``kept``, the
    `unit` of an earlier run, only unfinished parts are measured.  Parts of rank SINGLE are measured
    even after the pair's `deadline`, until the stage's time is over.
    """

    def __init__(
        self, place: Workplace, pair: PairShape, mode: str, models: tuple[Any, Any], plan: PairGrid,
        deadline: float, kept: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.place, self.pair, self.mode, self.plan = place, pair, mode, plan
        self.models = {"target": models[0], "draft": models[1]}
        self.deadline = deadline
        before = kept or {}
        self.cells, self.held_out, self.limits = (list(before.get(n, ())) for n in FINDINGS)
        self.failed: dict[str, str] = {}
        wanted = before.get("unfinished")
        self._left = [p for p in self._parts() if wanted is None or p.name in wanted]
        self._rank = SINGLE
        self._took: dict[int, float] = {}

    @property
    def late(self) -> bool:
        """Return True if this pair's share of the time is spent."""
        return time.monotonic() > self.deadline or self.place.left <= 0

    @property
    def unfinished(self) -> list[str]:
        """Parts that are yet to be measured."""
        return [part.name for part in self._left]

    def run(self, rank: int | None = None) -> None:
        """Measure every part that is left, or those of one rank, as far as the time goes."""
        for part in [p for p in self._left if rank in (None, p.rank)]:
            self._rank = part.rank
            try:
                self._check()
                cells, held_out = part.run()
            except NoTimeError:
                pass  # another run measures it as a whole
            except (torch.OutOfMemoryError, LimitError) as error:
                full = isinstance(error, torch.OutOfMemoryError)
                self.limits.append(f"{part.name}: {'out of memory' if full else reason(error)}")
                self._left.remove(part)
            except (DraftsimError, RuntimeError) as error:
                # A driver's error ends this part; what was measured before it is kept.
                self.failed[part.name] = reason(error)
                name = f"{self.pair.name}.{self.mode}, {part.name}"
                self.place.say(f"FAILED {name}: {reason(error)}")
            else:
                self.cells += cells
                self.held_out += held_out
                self._left.remove(part)
            self.place.release()

    def _parts(self) -> list[PairPart]:
        """Return everything to measure, most important first."""
        plan, paired = self.plan, self.models["draft"] is not None
        found = []
        for batch in plan.grid.batches:
            hosted = paired and batch in plan.hosts
            rank = SINGLE if batch == 1 else BATCHED if hosted else WANTED
            found.append(PairPart(f"passes at batch {batch}", rank, partial(self.passes, batch)))
            if hosted:
                found.append(
                    PairPart(f"the host at batch {batch}", rank, partial(self.host, batch))
                )
        if self.mode != COMPILED:  # which compiles no layer by itself
            rank = WANTED if paired else BATCHED
            layers = [
                PairPart(f"{name}, layer by layer", rank, partial(self.layers, name))
                for name, model in self.models.items() if model is not None
            ]  # fmt: skip
            found = [*layers, *found]
        return sorted(found, key=lambda part: part.rank)

    def _check(self, ahead: float = 0.0) -> None:
        """Raise NoTimeError once the part under way has no time any more, or not so long."""
        self.place.check_time()
        late = self.late or time.monotonic() + ahead > self.deadline
        if late and self._rank != SINGLE:
            raise NoTimeError("no time left")

    def passes(self, batch: int) -> PartRows:
        """Measure the passes of both models at a batch size, and rounds held out between them."""
        # A smaller batch's time is the least that it takes.
        self._check(max((s for b, s in self._took.items() if b < batch), default=0.0))
        begin, plan = time.monotonic(), self.plan
        contexts = self._contexts(batch)
        prompts = plan.grid.prompts if batch == 1 else ()
        grid = replace(plan.grid, contexts=contexts, prompts=prompts)
        widths = grid.widths if batch == 1 else grid.batch_widths
        apart = points_between(widths, contexts, plan.apart, seed=batch)
        runners = [
            None if model is None
            else runner_of_mode(self.mode, model, max(contexts) + grid.widest, batch)
            for model in self.models.values()
        ]  # fmt: skip
        cells = pass_cells(
            self.place, runners, grid, batch, apart=apart, check=self._check,
            late=lambda: self.late,
        )  # fmt: skip
        self._took[batch] = time.monotonic() - begin
        between = cells["context"].isin([context for _, context in apart])
        table = cells[~between]
        return rows_of_cells(table), held_out(cells[between], LatencyTable(table))

    def host(self, batch: int) -> PartRows:
        """Measure the host's time per round and drafted token in whole rounds.

        The host's share is the time that passes do not explain, so measure all passes first.
        """
        passes = [row for row in self.cells if row[1] in ("forward", "catch_up")]
        if not any(row[2] == batch for row in passes):
            if f"passes at batch {batch}" in self.unfinished:
                raise NoTimeError("no time left")
            raise LimitError(f"no passes at batch {batch}")
        plan = self.plan
        slots = plan.prompt + plan.tokens
        target, draft = (runner_of_mode(self.mode, m, slots, batch) for m in self.models.values())
        cells = host_beyond(
            target, draft, as_cells(passes), batch=batch, repeats=plan.grid.repeats,
            tokens=plan.tokens, prompt=plan.prompt, gammas=plan.gammas, check=self._check,
        )  # fmt: skip
        return rows_of_cells(cells), []

    def layers(self, name: str) -> PartRows:
        """Measure single layers and the output head; with exit heads where there is no draft."""
        exits, grid = self.models["draft"] is None, self.plan.grid
        contexts = self._contexts(1)[:3]
        widths = grid.widths if exits else (1, 5) if 5 in grid.widths else grid.widths[:1]
        runner = LayerRunner(self.models[name], max(contexts) + max(widths))
        cells = measure_layers(
            runner, name, widths, contexts, grid, graphs=self.mode == GRAPH, exits=exits,
            check=self._check, late=lambda: self.late,
        )  # fmt: skip
        return rows_of_cells(cells), []

    def _contexts(self, batch: int) -> list[int]:
        """Return the contexts that the memory and both models hold before the widest pass.

        The others are named in `limits`.  Raises LimitError if those are all.
        """
        width, wanted = self.plan.grid.widest, self.plan.grid.contexts
        room = self.place.free_bytes()
        shapes = [shape for shape in (self.pair.target, self.pair.draft) if shape is not None]
        positions = min(shape.positions for shape in shapes)
        kept: list[int] = []
        why: list[str] = []
        for asked in wanted:
            context = min(asked, positions - width)
            if context < asked:
                why.append(f"context {asked}: the model's context is {positions}")
            # Caches, attention's copies of one layer, the logits, and the causal matrix.
            values = sum(
                batch * (context + width) * shape.kv_values * (shape.layers + 8)
                + 3 * batch * width * shape.vocab + context**2 / 2
                for shape in shapes
            )  # fmt: skip
            if values * self.place.dtype.itemsize > 0.9 * room:
                why.append(f"context {context}: the memory does not hold its cache")
            elif context not in kept:
                kept.append(context)
        named = [f"batch {batch}, {text}" for text in why]
        self.limits += [text for text in named if text not in self.limits]
        if not kept:
            raise LimitError(f"no context of {tuple(wanted)} fits at batch {batch}")
        return kept

    def unit(self) -> dict[str, Any]:
        """Return what is kept of this measurement."""
        why = dict.fromkeys(self.unfinished, "no time left")
        why |= {name: f"failed: {text}" for name, text in self.failed.items()}
        return {
            **{name: getattr(self, name) for name in FINDINGS},
            "random_error": error_summary([h["error"] for h in self.held_out]),
            "skipped": [*self.limits, *(f"{name}: {text}" for name, text in why.items())],
            "unfinished": self.unfinished, "failed": self.failed,
        }  # fmt: skip


def rows_of_cells(cells: pd.DataFrame) -> list[list[Any]]:
    """Return cells as rows of `traces.latency.table.CELL_COLUMNS`."""
    rows: list[list[Any]] = cells[list(CELL_COLUMNS)].astype(object).to_numpy().tolist()
    return rows


def points_between(
    widths: Sequence[int], contexts: Sequence[int], count: int, seed: int
) -> list[tuple[int, int]]:
    """Return at most `count` random (width, context) of a grid's range, at no context of it."""
    if contexts[-1] - contexts[0] < 2:
        return []
    rng = np.random.default_rng(seed)
    drawn = rng.integers(widths[0], widths[-1] + 1, count).tolist()
    before = rng.integers(contexts[0] + 1, contexts[-1], count).tolist()
    return [(w, c) for w, c in zip(drawn, before, strict=True) if c not in contexts]


def held_out(cells: pd.DataFrame, table: LatencyTable) -> list[dict[str, Any]]:
    """Return the relative errors of a `table` at the measured `cells`."""
    found = []
    least_s = 1e-9  # on a disturbed machine the difference of two timings can be zero
    for model, phase, batch, width, context, seconds, *_ in rows_of_cells(cells):
        read = table.seconds(model, phase, batch=batch, new_tokens=width, context=context)
        found.append({
            "model": model, "phase": phase, "batch": batch, "width": width, "context": context,
            "seconds": seconds, "error": float(read) / max(seconds, least_s) - 1,
        })  # fmt: skip
    return found


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Return the median and largest |error| of held-out points, and their number."""
    sizes = np.abs(np.asarray(errors, dtype=float))
    if not len(sizes):
        return {"points": 0}
    return {
        "points": len(sizes), "median": float(np.median(sizes)), "largest": float(sizes.max()),
    }  # fmt: skip


def runner_of_mode(mode: str, model: Any, slots: int, batch: int = 1) -> Runner:
    """Return the runner of a mode (`profiler.suite.KERNELS`) for a model."""
    return RUNNERS[mode](model, slots, batch)


@contextmanager
def named_passes(runner: Runner, name: str) -> Iterator[None]:
    """Make every pass of a runner a named range of the profile, inside the block."""

    def within(run: Any, *args: Any, **kwargs: Any) -> Any:
        width = args[0].shape[-1]
        with record_function(f"{name}, {width} wide"):
            return run(*args, **kwargs)

    own: Any = runner
    passes = ("forward", "forward_batch")
    for method in passes:
        setattr(own, method, partial(within, getattr(own, method)))
    try:
        yield
    finally:
        for method in passes:
            delattr(own, method)


def profile_rounds(place: Workplace, name: str, mode: str, models: tuple[Any, Any]) -> Path:
    """Write the kernels of a few rounds as ``profile-NAME-MODE.json``, Chrome's trace format.

    The rounds are those of a dictated run, after one that captures and warms up; every pass is a
    named range.  Opens in Perfetto and chrome://tracing.
    """
    tokens, prompt = (6, 16) if place.quick else (TOKENS, PROMPT)
    trace = dictating_trace(1, tokens, prompt, GAMMA)
    target, draft = (runner_of_mode(mode, model, tokens + prompt + GAMMA + 1) for model in models)
    dictated_run(target, draft, trace, [0], Fixed(GAMMA))
    path = place.out / f"profile-{name}-{mode}.json"
    part = path.with_suffix(".part.json")
    wanted: Sequence[ProfilerActivity] = sorted(supported_activities(), key=str)
    with ExitStack() as stack:
        for runner, role in ((target, "target"), (draft, "draft")):
            stack.enter_context(named_passes(runner, role))
        kept = stack.enter_context(profile(activities=wanted))
        with record_function("rounds"):
            dictated_run(target, draft, trace, [0], Fixed(GAMMA))
    kept.export_chrome_trace(str(part))
    part.replace(path)
    return path
