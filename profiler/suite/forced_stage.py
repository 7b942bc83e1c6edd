"""Stage ``forced``: full speculative runs with verdicts dictated by a trace.

The models run for real and decide nothing, so what is tested is the cost model alone, on
real architectures with random weights.  Writes ``forced-trace.parquet``, the recording that
dictates, ``forced-measured.parquet``, a row per run, and ``forced.json``.  Every pair runs
alone before any runs in batches.  What the time does not hold, or holds only once, is named
and goes on in another run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from profiler.checks.interleaved import LEAST_REPEATS
from profiler.checks.spot_check import run_batches, run_requests
from profiler.latency.table import Grid
from profiler.models.architectures import PairShape
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from profiler.suite import COMPILED, EAGER, GRAPH, KERNELS
from profiler.suite.checks import (
    COLUMNS,
    MORE_POLICIES,
    MORE_QUICK_POLICIES,
    POLICIES,
    QUICK_POLICIES,
    REPEATS,
    planned_policies,
    run_rows,
)
from profiler.suite.environment import COMPLETE, Units, Workplace, is_unfinished
from profiler.suite.latency_stage import build_or_none, chosen_pairs, modes_here
from profiler.suite.pair import pass_cells, runner_of_mode
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.engine_runs import MeasuredRuns, read_measured, write_measured
from traces.store.files import write_trace


def forced_trace(quick: bool) -> Trace:
    """Return the dictating recording: easy and hard stretches, calibrated signals, full tails.

    It has many short requests: with little time a second repeat says more than a longer run, and
    with enough time another request does.
    """
    return synthetic_trace(
        Bursty(0.9, 0.4, 20.0, 10.0),
        requests=4 if quick else 16,
        tokens=8 if quick else 32,
        prompt_length=16 if quick else 128,
        max_gamma=8 if quick else 24,
        concentration=3.0,
        seed=6,
    )


class ForcedUnit(NamedTuple):
    """Runs that are interleaved: of one pair, in one mode, at one batch size."""

    pair: PairShape
    mode: str
    batch: int

    @property
    def name(self) -> str:
        """The name that its results are filed under."""
        return f"{self.pair.name}.{self.mode}.{self.batch}"

    @property
    def cost(self) -> float:
        """Its cost relative to others: layers are launched, or captured, one by one."""
        layers = self.pair.target.layers + 2 * (self.pair.draft.layers if self.pair.draft else 0)
        return layers * (2.0 if self.mode == EAGER else 1.5) * (1 + 0.3 * math.log2(self.batch))


def run_forced(
    place: Workplace, pairs: Sequence[str] | None = None, modes: Sequence[str] | None = None
) -> Units:
    """Run the pairs named (all with a draft by default) under every policy, in every mode.

    Results of pairs that ran before stay in the folder.  Returns what was left undone.

    Raises DraftsimError for an unknown pair, for a folder of another device, or where nothing could
    be run.
    """
    units = Units(place, "forced")
    chosen = []
    for pair in chosen_pairs(pairs, place.quick):
        if pair.draft is not None:
            chosen.append(pair)
        elif pairs:
            units.limits[pair.name] = f"{pair.name} has no draft model: no runs to force"
    how = sorted(modes_here(units, modes), key=(GRAPH, EAGER, COMPILED).index)
    trace = forced_trace(place.quick)
    write_trace(trace, place.out / "forced-trace.parquet")
    # Single streams first: they answer the most, and a late stop then costs the least.
    batches = ((1,), (4,)) if place.quick else ((1,), (4, 16))
    every = [
        ForcedUnit(pair, mode, batch)
        for some in batches for pair in chosen for batch in some for mode in how
    ]  # fmt: skip
    asked = {unit.name for unit in every}
    units.join(asked, "forced-measured.parquet", _rows)
    todo = [unit for unit in every if is_unfinished(units.get(unit.name))]

    def attempt(unit: ForcedUnit, models: tuple[Any, Any]) -> None:
        gone = units.limits
        rest = sum(u.cost for u in todo[todo.index(unit) :] if u.pair.name not in gone)
        done = None
        with units.noting(unit.name):
            try:
                done = _unit(place, unit, models, trace, place.left * unit.cost / rest)
            except torch.OutOfMemoryError:
                units.limit(unit.name, f"{unit.name}: out of memory: the smaller batches were run")
        if done is not None:
            units.put(unit.name, done)
            if is_unfinished(done):
                units.late[unit.name] = "time for one repeat only"
            place.say(
                f"{unit.name}: {len(done['rows'])} runs, {done['repeats']} repeats of "
                f"{done['groups']} groups"
            )

    with units.closing(lambda: _write(units)):
        # The weights are built once for a pair's batch 1, and once for its batches.
        for (name, _), some in groupby(todo, key=lambda unit: (unit.pair.name, unit.batch == 1)):
            group = list(some)
            if place.left <= 0:
                units.late.update({unit.name: "no time left" for unit in group})
                continue
            built = name not in units.limits
            models = build_or_none(units, group[0].pair) if built else None
            if models is None:
                continue
            for unit in group:
                attempt(unit, models)
                place.release()
                _write(units)
            del models
            place.unsettle()
        if units.status == COMPLETE and not any(map(units.get, asked)):
            raise DraftsimError("nothing was run: " + "; ".join(units.notes))
    if units.late:
        place.say(f"left: {', '.join(units.late)}; --pairs gives one pair all the time")
    units.close()
    return units


def _rows(path: Path) -> dict[str, list[list[Any]]]:
    """Return the runs in a folder's table, by unit."""
    times = read_measured(path).times[list(COLUMNS)]
    return {
        ".".join(map(str, unit)): part.values.tolist()
        for unit, part in times.groupby(["pair", "mode", "batch"])
    }


def _unit(
    place: Workplace, unit: ForcedUnit, models: tuple[Any, Any], trace: Trace, share: float
) -> dict[str, Any]:
    """Run all policies on a unit, interleaved, within a `share` of the time, if possible."""
    until = time.monotonic() + share
    batch = unit.batch
    target, draft = (runner_of_mode(unit.mode, model, trace.longest, batch) for model in models)
    made = {id(models[0]): target, id(models[1]): draft}
    anchors = _anchors(place, target, draft, batch)
    names = (QUICK_POLICIES, MORE_QUICK_POLICIES) if place.quick else (POLICIES, MORE_POLICIES)
    planned, more = (planned_policies(trace, some) for some in names)
    # Seconds of a run without drafts, which others take about as long as.
    plain_s = anchors[0]["median_s"] * trace.requests[0].max_new_tokens
    if plain_s * (LEAST_REPEATS + 1) * (len(planned) + len(more)) < until - time.monotonic():
        planned += more
    asked, pair = 1 if place.quick else REPEATS, Pair(*models, tokenizer=None, meta={})
    run = run_requests if batch == 1 else partial(run_batches, batches=(batch,))
    measured = run(
        pair, trace, planned, forced=True, repeats=asked, advance=place.check_time,
        in_time=lambda: time.monotonic() < until, runner=lambda model, *_: made[id(model)],
    )  # fmt: skip
    times = measured.times
    repeats = times["repeat"].nunique()
    return {
        "rows": run_rows(times, unit.pair.name, unit.mode),
        "repeats": repeats,
        "groups": times["request"].nunique(),
        "unfinished": repeats < min(asked, LEAST_REPEATS),
        "anchors": anchors,
    }


def _anchors(place: Workplace, target: Runner, draft: Runner, batch: int) -> list[dict[str, Any]]:
    """Measure a few cells again: they show how the device differs from stage ``latency``."""
    repeats, context = (1, 16) if place.quick else (3, 128)
    grid = Grid((1, 5), [context], (), batch_widths=(1, 5), repeats=repeats, warmup=1)
    cells = pass_cells(place, (target, draft), grid, batch, check=place.check_time)
    return [
        {"model": model, "batch": batch, "width": width, "context": context,
         "median_s": seconds, "spread_s": spread, "repeats": repeats}
        for model, phase, _, width, _, seconds, spread, _ in cells.itertuples(index=False)
        if phase == "forward" and (model, width) != ("draft", 2)
    ]  # fmt: skip


def _write(units: Units) -> None:
    rows = [row for unit in units.units.values() for row in unit["rows"]]
    if rows:
        meta = {"kernels": KERNELS, **units.place.meta()}
        runs = MeasuredRuns(pd.DataFrame(rows, columns=list(COLUMNS)), meta)
        write_measured(runs, units.place.out / "forced-measured.parquet")
    units.write()
