"""Measures an engine's latency table: sweeps over the grid, repeats, and points in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from profiler.engines.bench import Bench, Sample
from profiler.engines.engine import Engine
from profiler.engines.plan import Cell, Grid
from profiler.engines.table import (
    DISTURBED,
    cells_of,
    follows,
    held_out_errors,
    host_parts,
    quiet,
    usual_control_s,
)
from profiler.recording.checkpoint import Checkpoint
from traces.latency.table import LatencyTable

REPEATS = 2
"""Times that a block with disturbed cells is measured again, at most."""
HELD_OUT = 2
"""Times that the held-out cells are measured."""


class _Measured:
    """Timed iterations of one engine by cell, and the table that they make."""

    def __init__(self, engine: Engine, grid: Grid, seed: int, kept: Checkpoint | None) -> None:
        self.grid, self.meta, self._kept = grid, engine.meta, kept
        self._bench, self._rng = Bench(engine, seed), np.random.default_rng(seed)
        self.samples: dict[Cell, list[Sample]] = {}
        self._took_s: dict[int, float] = {}

    def _visited(self, name: str, cells: list[Cell]) -> dict[Cell, list[Sample]]:
        """A block's samples: those kept under `name`, or measured now, and kept."""
        found = self._restored(name)
        if found is None:
            began = time.perf_counter()
            found = self._bench.block(cells, self.grid.steps)
            self._took_s[cells[0].batch] = (time.perf_counter() - began) / len(cells)
            self._store(name, found)
        return found

    def _restored(self, name: str) -> dict[Cell, list[Sample]] | None:
        kept = None if self._kept is None else self._kept.get(name)
        if kept is None:
            return None
        found: dict[Cell, list[Sample]] = {}
        for kind, sizes, row in zip(kept["kinds"], kept["sizes"], kept["samples"], strict=True):
            cell = Cell(str(kind), *map(int, sizes))  # type: ignore[arg-type]
            seconds, context, base_s, control_s, *parts = row.tolist()
            sample = Sample(seconds, tuple(parts), context, base_s, control_s)
            found.setdefault(cell, []).append(sample)
        return found

    def _store(self, name: str, found: dict[Cell, list[Sample]]) -> None:
        if self._kept is None:
            return
        flat = [(cell, s) for cell, own in found.items() for s in own]
        self._kept.put(name, {
            "kinds": np.array([c.kind for c, _ in flat]),
            "sizes": np.array([c[1:] for c, _ in flat]),
            "samples": np.array([
                (s.seconds, s.context, s.base_s, s.control_s, *s.parts) for _, s in flat
            ]),
        })  # fmt: skip

    def _add(self, found: Mapping[Cell, Sequence[Sample]]) -> None:
        for cell, own in found.items():
            self.samples.setdefault(cell, []).extend(own)

    def _table(
        self, kept: Mapping[Cell, Sequence[Sample]], errors: Mapping[Cell, float]
    ) -> LatencyTable:
        """Return the table of the samples `kept`; `errors`: relative errors on held-out cells."""
        controls = [s.control_s for own in self.samples.values() for s in own]
        counted = [s.control_s for own in kept.values() for s in own]
        meta = {
            **self.meta, "kind": "engine", "host_parts": host_parts(kept),
            "control_s": {
                "usual": usual_control_s(self.samples), "median": float(np.median(controls)),
                "p95": float(np.quantile(controls, 0.95)), "counted": float(np.median(counted)),
                "follows": follows(self.samples),
            },
            "held_out": [{"batch": c.batch, "width": c.width, "error": e}
                         for c, e in errors.items()],
        }  # fmt: skip
        return LatencyTable(cells_of(kept, self.meta["engine"]["own_drafter"]), meta)


class BetweenTable(_Measured):
    """The table measured a block at a time between other work of the same engine.

    Where a machine is slow for minutes, it is so for that work and for the table alike.

    Parameters
    ----------
    grid:
        Of sizes that the engine can run.
    kept:
        Keeps every block; those it holds are not measured again, in the same order of blocks.
    """

    def __init__(
        self, engine: Engine, grid: Grid, seed: int = 0, kept: Checkpoint | None = None
    ) -> None:
        super().__init__(engine, grid, seed, kept)
        self._blocks = grid.blocks()
        self._waiting: list[int] = []
        self.done = 0
        """Blocks measured."""

    def advance(self, sweeps: float) -> None:
        """Measure blocks until `sweeps` sweeps over all are done, each in a new random order."""
        while self.done < sweeps * len(self._blocks):
            if not self._waiting:
                self._waiting = self._rng.permutation(len(self._blocks)).tolist()
            self._add(self._visited(f"{self.done:05d}", self._blocks[self._waiting.pop()]))
            self.done += 1

    def table(self) -> LatencyTable:
        """The table so far, of every sample; a whole sweep must be done.

        What disturbed some of them disturbed the work around them as often.
        """
        return self._table(self.samples, {})


class EngineTable(_Measured):
    """The table of one engine in the making, a block of cells at a time.

    Finished blocks are kept in `folder`, so that a stopped measurement goes on.

    Parameters
    ----------
    left_s:
        Tells how many seconds there still are.  One sweep and the held-out cells are measured in
        any case; further sweeps, what was disturbed, and points between, only where they fit.

    Raises DraftsimError if the folder holds one with other settings.
    """

    def __init__(
        self, engine: Engine, grid: Grid, folder: Path, seed: int = 0,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        fitted = grid.fitted(engine.options)
        self._folder = Checkpoint(folder, {"engine": engine.meta, "grid": asdict(fitted)})
        super().__init__(engine, fitted, seed, self._folder)
        self._left_s = left_s
        self.left_out = 0
        """Visits to cells, again or to points between, that there was no time for."""

    @property
    def blocks(self) -> int:
        """Blocks that `run` measures, repeats and held-out cells aside."""
        return self.grid.sweeps * len(self.grid.blocks())

    def run(self, advance: Callable[[], None] = lambda: None) -> LatencyTable:
        """The sweeps, the held-out cells and points between, then what was disturbed again."""
        blocks, held_out = self.grid.blocks(), self.grid.between()
        for sweep in range(self.grid.sweeps):
            for i in self._rng.permutation(len(blocks)).tolist():
                if sweep == 0:
                    self._block(f"sweep-{sweep}-{i}", blocks[i])
                else:
                    self._if_time({f"sweep-{sweep}-{i}": blocks[i]}, [held_out] * HELD_OUT)
                advance()
        errors = self._between(held_out)
        for again in range(REPEATS):
            for i, block in enumerate(blocks):
                if disturbed := self._disturbed(block):
                    self._if_time({f"again-{again}-{i}": disturbed})
        table = self._table(quiet(self.samples), errors)
        self._folder.close()
        return table

    def _block(self, name: str, cells: list[Cell], keep: bool = True) -> dict[Cell, list[Sample]]:
        found = self._visited(name, cells)
        if keep:
            self._add(found)
        return found

    def _if_time(
        self, blocks: Mapping[str, list[Cell]], to_come: Sequence[list[Cell]] = ()
    ) -> None:
        """`_block` of each, where all of them fit: a grid with gaps cannot be read between.

        Time is spared for what is `to_come` in any case.
        """
        if self._left_s() < self._expected_s([*blocks.values(), *to_come]):
            self.left_out += sum(map(len, blocks.values()))
            return
        for name, cells in blocks.items():
            self._block(name, cells)

    def _expected_s(self, blocks: Sequence[list[Cell]]) -> float:
        """Return the expected time: a cell takes as long as in the last block of its batch, or
        more.
        """
        expected_s = 0.0
        for cells in filter(None, blocks):
            known = [b for b in self._took_s if b >= cells[0].batch] or [*self._took_s]
            expected_s += len(cells) * (self._took_s[min(known)] if known else 0.0)
        return expected_s

    def _disturbed(self, block: list[Cell]) -> list[Cell]:
        """Cells of the block with fewer than half of their samples from a quiet machine."""
        usual = usual_control_s(self.samples)
        return [
            cell
            for cell in block
            if np.median([s.control_s for s in self.samples[cell]]) > DISTURBED * usual
        ]

    def _between(self, cells: list[Cell]) -> dict[Cell, float]:
        """Measure held-out cells; where reading between misses, their lines join the table."""
        if not cells:
            return {}
        held_out: dict[Cell, list[Sample]] = {}
        for again in range(HELD_OUT):
            for cell, own in self._block(f"between-{again}", cells, keep=False).items():
                held_out.setdefault(cell, []).extend(own)
        errors = held_out_errors(self.samples, held_out)
        missed = [c for c, e in errors.items() if abs(e) > self.grid.held_out]
        batches = {c.batch for c in missed} - set(self.grid.batches)
        widths = {c.width for c in missed if c.batch in self.grid.batches} - set(self.grid.widths)
        more = replace(
            self.grid, batches=sorted({*self.grid.batches, *batches}),
            widths=sorted({*self.grid.widths, *widths}), sweeps=2,
        )  # fmt: skip
        for again in range(more.sweeps if missed else 0):
            lines = {
                f"added-{batch}-{again}": [
                    Cell("decode", batch, w, c) for c in more.contexts
                    for w in (more.widths if batch in batches else sorted(widths))
                ]
                for batch in more.batches
            }  # fmt: skip
            self._if_time({name: cells for name, cells in lines.items() if cells})
        return errors
