"""Measures one pair in one mode: forward passes, layers, batches, and the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from profiler.latency.table import FIRST_WIDTHS
from profiler.models.architectures import Architecture, PairShape
from profiler.models.runner import Runner
from profiler.suite.environment import NoTimeError, Workplace, reason
from profiler.suite.latency.passes import (
    COMPILED,
    Timer,
    cell,
    choice_parts,
    fill,
    forward_call,
    host_cells,
    layer_cells,
    make_runner,
    prefill_cells,
    table_of,
)
from profiler.suite.latency.points import (
    Passes,
    PassGrid,
    Point,
    error_summary,
    held_out,
    read_again,
    reading_errors,
)
from traces.errors import DraftsimError

REPEATS = 5


class Grids:
    """The coarse grids by batch; `quick` for a CPU in seconds.

    Host time is a fit of two numbers, for which three draft lengths are enough, and in miniatures
    two: whole runs cost the most.  A miniature's times are not used, so each is measured once.
    """

    def __init__(self, quick: bool) -> None:
        self.widths: Sequence[int] = (1, 2, 4) if quick else (1, 2, 3, 5, 9, 17, 25)
        self.contexts: Sequence[int] = (16, 48) if quick else (128, 1024, 4096, 16384)
        # As wide as at batch 1: policies draft as far in a batch as alone.
        self.batch_widths: Sequence[int] = (1, 3) if quick else (1, 3, 9, 17, 25)
        self.batch_contexts: Sequence[int] = (16, 48) if quick else (128, 1024, 4096, 16384)
        self.batches: Sequence[int] = (4,) if quick else (4, 16, 64)
        self.first_widths: Sequence[int] = (1, 2) if quick else FIRST_WIDTHS
        self.between: Sequence[int] = (2,) if quick else (2, 8, 32)
        self.prompts: Sequence[int] = (16, 64) if quick else (64, 256, 1024, 4096)
        self.host_batches: Sequence[int] = (1, 4) if quick else (1, 4, 16)
        self.gammas: Sequence[int] = (0, 2) if quick else (0, 2, 8)
        self.random_points = 1 if quick else 4
        self.least_gap = 16 if quick else 128
        self.repeats = 1 if quick else REPEATS
        self.enough_s = 0.0 if quick else 0.008
        self.loop_tokens = 6 if quick else 24
        self.loop_prompt = 16 if quick else 64

    def points(self, model: str, phase: str, batch: int) -> tuple[Sequence[int], Sequence[int]]:
        """Widths and contexts of the coarse grid of a model's passes at a batch size."""
        widths = self.widths if batch == 1 else self.batch_widths
        if phase == "catch_up":
            widths = self.first_widths if batch == 1 else self.first_widths[:2]
        elif model == "draft":
            widths = (1, 2)
        return widths, self.contexts if batch == 1 else self.batch_contexts


FINDINGS = ("cells", "held_out", "parts", "skipped", "drift")
NO_TIME, FAILED = ": no time left", ": failed: "

TOLERANCE = 0.02
"""Interpolation error that a gap between grid points may have."""

FINER_SHARE = 0.15
"""Part of the time left that refining one grid may take: noise alone keeps it going."""


SINGLE, BATCHED, WANTED = range(3)
"""Ranks of pieces: what every prediction needs, what batches need, and what makes it better."""
RANKS = (SINGLE, BATCHED, WANTED)


class Piece(NamedTuple):
    """Something measured as a whole, or not at all."""

    name: str
    rank: int
    run: Callable[[], None]

    @property
    def kind(self) -> str:
        """The name that it shares with the same measurement at other batch sizes."""
        return self.name.rpartition("batch")[0]


class LimitError(DraftsimError):
    """A point that the device's memory or the model's context rules out."""


class PairMeasurement:
    """Everything measured of one pair in one mode, in order of importance.

    Each piece adds to `cells`.  One that the memory does not hold is named in `skipped`; those
    not measured, or not wholly, for want of time or because they `failed`, are `unfinished`.  With
    ``kept``, the `unit` of an earlier run, only the latter are measured.  Pieces of rank SINGLE
    are measured whatever the `deadline` of the pair, until the stage's own time is spent.
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
        self.skipped[:] = [
            text for text in self.skipped if not text.endswith(NO_TIME) and FAILED not in text
        ]
        self.failed: dict[str, str] = {}
        wanted = before.get("unfinished")
        self._left = [p for p in self._pieces() if wanted is None or p.name in wanted]
        self._now: Piece | None = None
        self._took: dict[str, float] = {}

    @property
    def late(self) -> bool:
        """Return True if this pair's share of the time is spent."""
        return time.monotonic() > self.deadline or self.place.left <= 0

    @property
    def unfinished(self) -> list[str]:
        """Pieces that are yet to be measured."""
        return [piece.name for piece in self._left]

    def run(self, rank: int | None = None) -> None:
        """Every piece that is left, or those of one rank, as far as the time goes."""
        for piece in [p for p in self._left if rank in (None, p.rank)]:
            self._now, held = piece, [len(some) for some in self._all]
            begin = time.monotonic()
            try:
                # What its like took at a smaller batch is the least that it takes.
                self._check(self._took.get(piece.kind, 0.0))
                piece.run()
                self._left.remove(piece)
                self._took[piece.kind] = time.monotonic() - begin
            except NoTimeError:
                self._undo(held)
            except torch.OutOfMemoryError:
                self._skip(piece, "out of memory")
            except LimitError as error:
                self._skip(piece, reason(error))
            except (DraftsimError, RuntimeError) as error:
                # A driver's error ends this piece; what was measured before it is kept.
                self._undo(held)
                self.failed[piece.name] = reason(error)
                self.place.say(
                    f"FAILED {self.pair.name}.{self.mode}, {piece.name}: {reason(error)}"
                )
            self.place.release()

    def _pieces(self) -> list[Piece]:
        """Return everything to measure, most important first."""
        grids = self.grids
        names = [name for name, model in self.models.items() if model is not None]
        paired = len(names) == 2
        hosted = [b for b in grids.host_batches if paired and (b == 1 or b in grids.batches)]

        def at(batch: int, rank: int) -> list[Piece]:
            found = [Piece(f"{n}, batch {batch}", rank, partial(self.coarse, n, batch))
                     for n in names]  # fmt: skip
            if paired:
                name = f"first draft passes, batch {batch}"
                first = partial(self.coarse, "draft", batch, "catch_up")
                found.append(Piece(name, rank, first))
            if batch in hosted:
                run = partial(self.host, batch)
                found.append(Piece(f"the host at batch {batch}", rank, run))
            return found

        def finer(*wanted: Passes) -> list[Piece]:
            return [
                Piece(f"finer: {of.model}, {of.phase}, batch {of.batch}", WANTED,
                      partial(self.finer, of)) for of in wanted
            ]  # fmt: skip

        def between(batch: int) -> Piece:
            return Piece(f"between, batch {batch}", WANTED, partial(self.between, batch))

        layers = [
            Piece(f"{n}, layer by layer", WANTED if paired else BATCHED, partial(self.layers, n))
            for n in names if self.mode != COMPILED  # which compiles no layer by itself
        ]  # fmt: skip
        first = [Passes("draft", "catch_up", 1)] if paired else []
        pieces = at(1, SINGLE)
        pieces += [piece for b in grids.batches if b in hosted for piece in at(b, BATCHED)]
        pieces += layers + finer(*first, *(Passes(n, "forward", 1) for n in names))
        pieces += [piece for b in grids.batches if b not in hosted for piece in at(b, WANTED)]
        pieces += [between(b) for b in grids.between]
        pieces += finer(*(Passes("target", "forward", b) for b in grids.batches))
        return pieces

    def _undo(self, held: Sequence[int]) -> None:
        """Forget what a piece found: another run measures it as a whole."""
        for some, count in zip(self._all, held, strict=True):
            del some[count:]

    def _skip(self, piece: Piece, why: str) -> None:
        self.skipped.append(f"{piece.name}: {why}")
        self._left.remove(piece)

    def _check(self, ahead: float = 0.0) -> None:
        """Raise NoTimeError once the piece under way has no time any more, or not so long."""
        self.place.check_time()
        late = self.late or time.monotonic() + ahead > self.deadline
        if late and self._now is not None and self._now.rank != SINGLE:
            raise NoTimeError("no time left")

    def coarse(self, name: str, batch: int, phase: str = "forward") -> None:
        """The coarse grid, and points at random within it; at batch 1 prompts and choices too."""
        grids, alone = self.grids, batch == 1 and phase == "forward"
        of = Passes(name, phase, batch)
        grid, runner = self._grid(of)
        if alone:
            lengths = [n for n in grids.prompts if n <= runner.cache.slots]
            self.cells += prefill_cells(runner, name, lengths, self.timer)
            fill(runner)
        rows = grid.coarse(self._check)
        self.cells += rows
        self.held_out += grid.at_random(grids.random_points, self._check)
        if alone:
            first = rows[0]
            self.drift.append(grid.measure(Point(first[3], first[4]))[5] / first[5] - 1)
            self.parts += [{"model": name, **part} for part in choice_parts(runner, self.timer)]

    def finer(self, of: Passes) -> None:
        """Add points until interpolation needs no more, or the time is up."""
        if not self._has(of):
            self._lacks(of)
        grid, _ = self._grid(of)
        until = time.monotonic() + FINER_SHARE * (self.deadline - time.monotonic())
        rows, middles, unchecked = grid.finer(lambda: self.late or time.monotonic() > until)
        self.cells += rows
        self.held_out += middles
        if unchecked:
            assert self._now is not None
            # What was found is kept, and another run goes on from there.
            self._left.append(self._now)

    def between(self, batch: int) -> None:
        """Points between two batch sizes: held out, or a grid of their own if they are missed."""
        for name, model in self.models.items():
            if model is None:
                continue
            for near in self._neighbours(batch):
                if not self._has(Passes(name, "forward", near)):
                    self._lacks(Passes(name, "forward", near))
            grid, _ = self._grid(Passes(name, "forward", batch))
            few = grid.coarse(self._check, grid.contexts[:2])
            errors = reading_errors(few, [c for c in self.cells if c[1] == "forward"])
            if all(abs(e) <= TOLERANCE for e in errors):
                self.held_out += held_out(few, errors, False)
            else:
                self.cells += [*few, *grid.coarse(self._check)]
            del grid
            self.place.release()

    def _neighbours(self, batch: int) -> list[int]:
        """The batch sizes measured as a matter of course that are next to `batch`."""
        sizes = (1, *self.grids.batches)
        above = min((b for b in sizes if b > batch), default=None)
        return [max(b for b in sizes if b < batch), *([] if above is None else [above])]

    def layers(self, name: str) -> None:
        """Single layers and the output head; with exit heads where there is no draft."""
        exits = self.models["draft"] is None
        grids, shape = self.grids, self._shape(name)
        widths = grids.widths if exits else grids.widths[:4:3]
        contexts = self._contexts(shape, grids.contexts[:3], 1, max(widths), name)
        self.cells += layer_cells(
            self.mode, self.models[name], name, widths, contexts, self.timer, exits=exits,
            check_time=self._check,
        )  # fmt: skip

    def host(self, batch: int) -> None:
        """Host time per round and drafted token in whole rounds, and that of reading signals.

        What passes do not explain is the host's share, so all passes must be there first.
        """
        for of in (("target", "forward"), ("draft", "forward"), ("draft", "catch_up")):
            if not self._has(Passes(*of, batch)):
                self._lacks(Passes(*of, batch))
        grids = self.grids
        slots = grids.loop_prompt + grids.loop_tokens
        target, draft = (self._runner(n, slots, batch) for n in ("target", "draft"))
        passes = [row for row in self.cells if row[1] in ("forward", "catch_up")]
        self.cells += host_cells(
            target, draft, table_of(passes), batch=batch, repeats=min(3, grids.repeats),
            tokens=grids.loop_tokens, prompt=grids.loop_prompt, gammas=grids.gammas,
            late=lambda: self.late, check_time=self.place.check_time,
        )  # fmt: skip

    def _grid(self, of: Passes) -> tuple[PassGrid, Runner]:
        """The grid of some passes, and the runner that they run on, its cache filled."""
        grids, (name, phase, batch) = self.grids, of
        widths, wanted = grids.points(*of)
        before: Callable[[], object] | None = None
        if phase == "catch_up":
            target = self._runner("target", grids.loop_prompt + 1, batch)
            fill(target)
            before = forward_call(target, batch, 1, grids.loop_prompt, drafts=False)
        contexts = self._contexts(self._shape(name), wanted, batch, max(widths), name)
        runner = self._runner(name, max(contexts) + max(widths), batch)
        fill(runner)

        def measure(at: Point) -> list[Any]:
            run = forward_call(runner, batch, *at, drafts=name == "draft")
            taken = self.timer.time(run) if before is None else self.timer.following(before, run)
            return cell(name, phase, batch, at.width, at.context, taken)

        grid = PassGrid(
            of, widths, contexts, measure, tolerance=TOLERANCE, least_gap=grids.least_gap,
            known=self.cells, booked=self.held_out,
        )  # fmt: skip
        return grid, runner

    def _has(self, of: Passes) -> bool:
        return any(Passes(*row[:3]) == of for row in self.cells)

    def _lacks(self, of: Passes) -> None:
        """Raise NoTimeError if these passes are still to be measured, else LimitError."""
        part = "first draft passes" if of.phase == "catch_up" else of.model
        if f"{part}, batch {of.batch}" in self.unfinished:
            raise NoTimeError("no time left")
        raise LimitError(f"no {of.phase} passes of the {of.model} at batch {of.batch}")

    def _shape(self, name: str) -> Architecture:
        shape = self.shapes[name]
        assert shape is not None
        return shape

    def _contexts(
        self, shape: Architecture, wanted: Sequence[int], batch: int, width: int, name: str
    ) -> list[int]:
        """Return the contexts that the memory and the model hold before passes of `width` tokens.

        The others are named in `skipped`.  Raises LimitError if those are all.
        """
        room = self.place.free_bytes()
        kept: list[int] = []
        why: list[str] = []
        for asked in wanted:
            context = min(asked, shape.positions - width)
            if context < asked:
                why.append(f"context {asked}: the model's context is {shape.positions}")
            # Cache, attention's copies of one layer, the logits, and the causal matrix.
            values = batch * (context + width) * shape.kv_values * (1 + 8 / shape.layers)
            values += 3 * batch * width * shape.vocab_size + context**2 / 2
            if values * self.place.dtype.itemsize > 0.9 * room:
                why.append(f"context {context}: the memory does not hold its cache")
            elif context not in kept:
                kept.append(context)
        named = [f"{name}, batch {batch}, {text}" for text in why]
        self.skipped += [text for text in named if text not in self.skipped]
        if not kept:
            raise LimitError(f"no context of {tuple(wanted)} fits at batch {batch}")
        return kept

    def _runner(self, name: str, slots: int, batch: int) -> Runner:
        return make_runner(self.mode, self.models[name], slots, batch)

    def unit(self) -> dict[str, Any]:
        """Return what is kept of this measurement."""
        self.held_out[:] = read_again(self.held_out, self.cells)
        errors = {
            kind: error_summary([h["error"] for h in self.held_out if h["random"] is drawn])
            for kind, drawn in (("held_out_error", False), ("random_error", True))
        }
        found = dict(zip(FINDINGS, self._all, strict=True))
        why = dict.fromkeys(self.unfinished, NO_TIME)
        why |= {name: FAILED + text for name, text in self.failed.items()}
        skipped = [*self.skipped, *(name + text for name, text in why.items())]
        return {
            **found, **errors, "skipped": skipped, "unfinished": self.unfinished,
            "failed": self.failed,
        }  # fmt: skip
