"""Stage ``trained``: a pair trained here, recorded, decoded for real, and compared.

Writes ``trained-trace.parquet`` (greedy), ``trained-sampled.parquet`` (T = 1),
``trained-latency.parquet``, ``trained-measured.parquet`` and ``trained.json``; no weights.  Each
drafter on the target's features makes a pair of its own with it, and adds
``trained-trace-DRAFTER.parquet``.

A trained pair is kept with its stage's unfinished work, so that a stopped stage trains once.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import transformers

from profiler.fetched.places import SMOLLM2
from profiler.latency.table import Grid
from profiler.machine import NoTimeError
from profiler.models.architectures import DecoderShape, PairShape
from profiler.models.graphs import GraphRunner
from profiler.models.loading import Pair, fingerprint, load_pair
from profiler.profile import Settings, recorded_trace
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import BUNDLED, model_path
from profiler.recording.trace import slots_needed
from profiler.suite import EAGER, GRAPH
from profiler.suite.checks import (
    COLUMNS,
    NAME,
    TRAINED_MODES,
    Checks,
    DrafterPair,
    Drafters,
    given_drafters,
)
from profiler.suite.environment import (
    Units,
    Workplace,
    is_unfinished,
    write_results,
    write_within,
)
from profiler.suite.latency_stage import named_cells, note_missing, shapes_of, write_cells
from profiler.suite.pair import FULL, QUICK, PairMeasurement
from profiler.train.minutes import DRAFT, TARGET, Trained, train_pair
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import MeasuredRuns, write_measured
from traces.store.text import read_object

FILES = {"greedy": "trained-trace.parquet", "sampled": "trained-sampled.parquet"}
PROMPTS, QUICK_PROMPTS = 210, 4
"""Prompts to record, a few more than a recording needs (`ENOUGH`); in miniatures."""
ENOUGH = 200
"""Fewest prompts of a finished recording."""
NEW_TOKENS = 160
"""Tokens of an output.  All are used, because there is no end token; so 200 prompts fit."""
DRAFTER_SHARE = 0.14
"""Share of the stage's time for each drafter on the target's features."""
GRID = Grid(
    (1, 2, 3, 5, 9, 17), contexts=(64, 384), prompts=(64, 128), batch_widths=(1,), repeats=3
)


def run_trained(
    place: Workplace, target: str | None = None, draft: str | None = None,
    prompts: Path | None = None, drafters: Sequence[str] = (),
) -> Units:  # fmt: skip
    """Train, record, measure and decode for real; each part writes its file when it is done.

    With ``target``, ``draft`` and ``prompts`` a pair of the user's takes the place of the trained
    one, and ``drafters`` are folders of drafters on its features.  The target ``smollm2`` alone
    names SmolLM2 with its draft model, the project's prompts, EAGLE and EAGLE-3.

    Parts have fixed shares of the time, and a late part does less of its work.  The results name
    parts without time, failed parts, and a recording of fewer than `ENOUGH` prompts; they are
    returned, too.  If the stage is started again, it keeps the pair and every finished part,
    continues a short recording, and writes all files again, because the folder may have been
    emptied.

    Raises DraftsimError if a pair is named and cannot be loaded, or a stopped run of the stage had
    other models or prompts.
    """
    on_features: Drafters = {}
    chat = False
    if target is None:
        if draft or prompts or drafters:
            raise DraftsimError(
                "--draft, --prompts and --drafters are a given target's: name it with --target"
            )
        pair, texts, record = trained_pair(
            place, place.work / "trained-pair", 0.5 if place.quick else 0.34 * place.seconds
        )
        shape = PairShape(NAME, TARGET, DRAFT)
    else:
        name = f"{Path(target).name}+{Path(str(draft)).name}"
        if target == SMOLLM2.name and draft is None:
            name, draft, prompts = target, target, prompts or BUNDLED / "prompts.jsonl"
            own = [f"{target}-{d}" for d in SMOLLM2.drafters if d.startswith("eagle")]
            drafters = [*own, *drafters]
            chat = True
        most = QUICK_PROMPTS if place.quick else PROMPTS
        pair, texts = given_pair(place, target, draft, prompts, most)
        record, on_features = {}, given_drafters(drafters, pair.target)
        models = (("target", pair.target), ("draft", pair.draft))
        shape = PairShape(name, *(DecoderShape.of(role, model) for role, model in models))
    place.settle()
    stage = _Stage(place, pair, texts, shape, on_features, chat)
    stage.keep(training=record, categories=sorted({p.category for p in texts}))
    with stage.units.closing(stage.keep):
        stage.run()
    stage.units.close()
    return stage.units


class _Stage:
    """The parts of the stage, and what they found."""

    def __init__(
        self, place: Workplace, pair: Pair, prompts: Sequence[Prompt], shape: PairShape,
        drafters: Drafters, chat: bool,
    ) -> None:  # fmt: skip
        self.place, self.pair, self.prompts = place, pair, prompts
        self.shape, self.drafters, self.chat = shape, drafters, chat
        self.units = Units(
            place, "trained", pair=shape.name, chat=chat,
            prompts=[(p.id, p.digest) for p in prompts],
            weights=[pair.meta[role]["fingerprint"] for role in ("target", "draft")],
            drafters={name: fingerprint(drafter) for name, drafter in drafters.items()},
        )  # fmt: skip
        self.left_out: list[str] = []
        self.results: dict[str, Any] = {"stage": "trained", "meta": place.meta()}

    def keep(self, **more: Any) -> None:
        """Add to the results, and write them."""
        summary = self.units.summary()
        summary["left_out"] = [*self.left_out, *summary["left_out"]]
        self.results.update(summary, **more)
        write_results(self.place.out / "trained.json", self.results)

    def part(
        self, name: str, make: Callable[[Any], dict[str, Any]], needs: Any = True
    ) -> dict[str, Any]:
        """Return a part's results, from now or before; empty if it failed or cannot run."""
        kept = self.units.get(name) or {}
        if kept and not is_unfinished(kept):
            return kept
        if needs is None:
            self.units.fail(name, "the recording that it needs failed")
            return kept
        unit = None
        with self.units.noting(name):
            self.place.check_time()
            unit = make(needs)
        if unit is None:
            self.place.release()
            return kept
        self.units.put(name, unit)
        return unit

    def recorded(self, name: str, settings: Settings, share: float) -> Trace | None:
        """Record and write a trace; a finished one keeps its length, another gets longer."""
        place, units = self.place, self.units
        done = (units.get(name) or {"recorded": 0})["recorded"]
        enough = min(ENOUGH, len(self.prompts))
        some = self.prompts[:done] if done >= enough else self.prompts
        until = time.monotonic() + min(share, place.left) if done < enough else float("inf")
        try:
            trace = record_trace(place, self.pair, some, settings, until)
        except (DraftsimError, RuntimeError) as error:
            self.units.fail(name, error)
            place.release()
            return None
        count = len(trace.requests)
        units.put(name, {"recorded": count})
        kept = write_within(trace, place.out / FILES[name])
        if count < enough:
            self.units.late[name] = f"{count} of {enough} prompts, no time left"
        elif kept < enough:
            self.left_out.append(f"{name}: the file holds {kept} of {count} prompts")
        summary = {
            "requests": kept, "recorded": count, "tokens": trace.tokens,
            "near_ties": trace.meta["near_ties"], "unfinished": count < enough,
        }  # fmt: skip
        self.keep(**{name: summary})
        return trace

    def run(self) -> None:
        """Do all parts, in order."""
        place, pair, keep, part = self.place, self.pair, self.keep, self.part
        total = place.seconds
        new = 8 if place.quick else NEW_TOKENS
        settings = Settings(new, 4 if place.quick else 16, chat=self.chat)
        trace = self.recorded("greedy", settings, 0.15 * total)
        self.recorded("sampled", replace(settings, sampling=Sampling(1.0), seed=1), 0.17 * total)
        measured = part("latency", lambda _: measure_modes(place, pair, self.shape, self.units))
        cells = measured.get("cells", [])
        self._write_latency(cells)
        keep(latency=measured.get("latency", {}), latency_cells=len(cells))
        checks = None if trace is None else Checks(place, pair, trace, self.shape.name)
        graphed = part("graph", lambda own: own.run(GRAPH, 0.08 * total, 7), checks)
        self._write_measured(graphed)
        keep(rounds_graph=graphed.get("checked", {}))
        share = max(5.0, place.left - DRAFTER_SHARE * len(self.drafters) * total)
        eager = part("eager", lambda own: own.run(EAGER, share, 4), checks)
        self._write_measured(graphed, eager)
        keep(rounds_eager=eager.get("checked", {}))
        drafted: dict[str, dict[str, Any]] = {}
        for name, drafter in self.drafters.items():
            of = DrafterPair(place, pair, drafter, name, self.shape.name)
            drafted[of.pair_name] = self._drafted(of, trace, checks, cells)
        if drafted:
            self._write_latency([*cells, *(c for d in drafted.values() for c in d["cells"])])
            self._write_measured(graphed, eager, *drafted.values())
            keep(drafters={
                name: {k: v for k, v in found.items() if k not in ("cells", "times")}
                for name, found in drafted.items()
            })  # fmt: skip

    def _drafted(
        self, of: DrafterPair, trace: Trace | None, checks: Checks | None,
        cells: Sequence[Sequence[Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """Record a drafter, time its passes and run it; ``cells`` are named for the table."""
        share = 0.5 * DRAFTER_SHARE * self.place.seconds
        eager = of_mode(cells, EAGER)
        own = self.part(of.pair_name, lambda known: of.measure(known, eager, share), trace)
        if not own:
            return {"cells": []}
        shutil.copyfile(of.path, self.place.out / of.path.name)
        runs = self.part(f"{of.pair_name}, runs", lambda known: of.run(known, share), checks)
        rows = of.with_own(eager, own["cells"])
        return {**own, **runs, "cells": named_cells(rows, of.pair_name, EAGER)}

    def _write_latency(self, rows: Sequence[Sequence[Any]]) -> None:
        """Write the table of all modes and drafters, if there is anything in it."""
        base = self.shape.name
        both = shapes_of(self.shape)
        alone = {f"{base}+{name}": {"target": both["target"]} for name in self.drafters}
        if rows:
            write_cells(self.place, rows, {base: both, **alone}, "trained-latency.parquet")

    def _write_measured(self, *checked: dict[str, Any]) -> None:
        times = [row for part in checked for row in part.get("times", ())]
        if times:
            runs = MeasuredRuns(pd.DataFrame(times, columns=list(COLUMNS)), self.pair.meta)
            write_measured(runs, self.place.out / "trained-measured.parquet")


def measure_modes(place: Workplace, pair: Pair, shape: PairShape, stage: Units) -> dict[str, Any]:
    """Measure the pair's passes in the modes of real decoding, 4% of the stage's time for each.

    Parts that were measured before the stage was started again are not repeated.  Returns its
    ``cells``, models named ``pair/mode/model``, and what else was measured.

    Raises NoTimeError if there was no time for any.
    """
    before = stage.get("latency") or {"latency": {}, "cells": []}
    rows: list[list[Any]] = []
    units: dict[str, Any] = {}
    grid = replace(QUICK.grid, batches=(1,)) if place.quick else GRID
    plan = replace(QUICK if place.quick else FULL, grid=grid)
    for mode in TRAINED_MODES:
        end = time.monotonic() + 0.04 * place.seconds
        kept = {**before["latency"].get(mode, {}), "cells": of_mode(before["cells"], mode)}
        measured = PairMeasurement(place, shape, mode, (pair.target, pair.draft), plan, end, kept)
        measured.run()
        rows += named_cells(measured.cells, shape.name, mode)
        unit = measured.unit()
        note_missing(stage, f"latency, {mode}", unit)
        units[mode] = {k: v for k, v in unit.items() if k != "cells"}
    if not rows:
        raise NoTimeError("no time left")
    return {"latency": units, "cells": rows, "unfinished": any(map(is_unfinished, units.values()))}


def of_mode(rows: Sequence[Sequence[Any]], mode: str) -> list[list[Any]]:
    """Return the cells of a mode in a table of one pair, its models named as usual."""
    split = [(row[0].split("/"), row) for row in rows]
    return [[model, *row[1:]] for (_, own, model), row in split if own == mode]


def trained_pair(place: Workplace, folder: Path, seconds: float) -> Trained:
    """Return the pair in `folder`, or one trained now for `seconds` and kept there."""
    transformers.utils.logging.disable_progress_bar()  # it would run through our lines
    if (folder / "about.json").is_file():
        place.say("the pair was trained before the stage was stopped")
        about = read_object(folder / "about.json")
        pair = replace(_load_pair(place, folder / "target", folder / "draft"), meta=about["meta"])
        return pair, [Prompt(**prompt) for prompt in about["prompts"]], about["record"]
    most = QUICK_PROMPTS if place.quick else PROMPTS
    pair, prompts, record = train_pair(
        seconds, place.device, place.dtype, place.say, prompts=most, quick=place.quick
    )
    pair = replace(pair, meta={**pair.meta, **place.meta()})
    _write_pair(folder, pair, prompts, record)
    return pair, prompts, record


def _write_pair(
    folder: Path, pair: Pair, prompts: Sequence[Prompt], record: dict[str, Any]
) -> None:
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(part / name)
        pair.tokenizer.save_pretrained(part / name)
    about = {"meta": pair.meta, "prompts": [asdict(p) for p in prompts], "record": record}
    (part / "about.json").write_text(json.dumps(about))
    os.replace(part, folder)


def _load_pair(place: Workplace, target: str | Path, draft: str | Path) -> Pair:
    dtype = str(place.dtype).removeprefix("torch.")
    return load_pair(target, draft, device=str(place.device), dtype=dtype)


def given_pair(
    place: Workplace, target: str, draft: str | None, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt]]:
    """Return a user's pair, by folder or name, and a limited number of prompts.

    Raises DraftsimError if draft or prompts are not named, or one cannot be loaded.
    """
    if draft is None or prompts is None:
        raise DraftsimError("--target also takes --draft and --prompts: name all three")
    pair = _load_pair(place, model_path(target, "target"), model_path(draft, "draft"))
    return pair, read_prompts(prompts, most)


def record_trace(
    place: Workplace, pair: Pair, prompts: Sequence[Prompt], settings: Settings, until: float
) -> Trace:
    """Record as many prompts as are done by `until` (monotonic seconds), four at least.

    The target decodes through captured passes; tails run eagerly under their tree masks.
    Prompts recorded before the stage was stopped are read back.
    """
    encoded = [pair.encode(p.text, settings.chat) for p in prompts]
    longest = max(len(ids) for ids in encoded)
    slots = slots_needed(longest, settings.max_new_tokens, settings.max_gamma)
    runners = GraphRunner(pair.target, slots), GraphRunner(pair.draft, slots)
    # Of other weights' outputs nothing may be taken over.
    weights = [pair.meta[role]["fingerprint"] for role in ("target", "draft")]
    kept = Checkpoint(
        place.work / f"trained-trace-{settings.sampling.temperature:g}",
        {"settings": settings, "pair": weights},
    )
    trace = recorded_trace(pair, runners, prompts, encoded, settings, kept, until=until)
    count = f"{len(trace.requests)} of {len(prompts)} prompts"
    place.say(f"recorded {count}, {settings.sampling.label}")
    return trace
