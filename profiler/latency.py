"""Measures how long each step of decoding takes, on the device in front of you.

Every cell runs the very code the decoder runs, in the order in which decoding runs it.
Repeats are interleaved: each sweep times all cells once in a fresh random order, so that
drift of the machine spreads over all of them instead of biasing some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from profiler.checkpoint import Checkpoint
from traces.latency import CELL_COLUMNS, LatencyTable

FIRST_WIDTHS = (1, 2, 4)
"""Tokens a round's first draft pass catches up on: one, two after a fully accepted draft,
more after rounds that drafted nothing."""


@dataclass(frozen=True)
class Grid:
    """The points to measure: tokens fed, tokens in the cache, sequences decoded together.

    ``batches`` above 1 are measured by `profiler.batch_latency`, at ``batch_widths``.
    """

    widths: Sequence[int] = (1, 2, 3, 4, 5, 7, 9, 13, 17, 21, 25)
    contexts: Sequence[int] = (32, 128, 256, 512)
    prompts: Sequence[int] = (32, 64, 128, 256)
    batches: Sequence[int] = (1,)
    batch_widths: Sequence[int] = (1, 2, 3, 5, 9, 17, 25)
    repeats: int = 15
    warmup: int = 3

    @property
    def widest(self) -> int:
        """Tokens of the widest pass."""
        return max(*self.widths, *self.batch_widths, *FIRST_WIDTHS)


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
    def cell(self) -> tuple[str, str, int, int, int]:
        """What tells cells apart: model, phase, batch, new tokens, context."""
        return self.model, self.phase, self.batch, self.new_tokens, self.context


@dataclass(frozen=True)
class Block:
    """Rounds of steps that follow one another, as in decoding; all but the first are timed.

    What ran before decides what the processor's caches hold, of weights and of code, and not
    only what ran just before: `benchmarks.latency_order` shows a target pass that follows
    many draft passes, round after round, to be slower than the same pass among others.

    A cell that occurs several times in a block, or in several blocks, is the mean of all.
    """

    rounds: Sequence[Sequence[Step]]
    untimed: int = 0

    @property
    def batch(self) -> int:
        """Sequences in its steps."""
        return self.rounds[0][0].batch


class Stopwatch:
    """Seconds a call takes on a device: host clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def time(self, run: Callable[[], object]) -> float:
        """Run once; the device is idle before and after."""
        if not self._cuda:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class Sweeps:
    """Times blocks sweep by sweep; each sweep runs all of them once, in a fresh random order.

    The batch sizes take turns, each with all of its blocks: behind passes over another batch a
    pass takes up to a third longer, and eight of its kind to settle.

    Parameters
    ----------
    blocks, device:
        What to time, and where.
    checkpoint:
        Keeps every sweep; those it holds already count as done.
    warmup:
        Untimed calls of every cell before the first sweep.
    seed:
        Of the order.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        *,
        checkpoint: Checkpoint | None = None,
        warmup: int = 3,
        seed: int = 0,
    ) -> None:
        self.blocks, self.warmup = blocks, warmup
        self._watch, self._checkpoint = Stopwatch(device), checkpoint
        # A cell may be in several blocks: any of its calls will do to warm up.
        self._steps = {step.cell: step for b in blocks for r in b.rounds for step in r}
        self._place = {cell: i for i, cell in enumerate(self._steps)}
        kept = checkpoint.get("latency") if checkpoint else None
        self._samples = kept["samples"] if kept else np.empty((0, len(self._steps)))
        self._rng = np.random.default_rng([seed, len(self._samples)])
        self._warm = False

    def __len__(self) -> int:
        """Sweeps done."""
        return len(self._samples)

    def run(self) -> None:
        """One sweep."""
        if not self._warm:
            for step in self._steps.values():
                for _ in range(self.warmup):
                    step.run()
            self._warm = True
        seconds, count = np.zeros(len(self._steps)), np.zeros(len(self._steps))
        for block in self._shuffled():
            for number, steps in enumerate(block.rounds):
                for step in steps:
                    taken = self._watch.time(step.run)
                    if number >= block.untimed:
                        seconds[self._place[step.cell]] += taken
                        count[self._place[step.cell]] += 1
        self._samples = np.vstack([self._samples, seconds / count])
        if self._checkpoint:
            self._checkpoint.put("latency", {"samples": self._samples})

    def _shuffled(self) -> list[Block]:
        groups: dict[int, list[Block]] = {}
        for block in self.blocks:
            groups.setdefault(block.batch, []).append(block)
        sizes = self._rng.permutation(list(groups)).tolist()
        return [groups[n][i] for n in sizes for i in self._rng.permutation(len(groups[n]))]

    def cells(self) -> pd.DataFrame:
        """Rows as in `traces.latency`: the median over sweeps, half their interquartile range."""
        low, median, high = np.quantile(self._samples, [0.25, 0.5, 0.75], axis=0)
        rows = [
            (*cell, median[i], (high[i] - low[i]) / 2, len(self))
            for i, cell in enumerate(self._steps)
        ]
        return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def table(parts: Sequence[pd.DataFrame], meta: dict[str, Any]) -> LatencyTable:
    """One latency table from measured parts."""
    return LatencyTable(pd.concat(parts, ignore_index=True), meta)
