"""Stage ``trained``: a pair trained here, recorded, decoded for real, and compared.

Writes ``trained-trace.parquet`` (greedy), ``trained-sampled.parquet`` (T = 1),
``trained-exits.parquet``, ``trained-latency.parquet``, ``trained-measured.parquet`` and
``trained.json``; no weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from profiler.architectures import PairShape
from profiler.loading import Pair
from profiler.profile import Settings
from profiler.prompts import Prompt
from profiler.suite.arms import COLUMNS
from profiler.suite.checks import NAME, Checks, sampled_rounds
from profiler.suite.environment import Ledger, NoTimeError, Workplace, clocks, write_results
from profiler.suite.grids import Grids
from profiler.suite.kept_pair import trained_pair
from profiler.suite.latency_stage import shapes_of
from profiler.suite.pair_latency import PairMeasurement
from profiler.suite.passes import EAGER, GRAPH, MODES
from profiler.suite.recording import ENOUGH, attempt_exits, record_trace, write_within
from profiler.suite.training import DRAFT, TARGET
from traces.files import write_latency
from traces.latency import CELL_COLUMNS, LatencyTable
from traces.measured import MeasuredRuns, write_measured
from traces.sampling import Sampling
from traces.trace import Trace

EXITS = "trained-exits.parquet"


def run_trained(place: Workplace) -> None:
    """Train, record, measure, check, compare; each part writes its file when it is done.

    Parts have fixed shares of the time; one that is late does less of its work, and one for
    which none is left, or a recording of fewer than `ENOUGH` prompts, is named in the results.
    Begun again, be it for these or because it was stopped, the stage keeps the pair and every
    part that was finished, goes on with a short recording, and writes all files anew: the folder
    may have been emptied since.
    """
    results: dict[str, Any] = {"stage": "trained", "meta": place.meta()}
    results["clocks"] = [clocks(place.device)]
    ledger = Ledger(place, "trained", {})
    late: dict[str, str] = {}
    left_out: list[str] = []

    def keep(**more: Any) -> None:
        results.update(more)
        results["clocks"] = [results["clocks"][0], clocks(place.device)]
        write_results(place.out / "trained.json", results)

    def part(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if (unit := ledger.get(name)) is not None:
            return unit
        try:
            place.check_time()
            ledger.put(name, unit := make())
        except NoTimeError:
            late[name] = "no time left"
            return {}
        return unit

    def recorded(name: str, file: str, settings: Settings, share: float) -> Trace:
        """A trace, as long as it was if it was finished before, else longer; written."""
        done = (ledger.get(name) or {"recorded": 0})["recorded"]
        enough = min(ENOUGH, len(prompts))
        some: Sequence[Prompt] = prompts[:done] if done >= enough else prompts
        until = time.monotonic() + min(share, place.left) if done < enough else float("inf")
        trace = record_trace(place, pair, some, settings, until)
        count = len(trace.requests)
        ledger.put(name, {"recorded": count})
        kept = write_within(trace, place.out / file)
        if count < enough:
            late[name] = f"{count} of {enough} prompts, no time left"
        elif kept < enough:
            left_out.append(f"{name}: the file holds {kept} of {count} prompts")
        summary = {
            "requests": kept, "recorded": count, "tokens": trace.tokens,
            "near_ties": trace.meta["near_ties"], "unfinished": count < enough,
        }  # fmt: skip
        keep(**{name: summary})
        return trace

    total = place.seconds
    pair, prompts, record = trained_pair(
        place, place.work / "trained-pair", 2.0 if place.quick else 0.34 * total
    )
    keep(training=record, categories=sorted({p.category for p in prompts}))
    new = 24 if place.quick else 256
    settings = Settings(max_new_tokens=new, max_gamma=6 if place.quick else 16)
    hot = Settings(new, settings.max_gamma, Sampling(1.0), seed=1)
    trace = recorded("greedy", "trained-trace.parquet", settings, 0.15 * total)
    sampled = recorded("sampled", "trained-sampled.parquet", hot, 0.17 * total)
    measured = part("latency", lambda: _latency(place, pair))
    if measured:
        keep(latency=measured["latency"], latency_cells=_write_latency(place, measured["cells"]))
    checks = Checks(place, pair, trace, new)
    graphed = part("graph", lambda: checks.run(GRAPH, 0.08 * total, 7))
    _write_measured(place, pair, graphed)
    keep(rounds_graph=graphed.get("checked", {}))
    some = 3 if place.quick else 6
    keep(assisted=part("assisted", lambda: checks.against_assisted(some, 0.06 * total)))
    rounds = part("sampled-rounds", lambda: sampled_rounds(pair, sampled))
    keep(sampled={**results["sampled"], **rounds})
    share = max(5.0, place.left - 0.05 * total)
    eager = part("eager", lambda: checks.run(EAGER, share, 4))
    _write_measured(place, pair, graphed, eager)
    keep(rounds_eager=eager.get("checked", {}))
    text = torch.stack([checks.own_text(i) for i in range(min(64, len(trace.requests)))])
    share = max(3.0, 0.5 * place.left)
    kept = place.work / "trained-files" / EXITS
    kept.parent.mkdir(exist_ok=True)
    keep(exits=part("exits", lambda: attempt_exits(place, pair, trace, text, kept, share)))
    if kept.is_file():
        shutil.copyfile(kept, place.out / EXITS)
    keep(left_out=[*left_out, *(f"{name}: {why}" for name, why in late.items())])
    ledger.close(list(late))


def _write_measured(place: Workplace, pair: Pair, *checked: dict[str, Any]) -> None:
    times = [row for part in checked for row in part.get("times", ())]
    if not times:
        return
    runs = MeasuredRuns(pd.DataFrame(times, columns=list(COLUMNS)), pair.meta)
    write_measured(runs, place.out / "trained-measured.parquet")


def _latency(place: Workplace, pair: Pair) -> dict[str, Any]:
    """The trained pair's own table, both modes; what else was measured with it."""
    rows: list[list[Any]] = []
    units: dict[str, Any] = {}
    for mode in MODES:
        grids = Grids(place.quick)
        if not place.quick:
            grids.contexts, grids.prompts = (64, 384), (64, 128)
            grids.widths = (1, 2, 3, 5, 9, 17)
        grids.batches = grids.between = ()
        grids.host_batches = (1,)
        shape = PairShape(NAME, TARGET, DRAFT)
        end = time.monotonic() + 0.04 * place.seconds
        measured = PairMeasurement(place, shape, mode, (pair.target, pair.draft), grids, end)
        measured.run()
        rows += [[f"{NAME}/{mode}/{row[0]}", *row[1:]] for row in measured.cells]
        unit = measured.unit()
        units[mode] = {k: v for k, v in unit.items() if k != "cells"}
    if not rows:
        raise NoTimeError("no time left")
    return {"latency": units, "cells": rows}


def _write_latency(place: Workplace, rows: Sequence[Sequence[Any]]) -> int:
    """Write the table of both modes; how many cells it has."""
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    shapes = {NAME: shapes_of(PairShape(NAME, TARGET, DRAFT))}
    meta = {"kind": "measured", "attention": "sdpa", "shapes": shapes, **place.meta()}
    write_latency(LatencyTable(frame, meta), place.out / "trained-latency.parquet")
    return len(rows)
