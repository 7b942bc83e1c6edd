"""Timing of every step of decoding, on this device.

Every cell runs the same code as the decoder, in the order in which decoding runs it.
Repeats are interleaved: each sweep times all cells once in a fresh random order, so that
drift of the machine spreads over all of them instead of biasing some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from policies.arrays import half_iqr
from profiler.machine import NoTimeError, Repeats, Stopwatch, Timing
from traces.acceptance.trace import Request
from traces.errors import DraftsimError
from traces.latency.table import as_cells
from traces.store.checkpoint import Checkpoint

FIRST_WIDTHS = (1, 2, 4)
"""Tokens a round's first draft pass catches up on: one, two after a fully accepted draft,
more after rounds that drafted nothing."""
ROUNDED = 32
"""The longest context and prompt of a cut grid are multiples of this many tokens."""


CellKey = tuple[str, str, int, int, int]
"""Model, phase, batch, new tokens, context."""


@dataclass(frozen=True)
class Grid:
    """The points to measure: tokens fed, tokens in the cache, sequences decoded together.

    ``batches`` above 1 are measured at ``batch_widths``.
    """

    widths: Sequence[int] = (1, 2, 3, 4, 5, 7, 9, 13, 17, 21, 25)
    contexts: Sequence[int] = (32, 128, 256, 512)
    prompts: Sequence[int] = (32, 64, 128, 256)
    batches: Sequence[int] = (1,)
    batch_widths: Sequence[int] = (1, 2, 3, 5, 9, 17, 25)
    repeats: int = 15
    warmup: int = 1
    longest: int = 24
    """Tokens of the longest draft.  Wider passes verify drafts of other sources; at most this many
    draft passes come before them."""

    @property
    def widest(self) -> int:
        """Tokens of the widest pass."""
        return max(*self.widths, *self.batch_widths, *FIRST_WIDTHS)

    def drafting(self, longest: int) -> Grid:
        """Return the grid of a draft model whose drafts have up to `longest` tokens.

        Their verification is measured at every batch size.  Batches have no wider passes.
        """
        further = (longest + 1,) if max(self.widths) <= longest else ()
        within = [w for w in self.batch_widths if w <= longest]
        return replace(
            self, widths=(*self.widths, *further), batch_widths=(*within, longest + 1),
            longest=longest,
        )  # fmt: skip

    def beginning(self, prompt_tokens: int) -> Grid:
        """Return the grid with a first context of `prompt_tokens`, unless it begins earlier."""
        # Half of an encoder-decoder's context is its source, which has a token at least.
        first = max(prompt_tokens, 2)
        if first >= self.contexts[0]:
            return self
        return replace(self, contexts=(first, *self.contexts))

    def reaching(self, prompt_tokens: int, new_tokens: int) -> Grid:
        """Return the grid with points added for prompts of up to `prompt_tokens` and their outputs.

        Contexts double until they hold the longest prompt with its output; prompts are added four
        times as far apart, because prefill is nearly linear in the tokens and long ones take time.
        """
        contexts = reaching(self.contexts, prompt_tokens + new_tokens)
        prompts = list(self.prompts)
        while 4 * prompts[-1] <= prompt_tokens:
            prompts.append(4 * prompts[-1])
        return replace(self, contexts=contexts, prompts=tuple(prompts))

    def covering(self, prompt_tokens: int, new_tokens: int, context: int = 0) -> Grid:
        """Return the grid cut to prompts of up to `prompt_tokens`, their outputs and the drafts.

        It goes on to `context` where that is longer.  Its longest context and prompt are rounded up
        (`ROUNDED`).
        """
        grid = self.reaching(prompt_tokens, new_tokens).reaching(context, 0)
        tokens = max(prompt_tokens + new_tokens + self.longest, context)
        contexts = until(grid.contexts, rounded(tokens))
        prompts = until(grid.prompts, rounded(max(prompt_tokens, context)))
        return replace(grid, contexts=contexts, prompts=prompts)

    def narrow(self) -> Grid:
        """Return the grid without passes wider than the verification of its `longest` draft."""
        return replace(self, widths=until(self.widths, self.longest + 1))

    def holds(self, other: Grid) -> bool:
        """Return True if a table over this grid has, or has points around, the cells of `other`."""
        exactly = ["widths", "batches", *(["batch_widths"] if max(other.batches) > 1 else [])]
        cells = {name: {*getattr(self, name)} for name in (*exactly, "contexts", "prompts")}
        return (
            all(cells[name].issuperset(getattr(other, name)) for name in exactly)
            # A cut grid ends between two points of a longer one.
            and cells["contexts"].issuperset(other.contexts[:-1])
            and cells["prompts"].issuperset(other.prompts[:-1])
            and self.contexts[-1] >= other.contexts[-1]
            and self.prompts[-1] >= other.prompts[-1]
            and self.longest >= other.longest
            and (self.repeats, self.warmup) == (other.repeats, other.warmup)
        )


def reaching(contexts: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return `contexts`, the last one doubled until it holds a request of `tokens` tokens."""
    points = list(contexts)
    while points[-1] < tokens:
        points.append(2 * points[-1])
    return tuple(points)


def sizes_of(requests: Sequence[Request]) -> tuple[int, int]:
    """Return the tokens of the longest prompt, and those of the longest output allowed."""
    return max(r.prompt_length for r in requests), max(r.max_new_tokens for r in requests)


def rounded(tokens: int) -> int:
    """Return `tokens`, rounded up to a multiple of `ROUNDED`."""
    return -(-tokens // ROUNDED) * ROUNDED


def up_to(points: Sequence[int], end: int) -> tuple[int, ...]:
    """Return the points below `end`, then `end`; all points where none is above `end`."""
    end = min(end, points[-1])
    return (*[p for p in points if p < end], end)


def until(points: Sequence[int], end: int) -> tuple[int, ...]:
    """Return the points `up_to` the `end`.

    The first two points are kept where `end` is not above the first, so that sizes between are
    interpolated.

    >>> until((32, 128, 256, 512), 320), until((32, 128), 32), until((32, 128), 400)
    ((32, 128, 256, 320), (32, 128), (32, 128))
    """
    return up_to(points, end) if end > points[0] else tuple(points[:2])


@dataclass(frozen=True)
class Step:
    """One cell, and the call that takes its time."""

    model: str
    phase: str
    new_tokens: int
    context: int
    run: Callable[[], object]
    batch: int = 1

    @property
    def cell(self) -> CellKey:
        """The key of a cell: model, phase, batch, new tokens, context."""
        return self.model, self.phase, self.batch, self.new_tokens, self.context


@dataclass(frozen=True)
class Block:
    """Rounds of steps that follow one another, as in decoding; all but the first are timed.

    Earlier passes decide which weights and code the processor's caches hold, and not only the last
    pass before: `benchmarks.latency_order` shows a target pass that follows
    many draft passes, round after round, to be slower than the same pass among others.

    A cell that occurs several times in a block, or in several blocks, is the mean of all.
    """

    rounds: Sequence[Sequence[Step]]
    untimed: int = 0

    @property
    def batch(self) -> int:
        """Sequences in its steps."""
        return self.rounds[0][0].batch


class Sweeps:
    """Times blocks sweep by sweep; each sweep runs all of them once, in a fresh random order.

    All blocks of a batch size run in a row: directly after another batch size a pass takes up to a
    third longer, until eight such passes have run.

    A disturbed block is run again, within the budget of `repeats`.  If all calls of a cell in a
    block stay disturbed, the seconds count in which they had a processor.

    Parameters
    ----------
    blocks, device: Blocks to time, and the device.
    checkpoint: Keeps every sweep; those it holds already count as done.
    warmup: Untimed calls of every cell before the first sweep.
    check: Called before every cell that is warmed up and every block; it may raise, and only whole
        sweeps count.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        *,
        checkpoint: Checkpoint | None = None,
        warmup: int = 3,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.blocks, self.warmup, self._check = blocks, warmup, check
        self._watch, self._checkpoint, self.repeats = Stopwatch(device), checkpoint, Repeats()
        # A cell may be in several blocks: any of its calls will do to warm up.
        self._steps = {step.cell: step for b in blocks for r in b.rounds for step in r}
        self._place = {cell: i for i, cell in enumerate(self._steps)}
        # The cell of each timing, kept with the seconds: other cells may have as many.
        self._cells = np.array([":".join(map(str, cell)) for cell in self._steps])
        kept = checkpoint.get("latency") if checkpoint else None
        if checkpoint and kept and not np.array_equal(kept.get("cells", ()), self._cells):
            raise DraftsimError(
                f"{checkpoint.folder} holds sweeps over other cells: remove it, or the folder of "
                "the check that it is in, to start again"
            )
        self._samples = kept["samples"] if kept else np.empty((0, len(self._steps)))
        self._rng = np.random.default_rng([0, len(self._samples)])
        self._warm = False
        self._left: list[Block] = []
        self._sums = np.zeros((2, len(self._steps)))  # seconds and calls of the sweep under way

    def __len__(self) -> int:
        """Return the number of sweeps done."""
        return len(self._samples)

    @property
    def steps(self) -> int:
        """Blocks run, over all sweeps."""
        left = len(self._left)
        return len(self) * len(self.blocks) + (len(self.blocks) - left if left else 0)

    def run(self) -> None:
        """Run one sweep, or the rest of an unfinished one."""
        self.step()
        while self._left:
            self.step()

    def step(self) -> None:
        """Run the next block of a sweep."""
        if not self._warm:
            for step in self._steps.values():
                self._check()
                for _ in range(self.warmup):
                    step.run()
            self._warm = True
        if not self._left:
            self._left, self._sums[:] = self._shuffled()[::-1], 0
        self._check()
        block = self._left.pop()
        _, calls = self.repeats.best(lambda: self._time(block))
        for cell, timings in calls.items():
            alone = [t for t in timings if not t.disturbed] or timings
            self._sums[:, self._place[cell]] += sum(t.seconds for t in alone), len(alone)
        if self._left:
            return
        self._samples = np.vstack([self._samples, self._sums[0] / self._sums[1]])
        if self._checkpoint:
            self._checkpoint.put("latency", {"samples": self._samples, "cells": self._cells})

    def _time(self, block: Block) -> tuple[Timing, dict[CellKey, list[Timing]]]:
        """Return all timed calls of a block, and each cell's."""
        whole, calls = Timing(0.0), dict[CellKey, list[Timing]]()
        for number, steps in enumerate(block.rounds):
            timings = self._watch.each([step.run for step in steps])
            if number >= block.untimed:
                for step, taken in zip(steps, timings, strict=True):
                    whole += taken
                    calls.setdefault(step.cell, []).append(taken)
        return whole, calls

    def _shuffled(self) -> list[Block]:
        groups: dict[int, list[Block]] = {}
        for block in self.blocks:
            groups.setdefault(block.batch, []).append(block)
        sizes = self._rng.permutation(list(groups)).tolist()
        return [groups[n][i] for n in sizes for i in self._rng.permutation(len(groups[n]))]

    def cells(self) -> pd.DataFrame:
        """Return rows as in `traces.latency.table`: means and half interquartile ranges."""
        return rows_of_samples(list(self._steps), self._samples)


def swept(
    blocks: Sequence[Block], device: torch.device, repeats: int, *, warmup: int = 3,
    check: Callable[[], None] = lambda: None, late: Callable[[], bool] = lambda: False,
) -> pd.DataFrame:  # fmt: skip
    """Return the cells of `blocks` from `repeats` sweeps, or fewer once it is `late`, one at least.

    Raises NoTimeError, as `check` does (`Sweeps`), if there was no time for one.
    """
    sweeps = Sweeps(blocks, device, warmup=warmup, check=check)
    try:
        while len(sweeps) < repeats and not (len(sweeps) and late()):
            sweeps.run()
    except NoTimeError:
        if not len(sweeps):
            raise
    return sweeps.cells()


def rows_of_samples(cells: Sequence[CellKey], samples: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Return rows as in `traces.latency.table` from samples of shape (repeats, cells), seconds.

    They are means, because decoding takes the sum of its passes, slow ones included; on a machine
    that is slow now and then the median would leave these out.
    """
    rows = zip(cells, samples.mean(axis=0), half_iqr(samples), strict=True)
    return as_cells([(*cell, mean, spread, len(samples)) for cell, mean, spread in rows])
