"""Measures an engine's latency table: sweeps over the grid, repeats, and points in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd

from policies.arrays import half_iqr
from profiler.engines.cells import SIZES, Cell, CellTimer, EngineGrid
from profiler.engines.engine import Engine
from traces.latency.table import LatencyTable, as_cells
from traces.sources.lookups.sources import LookupSource, ServedRequest
from traces.sources.lookups.text import searching
from traces.sources.registry import SOURCES
from traces.store.checkpoint import Checkpoint, once
from traces.store.engine_runs import PARTS

Average = Literal["median", "mean"]
"""How a cell is made of its samples, which are rows of `profiler.engines.cells.SAMPLE`."""
DISTURBED = 1.1
"""Samples are dropped, if enough remain, from this multiple of the control load's usual time on."""
SWING = float(np.log(1.5))
"""Ratios beyond this are outliers, of the control load or of the engine."""
TEXT, KINDS, SEARCHES = 512, 200, 50
"""Tokens of the text that lookups are timed in, different ones among them, and timed searches."""
HOST = ["schedule", "update", "output"]


def by_cell(samples: pd.DataFrame, values: Any, *names: str) -> Any:
    """Return `values`, one per sample, grouped by the samples' cells, or by those columns alone."""
    return values.groupby([samples[name] for name in names or SIZES], sort=False)


def quiet(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples taken while the machine was as fast as usual; if a cell has none, all."""
    calm = samples["control_s"] < DISTURBED * usual_control_s(samples)
    kept: pd.DataFrame = samples[calm | ~by_cell(samples, calm).transform("any")]
    return kept


def follows(samples: pd.DataFrame) -> float:
    """Return the exponent, 0 to 1, with which the engine's time follows the control load's.

    It is fitted to repeated visits of the same decoding cells.  Slow memory slows both; a busy
    processor may slow only one of them.  Noise of the control load makes the exponent smaller, as
    it should, because a noisy control load says less about the engine.
    """
    own = samples[samples["kind"] == "decode"]
    logs = np.log(own[["control_s", "seconds"]])
    logs = (logs - by_cell(own, logs).transform("median")).clip(-SWING, SWING)
    control, seconds = (logs - by_cell(own, logs).transform("mean")).to_numpy().T
    both = float(control @ control)
    return float(np.clip(control @ seconds / both, 0.0, 1.0)) if both else 0.0


def spikes_shared(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the samples with spikes (beyond `SWING` of their cell's median) spread over all cells.

    Another process can interrupt any iteration, not only those of the cell in which it was seen.
    The sum of all seconds stays as it is.
    """
    taken_s = samples[[*PARTS]].sum(axis=1)
    kept_s = taken_s.clip(upper=np.exp(SWING) * by_cell(samples, taken_s).transform("median"))
    times = ["seconds", *PARTS, "base_s"]
    factor = kept_s / taken_s * (taken_s.sum() / kept_s.sum())
    return samples.assign(**{name: samples[name] * factor for name in times})


def usual_control_s(samples: pd.DataFrame) -> float:
    """Return the control load's lower quartile over the whole measurement."""
    return float(samples["control_s"].quantile(0.25))


def cells_of_engine(
    kept: pd.DataFrame, own_passes: bool = False, average: Average = "median"
) -> pd.DataFrame:
    """Return cells as in `traces.latency.table.CELL_COLUMNS`, made of these samples.

    ``forward`` is the engine's pass with sampling, ``host_round`` the rest of an iteration
    without drafts, ``host_draft`` what a drafted token adds to the proposer's time.
    ``prefill`` and ``mixed`` hold the whole iteration, and the adding of its requests.  With
    ``own_passes`` the proposer's time is that of the engine's own drafter (`drafter_cells`).
    """
    row = partial(_row, average=average)
    decode, prompt, mixed = (kept[kept["kind"] == kind] for kind in ("decode", "prompt", "mixed"))
    rows = [
        row("forward", batch, width, round(own["cached"].mean()), own["execute"] + own["sample"])
        for (_, batch, width, *_), own in by_cell(decode, decode)
    ] + [
        row("prefill", count, tokens, 0, seconds)
        for (*_, count, tokens), seconds in by_cell(prompt, prompt["seconds"])
    ]  # fmt: skip
    added = mixed["seconds"] - mixed["base_s"]
    # By a step's decoded tokens and its prompts'.
    sizes: Any = [mixed["batch"] * mixed["width"], mixed["prompts"] * mixed["tokens"]]
    groups: Any = added.groupby(sizes)
    rows += [row("mixed", tokens, more, 0, seconds) for (tokens, more), seconds in groups]
    for (batch,), own in by_cell(decode, decode, "batch"):
        idle_s, drafting_s = (0.0, 0.0) if own_passes else _proposing(own, average)
        rows.append(row("host_round", batch, 1, 0, own[HOST].sum(axis=1) + idle_s))
        rows.append(row("host_draft", batch, 1, 0, pd.Series([drafting_s])))
    frame = as_cells(rows)
    if own_passes:
        drafter = drafter_cells(decode, prompt, average)
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
        rows.append(_row("forward", 1, 1, 0, pd.Series(taken), source.name, average=average))
    return as_cells(rows)


def _proposing(own: pd.DataFrame, average: Average) -> tuple[float, float]:
    """Return the proposer's seconds without drafts, and per token of a sequence's draft."""
    seconds = by_cell(own, own["propose"]).agg(average)
    lengths = seconds.index.get_level_values("width") - 1
    if lengths.nunique() < 2:
        return float(seconds.mean()), 0.0
    slope, start = np.polyfit(lengths, seconds, 1)
    return max(float(start), 0.0), max(float(slope), 0.0)


def drafter_cells(decode: pd.DataFrame, prompt: pd.DataFrame, average: Average) -> pd.DataFrame:
    """Return the cells of the engine's own drafter, from iterations that ask for 0, 1, ... tokens.

    ``along`` is its pass if no token was asked for, ``catch_up`` the first pass of a draft, over
    the tokens that its iteration verified, and ``forward`` a later one.  An iteration that verifies
    K and asks for K shows only their sum; the cost of a further token in a first pass is taken from
    prompts.
    """
    rows = []

    def add(phase: str, batch: int, width: int, context: int, seconds: float) -> None:
        rows.append(_row(phase, batch, width, context, pd.Series([seconds]), "draft"))

    prompts = by_cell(prompt, prompt["propose"], "prompts", "tokens").agg(average)
    for (count, tokens), seconds in prompts.items():
        add("prefill", count, tokens, 0, seconds)
    sizes = [count * tokens for count, tokens in prompts.index]
    slope = np.polyfit(sizes, prompts, 1)[0] if len(set(sizes)) > 1 else 0.0
    token_s = max(float(slope), 0.0)
    for (batch, _), own in by_cell(decode, decode, "batch", "context"):
        context = round(own["cached"].mean())
        taken: Any = own["propose"].groupby(own["width"] - 1).agg(average)  # by tokens asked for
        if 0 in taken.index:
            add("along", batch, 1, context, taken.pop(0))
        # Without the first pass's time for the K tokens after its first.
        bare = taken - token_s * batch * taken.index
        later_s, first_s = (
            np.polyfit(bare.index - 1, bare, 1) if len(bare) > 1 else (0.0, bare.iloc[0])
        )
        add("forward", batch, 1, context, later_s)
        for more in (0, max(bare.index)):
            seconds = max(first_s, 0.0) + token_s * batch * more
            add("catch_up", batch, 1 + more, context, seconds)
    return as_cells(rows)


def _row(
    phase: str, batch: int, width: int, context: int, seconds: pd.Series,
    model: str = "target", *, average: Average = "median",
) -> tuple[Any, ...]:  # fmt: skip
    # Differences keep their signs up to here: noise would otherwise be averaged to more than zero.
    taken_s = max(seconds.agg(average), 0.0)
    return model, phase, batch, width, context, taken_s, half_iqr(seconds), len(seconds)


def host_parts(kept: pd.DataFrame, average: Average = "median") -> list[dict[str, Any]]:
    """Return the seconds of every part of a decoding iteration, by batch, width and context."""
    own = kept[kept["kind"] == "decode"]
    parts = by_cell(own, own[[*PARTS]], "batch", "width", "context").agg(average)
    found: list[dict[str, Any]] = parts.add_suffix("_s").reset_index().to_dict("records")
    return found


def held_out_errors(samples: pd.DataFrame, held_out: pd.DataFrame) -> dict[Cell, float]:
    """Return the relative error of interpolating each held-out cell from the others."""
    table = LatencyTable(cells_of_engine(quiet(samples)))
    errors = {}
    kept = quiet(held_out)
    for sizes, own in by_cell(kept, kept):
        cell = Cell(*sizes)
        measured = float((own["execute"] + own["sample"]).median())
        read = table.seconds("target", "forward", batch=cell.batch, new_tokens=cell.width,
                             context=float(own["cached"].mean()))  # fmt: skip
        errors[cell] = float(read) / measured - 1
    return errors


REPEATS = 2
"""Times that a block with disturbed cells is measured again, at most."""
HELD_OUT = 2
"""Times that the held-out cells are measured."""


class EngineTable:
    """Timed iterations of one engine by cell, and the table that they make.

    It is measured block by block: by itself (`run`), or between other work of the same engine
    (`advance`), so that minutes in which the machine is slow affect that work and the table alike.

    ``grid``: sizes that the engine can run.  ``kept``: stores every block; blocks that it holds are
    not measured again.  ``left_s``: returns the seconds that remain of `run`.
    """

    def __init__(
        self, engine: Engine, grid: EngineGrid, seed: int = 0, kept: Checkpoint | None = None,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:  # fmt: skip
        self.grid, self.meta, self._kept, self._left_s = grid, engine.meta, kept, left_s
        self.left_out = 0
        """Visits to cells, again or to points between, that `run` had no time for."""
        self._timer, self._rng = CellTimer(engine, seed), np.random.default_rng(seed)
        self._found: list[pd.DataFrame] = []
        self._took_s: dict[int, float] = {}
        self._warm = engine.meta["device"] == "cpu"
        self.blocks = grid.blocks()
        self._waiting: list[int] = []
        self.done = 0
        """Blocks measured by `advance`."""

    @property
    def samples(self) -> pd.DataFrame:
        """All iterations timed so far."""
        return pd.concat(self._found, ignore_index=True)

    def advance(self, sweeps: float) -> None:
        """Measure blocks until `sweeps` sweeps over all are done, each in a new random order."""
        while self.done < sweeps * len(self.blocks):
            if not self._waiting:
                self._waiting = self._rng.permutation(len(self.blocks)).tolist()
            block = self.blocks[self._waiting.pop()]
            self._found.append(self._visited(f"{self.done:05d}", block))
            self.done += 1

    def table(self) -> LatencyTable:
        """Return the table so far, of every sample; a whole sweep must be done.

        Other work disturbs samples and the work around them equally often.  That work is a sum of
        iterations, so cells are means: medians would leave the disturbances out.
        """
        return self._table(spikes_shared(self.samples), {}, "mean")

    def warm_up(self) -> None:
        """Run every size once on a GPU, before the first one is timed.

        Kernels are compiled when a size first runs: 40 ms among passes of 6 ms.
        """
        if not self._warm:
            for block in self.blocks:
                self._timer.block(block, 1)
            self._warm = True

    def _visited(self, name: str, cells: list[Cell]) -> pd.DataFrame:
        """Return a block's samples: those kept under `name`, or measured now, and kept."""

        def measure() -> Any:
            self.warm_up()
            began = time.perf_counter()
            found = self._timer.block(cells, self.grid.steps)
            self._took_s[cells[0].batch] = (time.perf_counter() - began) / len(cells)
            return found.to_dict("list")

        return pd.DataFrame(once(self._kept, name, measure))

    def _table(
        self, kept: pd.DataFrame, errors: Mapping[Cell, float], average: Average
    ) -> LatencyTable:
        """Return the table of the samples `kept`; `errors`: relative errors on held-out cells."""
        samples = self.samples
        controls = samples["control_s"]
        meta = {
            **self.meta, "kind": "engine", "estimator": average,
            "host_parts": host_parts(kept, average),
            "control_s": {
                "usual": usual_control_s(samples), "median": float(controls.median()),
                "p95": float(controls.quantile(0.95)),
                "counted": float(kept["control_s"].median()), "follows": follows(samples),
            },
            "held_out": [{"batch": c.batch, "width": c.width, "error": e}
                         for c, e in errors.items()],
        }  # fmt: skip
        own_drafter = bool(self.meta["engine"]["own_drafter"])
        cells = [cells_of_engine(kept, own_drafter, average)]
        if not own_drafter:
            cells.append(search_cells(average))
        return LatencyTable(pd.concat(cells, ignore_index=True), meta)

    def run(self, advance: Callable[[int], None] = lambda _: None) -> LatencyTable:
        """Measure the sweeps, held-out cells and points between, then disturbed cells again.

        One sweep is always measured; held-out cells, further sweeps, disturbed cells and points
        between only if there is time.

        ``advance`` is called after each block of a sweep, with the sweep's number from 0 on.
        """
        blocks, held_out = self.blocks, self.grid.between()
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
        return self._table(quiet(self.samples), errors, "median")

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
            self._found.append(self._visited(name, cells))
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
        samples = self.samples
        taken = by_cell(samples, samples["control_s"]).median()
        usual = usual_control_s(samples)
        return [cell for cell in block if taken[tuple(cell)] > DISTURBED * usual]

    def _between(self, cells: list[Cell]) -> dict[Cell, float]:
        """Measure held-out cells; where reading between misses, their lines join the table."""
        if not cells:
            return {}
        visits = [self._visited(f"between-{again}", cells) for again in range(HELD_OUT)]
        errors = held_out_errors(self.samples, pd.concat(visits, ignore_index=True))
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
