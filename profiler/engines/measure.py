"""Measures an engine's latency table: sweeps over the grid, repeats, and points in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from profiler.engines.cells import Cell, CellTimer, EngineGrid, Sample
from profiler.engines.engine import Engine
from traces.latency.table import CELL_COLUMNS, LatencyTable, graphs_of
from traces.sources.lookups.sources import LookupSource, ServedRequest
from traces.sources.lookups.text import searching
from traces.sources.registry import SOURCES
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import PARTS

Samples = Mapping[Cell, Sequence[Sample]]
Average = Callable[[Sequence[float]], Any]
"""How a cell is made of its samples: `np.median` or `np.mean`."""
DISTURBED = 1.1
"""Samples are dropped, if enough remain, from this multiple of the control load's usual time on."""
SWING = float(np.log(1.5))
"""Ratios beyond this are outliers, of the control load or of the engine."""
TEXT, KINDS, SEARCHES = 512, 200, 50
"""Tokens of the text that lookups are timed in, different ones among them, and timed searches."""
HOST = ("schedule", "update", "output")
PROPOSE, EXECUTE, SAMPLE = map(PARTS.index, ("propose", "execute", "sample"))


def quiet(samples: Samples) -> dict[Cell, list[Sample]]:
    """Return the samples taken while the machine was as fast as usual; if a cell has none, all."""
    usual = usual_control_s(samples)
    return {
        cell: [s for s in own if s.control_s < DISTURBED * usual] or list(own)
        for cell, own in samples.items()
    }


def follows(samples: Samples) -> float:
    """Return the exponent, 0 to 1, with which the engine's time follows the control load's.

    It is fitted to repeated visits of the same decoding cells.  Slow memory slows both; a busy
    processor may slow only one of them.  Noise of the control load makes the exponent smaller, as
    it should, because a noisy control load says less about the engine.
    """
    both = product = 0.0
    for cell, own in samples.items():
        if cell.kind == "decode" and len(own) > 1:
            logs = np.log([(s.control_s, s.seconds) for s in own])
            control, seconds = np.clip(logs - np.median(logs, axis=0), -SWING, SWING).T
            control, seconds = control - control.mean(), seconds - seconds.mean()
            both += float(control @ control)
            product += float(control @ seconds)
    return float(np.clip(product / both, 0.0, 1.0)) if both else 0.0


def spikes_shared(samples: Samples) -> dict[Cell, list[Sample]]:
    """Return the samples with spikes (beyond `SWING` of their cell's median) spread over all cells.

    Another process can interrupt any iteration, not only those of the cell in which it was seen.
    The sum of all seconds stays as it is.
    """
    cut: dict[Cell, list[tuple[Sample, float]]] = {}
    whole_s = left_s = 0.0
    for cell, own in samples.items():
        taken_s = np.array([sum(s.parts) for s in own])
        kept_s = np.minimum(taken_s, np.exp(SWING) * np.median(taken_s))
        whole_s, left_s = whole_s + taken_s.sum(), left_s + kept_s.sum()
        cut[cell] = list(zip(own, kept_s / taken_s, strict=True))
    return {
        cell: [_times(sample, share * whole_s / left_s) for sample, share in own]
        for cell, own in cut.items()
    }


def _times(sample: Sample, factor: float) -> Sample:
    """Return the sample, `factor` times as long."""
    return sample._replace(
        seconds=sample.seconds * factor, parts=tuple(p * factor for p in sample.parts),
        base_s=sample.base_s * factor,
    )  # fmt: skip


def usual_control_s(samples: Samples) -> float:
    """Return the control load's lower quartile over the whole measurement."""
    return float(np.quantile([s.control_s for own in samples.values() for s in own], 0.25))


def cells_of(kept: Samples, own_passes: bool = False, average: Average = np.median) -> pd.DataFrame:
    """Return cells as in `traces.latency.table.CELL_COLUMNS`, made of these samples.

    ``forward`` is the engine's pass with sampling, ``host_round`` the rest of an iteration
    without drafts, ``host_draft`` what a drafted token adds to the proposer's time.
    ``prefill`` and ``mixed`` hold the whole iteration, and the adding of its requests.  With
    ``own_passes`` the proposer's time is that of the engine's own drafter (`drafter_cells`).
    """
    row = partial(_row, average=average)
    rows: list[tuple[Any, ...]] = []
    added: dict[tuple[int, int], list[float]] = {}  # by a step's decoded tokens and its prompts'
    for cell, own in kept.items():
        if cell.kind == "decode":
            device = [s.parts[EXECUTE] + s.parts[SAMPLE] for s in own]
            context = round(float(np.mean([s.context for s in own])))
            rows.append(row("forward", cell.batch, cell.width, context, device))
        elif cell.kind == "prompt":
            rows.append(row("prefill", cell.prompts, cell.tokens, 0, [s.seconds for s in own]))
        else:
            size = cell.batch * cell.width, cell.prompts * cell.tokens
            added.setdefault(size, []).extend(max(s.seconds - s.base_s, 0.0) for s in own)
    rows += [row("mixed", *size, 0, seconds) for size, seconds in added.items()]
    batches = sorted({c.batch for c in kept if c.kind == "decode"})
    for batch in batches:
        mine = {c: own for c, own in kept.items() if c.kind == "decode" and c.batch == batch}
        rounds = [sum(s.parts[PARTS.index(p)] for p in HOST) for own in mine.values() for s in own]
        idle_s, drafting_s = (0.0, 0.0) if own_passes else _proposing(mine, average)
        rows.append(row("host_round", batch, 1, 0, [r + idle_s for r in rounds]))
        rows.append(row("host_draft", batch, 1, 0, [drafting_s]))
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    if own_passes:
        drafter = drafter_cells(kept, average)
    else:  # a proposer without a model takes only the host's time
        passes = frame[frame["phase"].isin(["forward", "prefill"])]
        drafter = passes.assign(model="draft", median_s=0.0, spread_s=0.0)
        drafter = drafter.sort_values("phase", kind="stable")
    return pd.concat([frame, drafter], ignore_index=True)


def search_cells(average: Average) -> pd.DataFrame:
    """Return cells of the search of every lookup for one sequence, which the host runs."""
    text = np.random.default_rng(0).integers(0, KINDS, TEXT).tolist()
    before = [ServedRequest(text[: TEXT // 2], text[TEXT // 2 :])]
    rows = []
    for source in (kind() for kind in SOURCES.values() if issubclass(kind, LookupSource)):
        search = searching(source.lookup(frozenset(), lambda: before), text)
        taken = []
        for _ in range(SEARCHES):
            began_s = time.perf_counter()
            search()
            taken.append(time.perf_counter() - began_s)
        rows.append(_row("forward", 1, 1, 0, taken, source.name, average=average))
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _proposing(own: Samples, average: Average) -> tuple[float, float]:
    """Return the proposer's seconds without drafts, and per token of a sequence's draft."""
    pairs = [
        (c.width - 1, float(average([s.parts[PROPOSE] for s in samples])))
        for c, samples in own.items()
    ]
    lengths, seconds = np.array(pairs).T
    if len(set(lengths)) < 2:
        return float(seconds.mean()), 0.0
    slope, start = np.polyfit(lengths, seconds, 1)
    return max(float(start), 0.0), max(float(slope), 0.0)


def drafter_cells(kept: Samples, average: Average = np.median) -> pd.DataFrame:
    """Return the cells of the engine's own drafter, from iterations that ask for 0, 1, ... tokens.

    ``along`` is its pass if no token was asked for, ``catch_up`` the first pass of a draft, over
    the tokens that its iteration verified, and ``forward`` a later one.  An iteration that verifies
    K and asks for K shows only their sum; the cost of a further token in a first pass is taken from
    prompts.
    """
    rows: list[tuple[Any, ...]] = []
    prompts = {
        c: average([s.parts[PROPOSE] for s in own]) for c, own in kept.items()
        if c.kind == "prompt"
    }  # fmt: skip
    for cell, seconds in prompts.items():
        rows.append(_row("prefill", cell.prompts, cell.tokens, 0, [seconds], "draft"))
    sizes = np.array([c.prompts * c.tokens for c in prompts])
    token_s = max(float(np.polyfit(sizes, list(prompts.values()), 1)[0]), 0.0) if len(
        set(sizes.tolist())
    ) > 1 else 0.0  # fmt: skip
    lines: dict[tuple[int, int], dict[int, Sequence[Sample]]] = {}
    for c, own in kept.items():
        if c.kind == "decode":
            lines.setdefault((c.batch, c.context), {})[c.width] = own
    for (batch, _), by_width in lines.items():
        context = round(float(np.mean([s.context for own in by_width.values() for s in own])))
        taken = {
            w - 1: float(average([s.parts[PROPOSE] for s in own])) for w, own in by_width.items()
        }
        if 0 in taken:
            rows.append(_row("along", batch, 1, context, [taken[0]], "draft"))
        lengths = sorted(k for k in taken if k)
        # Without the first pass's time for the K tokens after its first.
        bare = [taken[k] - token_s * batch * k for k in lengths]
        later_s, first_s = (
            np.polyfit([k - 1 for k in lengths], bare, 1) if len(lengths) > 1 else (0.0, bare[0])
        )  # fmt: skip
        rows.append(_row("forward", batch, 1, context, [max(float(later_s), 0.0)], "draft"))
        for width in (1, 1 + max(lengths)):
            taken_s = max(float(first_s), 0.0) + token_s * batch * (width - 1)
            rows.append(_row("catch_up", batch, width, context, [taken_s], "draft"))
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _row(
    phase: str, batch: int, width: int, context: int, seconds: Sequence[float],
    model: str = "target", *, average: Average = np.median,
) -> tuple[Any, ...]:  # fmt: skip
    low, high = np.quantile(seconds, [0.25, 0.75])
    typical_s = float(average(seconds))
    return model, phase, batch, width, context, typical_s, (high - low) / 2, len(seconds)


def host_parts(kept: Samples, average: Average = np.median) -> list[dict[str, float]]:
    """Return the seconds of every part of a decoding iteration, by batch and width."""
    return [
        {
            "batch": c.batch, "width": c.width, "context": c.context,
            **{f"{p}_s": float(average([s.parts[i] for s in own]))
               for i, p in enumerate(PARTS)},
        }
        for c, own in kept.items() if c.kind == "decode"
    ]  # fmt: skip


def held_out_errors(samples: Samples, held_out: Samples) -> dict[Cell, float]:
    """Return the relative error of interpolating each held-out cell from the others."""
    table = LatencyTable(cells_of(quiet(samples)))
    errors = {}
    for cell, own in quiet(held_out).items():
        width, context = cell.width, float(np.mean([s.context for s in own]))
        measured = float(np.median([s.parts[EXECUTE] + s.parts[SAMPLE] for s in own]))
        read = table.seconds("target", "forward", batch=cell.batch, new_tokens=width,
                             context=context)  # fmt: skip
        errors[cell] = float(read) / measured - 1
    return errors


REPEATS = 2
"""Times that a block with disturbed cells is measured again, at most."""
HELD_OUT = 2
"""Times that the held-out cells are measured."""


class _Measured:
    """Timed iterations of one engine by cell, and the table that they make."""

    def __init__(
        self, engine: Engine, grid: EngineGrid, seed: int, kept: Checkpoint | None
    ) -> None:
        self.grid, self.meta, self._kept = grid, engine.meta, kept
        self._timer, self._rng = CellTimer(engine, seed), np.random.default_rng(seed)
        self.samples: dict[Cell, list[Sample]] = {}
        self._took_s: dict[int, float] = {}
        self._warm = engine.meta["device"] == "cpu"

    def _visited(self, name: str, cells: list[Cell]) -> dict[Cell, list[Sample]]:
        """Return a block's samples: those kept under `name`, or measured now, and kept."""
        found = self._restored(name)
        if found is None:
            self.warm_up()
            began = time.perf_counter()
            found = self._timer.block(cells, self.grid.steps)
            self._took_s[cells[0].batch] = (time.perf_counter() - began) / len(cells)
            self._store(name, found)
        return found

    def warm_up(self) -> None:
        """Run every size once on a GPU, before the first one is timed.

        Kernels are compiled when a size first runs: 40 ms among passes of 6 ms.
        """
        if not self._warm:
            for block in self.grid.blocks():
                self._timer.block(block, 1)
            self._warm = True

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

    def _table(self, kept: Samples, errors: Mapping[Cell, float], average: Average) -> LatencyTable:
        """Return the table of the samples `kept`; `errors`: relative errors on held-out cells."""
        controls = [s.control_s for own in self.samples.values() for s in own]
        counted = [s.control_s for own in kept.values() for s in own]
        meta = {
            **self.meta, "kind": "engine", "estimator": average.__name__,
            "host_parts": host_parts(kept, average),
            "control_s": {
                "usual": usual_control_s(self.samples), "median": float(np.median(controls)),
                "p95": float(np.quantile(controls, 0.95)), "counted": float(np.median(counted)),
                "follows": follows(self.samples),
            },
            "held_out": [{"batch": c.batch, "width": c.width, "error": e}
                         for c, e in errors.items()],
        }  # fmt: skip
        if self.meta["engine"]["own_drafter"]:
            return LatencyTable(cells_of(kept, True, average), meta)
        cells = [cells_of(kept, average=average), search_cells(average)]
        return LatencyTable(pd.concat(cells, ignore_index=True), meta)


class BetweenTable(_Measured):
    """A table that is measured block by block between other work of the same engine.

    So minutes in which the machine is slow affect that work and the table alike.

    ``grid``: sizes that the engine can run.  ``kept``: stores every block; blocks that it holds are
    not measured again.
    """

    def __init__(
        self, engine: Engine, grid: EngineGrid, seed: int = 0, kept: Checkpoint | None = None
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
        """Return the table so far, of every sample; a whole sweep must be done.

        Other work disturbs samples and the work around them equally often.  That work is a sum of
        iterations, so cells are means: medians would leave the disturbances out.
        """
        return self._table(spikes_shared(self.samples), {}, np.mean)


class EngineTable(_Measured):
    """The measurement of an engine's table, block by block.

    Finished blocks are stored in `folder`, so that a stopped measurement can continue.

    Parameters
    ----------
    left_s:
        Returns the seconds that remain.  One sweep is always measured; held-out cells, further
        sweeps, disturbed cells and points between only if there is time.

    Raises DraftsimError if the folder holds one with other settings.
    """

    def __init__(
        self, engine: Engine, grid: EngineGrid, folder: Path,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        fitted = grid.fitted(engine.options, graphs_of(engine.meta["engine"]))
        self._folder = Checkpoint(folder, {"engine": engine.meta, "grid": asdict(fitted)})
        super().__init__(engine, fitted, 0, self._folder)
        self._left_s = left_s
        self.left_out = 0
        """Visits to cells, again or to points between, that there was no time for."""

    @property
    def blocks(self) -> int:
        """Blocks of a sweep."""
        return len(self.grid.blocks())

    def run(self, advance: Callable[[int], None] = lambda _: None) -> LatencyTable:
        """Measure the sweeps, held-out cells and points between, then disturbed cells again.

        ``advance`` is called after each block of a sweep, with the sweep's number from 0 on.
        """
        blocks, held_out = self.grid.blocks(), self.grid.between()
        for sweep in range(self.grid.sweeps):
            for i in self._rng.permutation(len(blocks)).tolist():
                own = {f"sweep-{sweep}-{i}": blocks[i]}
                if self._if_time(own, [held_out] * HELD_OUT, needed=sweep == 0):
                    advance(sweep)
        errors = self._between(held_out) if self._has_time([held_out] * HELD_OUT) else {}
        for again in range(REPEATS):
            for i, block in enumerate(blocks):
                if disturbed := self._disturbed(block):
                    self._if_time({f"again-{again}-{i}": disturbed})
        return self._table(quiet(self.samples), errors, np.median)

    def close(self) -> None:
        """Remove what a stopped measurement would go on from, once the table is written."""
        self._folder.close()

    def _if_time(
        self, blocks: Mapping[str, list[Cell]], to_come: Sequence[list[Cell]] = (),
        needed: bool = False,
    ) -> bool:  # fmt: skip
        """Measure the blocks if all of them fit, with time for what is `to_come`, or are `needed`.

        A grid with gaps cannot be read between.  Returns whether they were measured.
        """
        if not needed and not self._has_time(list(blocks.values()), to_come):
            return False
        for name, cells in blocks.items():
            self._add(self._visited(name, cells))
        return True

    def _has_time(self, blocks: Sequence[list[Cell]], to_come: Sequence[list[Cell]] = ()) -> bool:
        """Return True if the blocks fit, with those `to_come`; else count them as left out."""
        if self._left_s() >= self._expected_s([*blocks, *to_come]):
            return True
        self.left_out += sum(map(len, blocks))
        return False

    def _expected_s(self, blocks: Sequence[list[Cell]]) -> float:
        """Return the expected time: cells take as long as in the last block of such a batch."""
        expected_s = 0.0
        for cells in filter(None, blocks):
            known = [b for b in self._took_s if b >= cells[0].batch] or [*self._took_s]
            expected_s += len(cells) * (self._took_s[min(known)] if known else 0.0)
        return expected_s

    def _disturbed(self, block: list[Cell]) -> list[Cell]:
        """Return cells of the block with fewer than half of their samples from a quiet machine."""
        usual = usual_control_s(self.samples)
        controls = ((cell, [s.control_s for s in self.samples[cell]]) for cell in block)
        return [cell for cell, taken in controls if np.median(taken) > DISTURBED * usual]

    def _between(self, cells: list[Cell]) -> dict[Cell, float]:
        """Measure held-out cells; where reading between misses, their lines join the table."""
        if not cells:
            return {}
        held_out: dict[Cell, list[Sample]] = {}
        for again in range(HELD_OUT):
            for cell, own in self._visited(f"between-{again}", cells).items():
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
