"""Measures one pair in one mode: forward passes, layers, batches, and the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from profiler.architectures import Architecture, PairShape
from profiler.runner import Runner
from profiler.suite.environment import NoTimeError, Workplace
from profiler.suite.grids import Grids
from profiler.suite.layers import layer_cells
from profiler.suite.memory import fitting_contexts
from profiler.suite.passes import (
    Timer,
    cell,
    choice_parts,
    fill,
    forward_call,
    make_runner,
    prefill_cells,
    table_of,
)
from profiler.suite.points import Point, Refiner, error_summary, held_out
from profiler.suite.rounds import host_cells
from traces.errors import DraftsimError

Measure = Callable[[Point], list[Any]]
"""Times the pass at a point: its row of `traces.latency.CELL_COLUMNS`."""

FINDINGS = ("cells", "held_out", "parts", "skipped", "drift")
NO_TIME = ": no time left"

TOLERANCE = 0.02
"""Interpolation error that a gap between grid points may have."""


class PairMeasurement:
    """Everything measured of one pair in one mode, in order of importance.

    Each piece adds to `cells`; a piece that does not fit in memory or time is left out and
    named in `skipped`, those that time left out in `unfinished` too.  With ``kept``, the `unit`
    of an earlier run, only the latter are measured.
    """

    def __init__(
        self, place: Workplace, pair: PairShape, mode: str, models: tuple[Any, Any], grids: Grids,
        deadline: float, kept: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.place, self.pair, self.mode, self.grids = place, pair, mode, grids
        self.models = {"target": models[0], "draft": models[1]}
        self.shapes = {"target": pair.target, "draft": pair.draft}
        self.deadline = deadline
        self.timer = Timer(place.device, grids.repeats, grids.enough_s)
        before = kept or {}
        self.cells, self.held_out, self.parts, self.skipped, self.drift = self._all = tuple(
            list(before.get(name, ())) for name in FINDINGS
        )
        self.skipped[:] = [text for text in self.skipped if not text.endswith(NO_TIME)]
        self.unfinished: list[str] = []
        self._piece = ""
        self._wanted: list[str] | None = before.get("unfinished")

    @property
    def late(self) -> bool:
        """Whether this pair's share of the time is spent."""
        return time.monotonic() > self.deadline

    def run(self) -> None:
        """All pieces; what remains when time is up is named in `skipped`."""
        names = [name for name, model in self.models.items() if model is not None]
        pieces: list[tuple[str, Callable[[], None]]] = [
            *((f"{n}, batch 1", partial(self.single, n)) for n in names),
            *((f"{n}, layer by layer", partial(self.layers, n)) for n in names),
        ]
        if len(names) == 2:
            pieces += [
                (f"batch {b} and the host", partial(self.batch, b))
                for b in self.grids.batches if b in self.grids.host_batches
            ]  # fmt: skip
            pieces[2:2] = [
                ("first draft passes, batch 1", partial(self.first_passes, 1)),
                ("the host at batch 1", partial(self.host, 1)),
            ]
        hosted = self.grids.host_batches if len(names) == 2 else ()
        pieces += [
            (f"batch {b}", partial(self.batch, b))
            for b in self.grids.batches if b not in hosted
        ]  # fmt: skip
        pieces += [
            (f"between, batch {b}", partial(self.batch, b, check=True)) for b in self.grids.between
        ]
        for name, piece in pieces:
            if self._wanted is not None and name not in self._wanted:
                continue
            if self.late:
                self._leave(name)
                continue
            self._piece, held = name, [len(some) for some in self._all]
            try:
                piece()
            except NoTimeError:
                for some, count in zip(self._all, held, strict=True):
                    del some[count:]  # another run measures the piece as a whole
                self._leave(name)
            except torch.OutOfMemoryError:
                self.skipped.append(f"{name}: out of memory")
            except (DraftsimError, RuntimeError) as error:
                # A driver's error ends this piece; what was measured before it is kept.
                self.skipped.append(f"{name}: {str(error).splitlines()[0]}")
            self.place.release()

    def _leave(self, name: str) -> None:
        self.skipped.append(name + NO_TIME)
        self.unfinished.append(name)

    def single(self, name: str) -> None:
        """Batch 1: prefill, the adaptive grid, and what happens to the logits."""
        grids, shape = self.grids, self._shape(name)
        widths = grids.widths if name == "target" else (1, 2)
        contexts = self._contexts(shape, grids.contexts, 1, max(widths), name)
        runner = self._runner(name, max(contexts) + max(widths), 1)
        lengths = [n for n in grids.prompts if n <= runner.cache.slots]
        self.cells += prefill_cells(runner, name, lengths, self.timer)
        fill(runner)
        samples = self._refined(
            f"{name}, batch 1", widths, contexts, partial(self._forward, runner, name, 1)
        )
        first = Point(widths[0], contexts[0])
        self.drift.append(self._forward(runner, name, 1, first)[5] / samples[first][5] - 1)
        self.parts += [{"model": name, **part} for part in choice_parts(runner, self.timer)]

    def first_passes(self, batch: int) -> None:
        """Draft passes behind the target's, over the tokens that the draft has yet to see."""
        grids, shape = self.grids, self._shape("draft")
        target = self._runner("target", grids.loop_prompt + 1, batch)
        fill(target)
        widths = grids.first_widths if batch == 1 else grids.first_widths[:2]
        contexts = self._contexts(shape, grids.contexts, batch, max(widths), "draft")
        runner = self._runner("draft", max(contexts) + max(widths), batch)
        fill(runner)
        before = forward_call(target, batch, 1, grids.loop_prompt, drafts=False)

        def measure(at: Point) -> list[Any]:
            run = forward_call(runner, batch, *at, drafts=True)
            return cell(
                "draft", "catch_up", batch, at.width, at.context, self.timer.behind(before, run)
            )

        if batch == 1:
            self._refined("first draft passes, batch 1", widths, contexts, measure)
        else:
            self.cells += self._lines(widths, contexts, measure)

    def layers(self, name: str) -> None:
        """Single layers and the output head; with exit heads where there is no draft."""
        exits = self.models["draft"] is None
        grids, shape = self.grids, self._shape(name)
        widths = grids.widths if exits else grids.widths[:4:3]
        contexts = self._contexts(shape, grids.contexts[:3], 1, max(widths), name)
        self.cells += layer_cells(
            self.mode, self.models[name], name, widths, contexts, self.timer, exits=exits,
            check_time=self.place.check_time,
        )  # fmt: skip

    def host(self, batch: int) -> None:
        """Host time per round and drafted token in whole rounds, and that of reading signals."""
        grids = self.grids
        slots = grids.loop_prompt + grids.loop_tokens
        target, draft = (self._runner(n, slots, batch) for n in ("target", "draft"))
        passes = [row for row in self.cells if row[1] in ("forward", "catch_up")]
        self.cells += host_cells(
            target, draft, table_of(passes), batch=batch, repeats=min(3, grids.repeats),
            tokens=grids.loop_tokens, prompt=grids.loop_prompt, gammas=grids.gammas,
            late=lambda: self.late, check_time=self.place.check_time,
        )  # fmt: skip

    def batch(self, batch: int, check: bool = False) -> None:
        """Forward cells at a batch size, or points held out between two of them."""
        grids = self.grids
        for name, model in self.models.items():
            if model is None:
                continue
            shape = self._shape(name)
            widths = grids.batch_widths if name == "target" else (1, 2)
            wanted = grids.batch_contexts[:2] if check else grids.batch_contexts
            contexts = self._contexts(shape, wanted, batch, max(widths), name)
            runner = self._runner(name, max(contexts) + max(widths), batch)
            fill(runner)
            rows = self._lines(widths, contexts, partial(self._forward, runner, name, batch))
            if check:
                rows = self._check(rows)
            self.cells += rows
            del runner
            self.place.release()
        if check or self.models["draft"] is None:
            return
        if not self.late:
            self.first_passes(batch)
            self.place.release()
        if batch in grids.host_batches:
            self.host(batch)

    def _check(self, rows: list[list[Any]]) -> list[list[Any]]:
        """Book points between batches as held out; those that miss the tolerance join the grid."""
        table = table_of([c for c in self.cells if c[1] == "forward"])
        errors = []
        for name, _, batch, width, context, median, *_ in rows:
            read = table.seconds(name, "forward", batch=batch, new_tokens=width, context=context)
            errors.append(float(read) / median - 1)
        if any(abs(e) > TOLERANCE for e in errors):
            return rows
        self.held_out += held_out(rows, errors, False)
        return []

    def _refined(
        self, label: str, widths: Sequence[int], contexts: Sequence[int], measure: Measure
    ) -> dict[Point, list[Any]]:
        """Cells of as many points as interpolation needs, added to `cells`; all measured."""
        refiner = Refiner(widths, contexts, TOLERANCE, self.grids.least_gap)
        samples: dict[Point, list[Any]] = {}
        while (at := refiner.next()) is not None:
            if self.late and refiner.coarse_done:
                break
            self.place.check_time()
            samples[at] = measure(at)
            refiner.tell(samples[at][5])
        self.cells += [samples[at] for at in refiner.grid()]
        apart = refiner.held_out
        self.held_out += held_out([samples[at] for at in apart], apart.values(), False)
        if refiner.unchecked:
            self.skipped.append(f"{label}: {refiner.unchecked} gaps not checked in time")
        self._check_at_random(refiner, measure)
        return samples

    def _check_at_random(self, refiner: Refiner, measure: Measure) -> None:
        """Interpolation errors at points that had no part in choosing the grid.

        A middle that misses the tolerance joins the grid, so those left out always meet it:
        only points that stay out whatever their error is tell what reading the table is off by.
        """
        grid = [("any", "forward", 1, *at, s, 0.0, 1) for at, s in refiner.grid().items()]
        table = table_of(grid)
        rows, errors = [], []
        for at in refiner.at_random(self.grids.random_points):
            if self.late:
                break
            rows.append(measure(at))
            read = table.seconds("any", "forward", new_tokens=at.width, context=at.context)
            errors.append(float(read) / rows[-1][5] - 1)
        self.held_out += held_out(rows, errors, True)

    def _lines(
        self, widths: Sequence[int], contexts: Sequence[int], measure: Measure
    ) -> list[list[Any]]:
        """Cells of every width whose line of contexts was complete in time."""
        rows: list[list[Any]] = []
        points = [Point(w, c) for w in widths for c in contexts]
        for at in points:
            if self.late:
                done = f"{len(rows)} of {len(points)} points in time"
                self.skipped.append(f"{self._piece}: {done}")
                break
            rows.append(measure(at))
        return [r for r in rows if sum(q[3] == r[3] for q in rows) == len(contexts)]

    def _forward(self, runner: Runner, name: str, batch: int, at: Point) -> list[Any]:
        run = forward_call(runner, batch, *at, drafts=name == "draft")
        return cell(name, "forward", batch, at.width, at.context, self.timer.time(run))

    def _shape(self, name: str) -> Architecture:
        shape = self.shapes[name]
        assert shape is not None
        return shape

    def _contexts(
        self, shape: Architecture, wanted: Sequence[int], batch: int, width: int, name: str
    ) -> list[int]:
        """The contexts that fit; names the others, and raises DraftsimError if those are all."""
        kept, why = fitting_contexts(self.place, shape, wanted, batch, width)
        self.skipped += [f"{name}, batch {batch}, {text}" for text in why]
        if not kept:
            raise DraftsimError(f"no context of {tuple(wanted)} fits at batch {batch}")
        return kept

    def _runner(self, name: str, slots: int, batch: int) -> Runner:
        return make_runner(self.mode, self.models[name], slots, batch)

    def unit(self) -> dict[str, Any]:
        """What is kept of this measurement."""
        errors = {
            kind: error_summary([h["error"] for h in self.held_out if h["random"] is drawn])
            for kind, drawn in (("held_out_error", False), ("random_error", True))
        }
        found = dict(zip(FINDINGS, self._all, strict=True))
        return {**found, **errors, "unfinished": self.unfinished}
