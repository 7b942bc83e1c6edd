"""Stage ``trained``: a pair trained here, recorded, decoded for real, and compared.

Writes ``trained-trace.parquet`` (greedy), ``trained-sampled.parquet`` (T = 1),
``trained-exits.parquet``, ``trained-latency.parquet``, ``trained-measured.parquet`` and
``trained.json``; no weights.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from profiler.models.architectures import Architecture, PairShape
from profiler.models.loading import Pair
from profiler.profile import Settings
from profiler.prompts import Prompt
from profiler.smollm2 import places
from profiler.suite.account import Account
from profiler.suite.environment import NoTimeError, Workplace, clocks, write_results
from profiler.suite.latency.grids import Grids
from profiler.suite.latency.kernels import KERNELS, span
from profiler.suite.latency.pair import PairMeasurement
from profiler.suite.latency.passes import EAGER, GRAPH
from profiler.suite.latency.stage import shapes_of
from profiler.suite.ledger import Ledger
from profiler.suite.runs.arms import COLUMNS
from profiler.suite.runs.checks import NAME, TRAINED_MODES, Checks, sampled_rounds
from profiler.suite.runs.kept_pair import given_pair, trained_pair
from profiler.suite.runs.real_pair import smollm2_pair
from profiler.suite.runs.recording import ENOUGH, record_early_exits, record_trace, write_within
from profiler.suite.runs.training import DRAFT, PROMPTS, TARGET
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.store.files import write_latency
from traces.store.measured import MeasuredRuns, write_measured

EXITS = "trained-exits.parquet"
FILES = {"greedy": "trained-trace.parquet", "sampled": "trained-sampled.parquet"}
NEW_TOKENS = 160
"""Tokens of an output, all of which are used: there is no end token.  So 200 prompts fit."""
T = TypeVar("T")


def run_trained(
    place: Workplace, target: str | None = None, draft: str | None = None,
    prompts: Path | None = None,
) -> Account:  # fmt: skip
    """Train, record, measure, check, compare; each part writes its file when it is done.

    With ``target``, ``draft`` and ``prompts`` a pair of the user's takes the place of the trained
    one; the target ``smollm2`` alone names SmolLM2 with its draft model, or where they are not on
    the machine random weights of their shapes (`profiler.suite.runs.real_pair`).

    Parts have fixed shares of the time; one that is late does less of its work, and one for
    which none is left, one that failed, or a recording of fewer than `ENOUGH` prompts, is named in
    the results and returned.  Begun again, be it for these or because it was stopped, the stage
    keeps the pair and every part that was finished, goes on with a short recording, and writes
    all files anew: the folder may have been emptied since.

    Raises
    ------
    DraftsimError
        If a pair is named and cannot be loaded.
    """
    total = place.seconds
    account = Account(place)
    if target is None:
        pair, texts, record = trained_pair(
            place, place.work / "trained-pair", 0.5 if place.quick else 0.34 * total
        )
        shape = PairShape(NAME, TARGET, DRAFT)
    else:
        most = 8 if place.quick else PROMPTS
        if target == places.NAME and draft is None:
            pair, texts, name = smollm2_pair(place, prompts, most)
            record = {}
        else:
            pair, texts, record = given_pair(place, target, draft, prompts, most)
            name = f"{Path(target).name}+{Path(str(draft)).name}"
        models = (("target", pair.target), ("draft", pair.draft))
        shape = PairShape(name, *(Architecture.of(role, model) for role, model in models))
    place.settle()
    stage = _Stage(place, account, pair, texts, shape)
    stage.keep(training=record, categories=sorted({p.category for p in texts}))
    with account.closing(stage.keep):
        stage.run()
    stage.ledger.close(account)
    return account


class _Stage:
    """The parts of the stage, and what they found."""

    def __init__(
        self, place: Workplace, account: Account, pair: Pair, prompts: Sequence[Prompt],
        shape: PairShape,
    ) -> None:  # fmt: skip
        self.place, self.account, self.pair, self.prompts = place, account, pair, prompts
        self.shape = shape
        self.ledger = Ledger(place, "trained", {"pair": shape.name})
        self.left_out: list[str] = []
        self.results: dict[str, Any] = {"stage": "trained", "meta": place.meta()}
        self.results["clocks"] = [clocks(place.device)]

    def keep(self, **more: Any) -> None:
        """Add to the results, and write them."""
        summary = self.account.summary()
        summary["left_out"] = [*self.left_out, *summary["left_out"]]
        self.results.update(summary, **more)
        self.results["clocks"] = [self.results["clocks"][0], clocks(self.place.device)]
        write_results(self.place.out / "trained.json", self.results)

    def part(
        self, name: str, make: Callable[[], dict[str, Any]], needs: object = True
    ) -> dict[str, Any]:
        """What a part found, now or before; empty if it failed, is late or lacks what it needs."""
        if (unit := self.ledger.get(name)) is not None and not unit.get("unfinished"):
            return unit
        if needs is None:
            self.account.fail(name, "the recording that it needs failed")
            return {}
        try:
            self.place.check_time()
            with span(name):
                unit = make()
        except NoTimeError:
            self.account.late[name] = "no time left"
            return {}
        except (DraftsimError, RuntimeError) as error:
            self.account.fail(name, error)
            self.place.release()
            return {}
        self.ledger.put(name, unit)
        return unit

    def recorded(self, name: str, settings: Settings, share: float) -> Trace | None:
        """A trace, as long as it was if it was finished before, else longer; written."""
        place, ledger = self.place, self.ledger
        done = (ledger.get(name) or {"recorded": 0})["recorded"]
        enough = min(ENOUGH, len(self.prompts))
        some = self.prompts[:done] if done >= enough else self.prompts
        until = time.monotonic() + min(share, place.left) if done < enough else float("inf")
        try:
            with span(name):
                trace = record_trace(place, self.pair, some, settings, until)
        except (DraftsimError, RuntimeError) as error:
            self.account.fail(name, error)
            place.release()
            return None
        count = len(trace.requests)
        ledger.put(name, {"recorded": count})
        kept = write_within(trace, place.out / FILES[name])
        if count < enough:
            self.account.late[name] = f"{count} of {enough} prompts, no time left"
        elif kept < enough:
            self.left_out.append(f"{name}: the file holds {kept} of {count} prompts")
        summary = {
            "requests": kept, "recorded": count, "tokens": trace.tokens,
            "near_ties": trace.meta["near_ties"], "unfinished": count < enough,
        }  # fmt: skip
        self.keep(**{name: summary})
        return trace

    def run(self) -> None:
        """All parts, in order."""
        place, pair, keep, part = self.place, self.pair, self.keep, self.part
        total = place.seconds
        new = 24 if place.quick else NEW_TOKENS
        settings = Settings(max_new_tokens=new, max_gamma=6 if place.quick else 16)
        hot = Settings(new, settings.max_gamma, Sampling(1.0), seed=1)
        trace = self.recorded("greedy", settings, 0.15 * total)
        sampled = self.recorded("sampled", hot, 0.17 * total)
        if measured := part("latency", self._latency):
            cells = self._write_latency(measured["cells"])
            keep(latency=measured["latency"], latency_cells=cells)
        checks = None if trace is None else Checks(place, pair, trace, new, self.shape.name)
        graphed = part("graph", lambda: _there(checks).run(GRAPH, 0.08 * total, 7), checks)
        self._write_measured(graphed)
        keep(rounds_graph=graphed.get("checked", {}))
        some, most = 3 if place.quick else 6, 0.06 * total
        keep(assisted=part(
            "assisted", lambda: _there(checks).against_assisted(some, most), checks
        ))  # fmt: skip
        rounds = part("sampled-rounds", lambda: sampled_rounds(pair, _there(sampled)), sampled)
        keep(sampled={**self.results.get("sampled", {}), **rounds})
        share = max(5.0, place.left - 0.05 * total)
        eager = part("eager", lambda: _there(checks).run(EAGER, share, 4), checks)
        self._write_measured(graphed, eager)
        keep(rounds_eager=eager.get("checked", {}))
        kept = place.work / "trained-files" / EXITS
        keep(exits=part("exits", lambda: self._exits(_there(checks), _there(trace), kept), trace))
        if kept.is_file():
            shutil.copyfile(kept, place.out / EXITS)

    def _exits(self, checks: Checks, trace: Trace, path: Path) -> dict[str, Any]:
        text = torch.stack([checks.own_text(i) for i in range(min(64, len(trace.requests)))])
        path.parent.mkdir(parents=True, exist_ok=True)
        share = max(3.0, 0.5 * self.place.left)
        return record_early_exits(self.place, self.pair, trace, text, path, share)

    def _write_measured(self, *checked: dict[str, Any]) -> None:
        times = [row for part in checked for row in part.get("times", ())]
        if times:
            runs = MeasuredRuns(pd.DataFrame(times, columns=list(COLUMNS)), self.pair.meta)
            write_measured(runs, self.place.out / "trained-measured.parquet")

    def _latency(self) -> dict[str, Any]:
        """The pair's own table, both modes; what else was measured with it."""
        rows: list[list[Any]] = []
        units: dict[str, Any] = {}
        place, pair, name = self.place, self.pair, self.shape.name
        for mode in TRAINED_MODES:
            grids = Grids(place.quick)
            if not place.quick:
                grids.contexts, grids.prompts = (64, 384), (64, 128)
                grids.widths = (1, 2, 3, 5, 9, 17)
            grids.batches = grids.between = ()
            grids.host_batches = (1,)
            end = time.monotonic() + 0.04 * place.seconds
            models = (pair.target, pair.draft)
            measured = PairMeasurement(place, self.shape, mode, models, grids, end)
            measured.run()
            for piece, why in measured.failed.items():
                self.account.failed[f"latency, {mode}, {piece}"] = why
            rows += [[f"{name}/{mode}/{row[0]}", *row[1:]] for row in measured.cells]
            unit = measured.unit()
            units[mode] = {k: v for k, v in unit.items() if k != "cells"}
        if not rows:
            raise NoTimeError("no time left")
        failed = any(unit["failed"] for unit in units.values())
        return {"latency": units, "cells": rows, "unfinished": failed}

    def _write_latency(self, rows: Sequence[Sequence[Any]]) -> int:
        """Write the table of both modes; how many cells it has."""
        frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
        shapes = {self.shape.name: shapes_of(self.shape)}
        meta = {
            "kind": "measured", "attention": "sdpa", "shapes": shapes, "kernels": KERNELS,
            **self.place.meta(),
        }  # fmt: skip
        write_latency(LatencyTable(frame, meta), self.place.out / "trained-latency.parquet")
        return len(rows)


def _there(value: T | None) -> T:
    assert value is not None
    return value
