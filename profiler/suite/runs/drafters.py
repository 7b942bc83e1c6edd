"""Drafters on the target's features (EAGLE, EAGLE-3, MTP) in stage ``trained``.

Each makes a pair with the target: a recording of its own, with what it drafts from every start
instead of the draft model's drafts (`traces.sources.starts.as_draft`), its passes in the target's
table, and real runs next to plain ones.  Code that reads a pair's recording reads these, too.  They
are launched kernel by kernel: no engine's drafter is, so their c is the eager one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from profiler import smollm2
from profiler.checks.spot_check import Arm
from profiler.features import (
    Eagle,
    Eagle3,
    FeatureDrafter,
    default_depths,
    layer_config,
    read_drafter,
)
from profiler.fetched import places as fetched
from profiler.models.loading import Pair
from profiler.models.stack import LayerRunner
from profiler.recording.run import model_path
from profiler.sources.feature_latency import measure_drafters
from profiler.sources.modules import Modules, record_sources
from profiler.sources.run import SourceRunner
from profiler.suite.environment import Workplace
from profiler.suite.latency.passes import EAGER
from profiler.suite.runs.arms import arms_named
from profiler.suite.runs.checks import Checks
from profiler.suite.runs.compared import compared_runs
from profiler.suite.runs.recording import write_within
from profiler.train.stored import feature_drafter, read_stored
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.sources.starts.as_draft import drafted_trace, in_the_drafts_place
from traces.sources.starts.features import Eagle as EagleSource
from traces.store.files import read_trace

OFFSETS = 8
"""Longest draft that is recorded."""
ARMS = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "hf-heuristic", "gammatune", "svip",
)  # fmt: skip
QUICK_ARMS = ("autoregressive", "fixed:gamma=3", "svip")

Drafters = Mapping[str, FeatureDrafter]
"""Drafters by the name of their folder."""


def smollm2_drafters(place: Workplace, target: Any) -> Drafters:
    """SmolLM2's own, where they were fetched; else the project's weights, over any `target`.

    A target of another width, as miniatures have, gets drafters of random weights.
    """
    found: dict[str, FeatureDrafter] = {}
    layer = layer_config(target.config)
    for name in [d for d in smollm2.DRAFTERS if d.startswith("eagle")]:
        folder = fetched.folder(f"{smollm2.NAME}-{name}")
        settings, weights = read_stored(smollm2.STORED / f"{name}.safetensors")
        own = weights["fc.weight"].shape[0] == layer.hidden_size
        if own and (folder / "config.json").is_file():
            found[name] = read_drafter(folder, target)
            continue
        made: FeatureDrafter
        if own:
            made = feature_drafter(settings, weights, target)
        elif settings["kind"] == "eagle":
            made = Eagle(layer)
        else:
            drafted = range(0, int(layer.vocab_size), 2)
            made = Eagle3(layer, drafted, default_depths(int(target.config.num_hidden_layers)))
        made.to(device=place.device, dtype=target.dtype).eval().requires_grad_(False)
        found[name] = made.attach(target)
    return found


def given_drafters(folders: Sequence[str], target: Any) -> Drafters:
    """Read the drafters in `folders`; DraftsimError if one is damaged, unusable or ambiguous."""
    found: dict[str, FeatureDrafter] = {}
    for text in folders:
        path = Path(model_path(text, "draft"))
        if path.name in found:
            raise DraftsimError(f"--drafters: two are called {path.name}: rename a folder")
        found[path.name] = read_drafter(path, target)
        if found[path.name].modules_in_turn > 1:
            raise DraftsimError(
                f"--drafters {text}: its modules run in turn, which no trace of a pair holds: "
                "record it with `draftsim profile --source`"
            )
    return found


class DrafterPair:
    """A target with a drafter on its features.

    ``name`` is the drafter's, ``base`` that of the target's pair.
    """

    def __init__(
        self, place: Workplace, pair: Pair, drafter: FeatureDrafter, name: str, base: str
    ) -> None:
        self.place, self.pair = place, pair
        self.source = EagleSource(name)
        self.pair_name = f"{base}+{name}"
        self.path = place.work / "trained-files" / f"trained-trace-{name}.parquet"
        self._modules = Modules(drafters={self.source.key: drafter})

    def measure(
        self, trace: Trace, cells: Sequence[Sequence[Any]], seconds: float
    ) -> dict[str, Any]:
        """Record what it drafts along `trace`, and time its passes.

        As many requests as `seconds` hold, one at least, go into the file at `path`.  ``cells`` are
        the target's, launched kernel by kernel; returned are those of the pair the two make.

        Raises DraftsimError if there are none.
        """
        if not cells:
            raise DraftsimError("the latencies that it needs were not measured")
        begin = time.monotonic()
        made = self._recorded(trace.select([0]))
        each_s = time.monotonic() - begin
        if (count := int(min(len(trace.requests), seconds / each_s))) > 1:
            made = self._recorded(trace.select(range(count)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = write_within(made, self.path)
        self.place.say(f"{self.pair_name}: recorded {kept} of {len(trace.requests)} prompts")
        return {"trace": self.path.name, "requests": kept, "cells": self._timed(cells)}

    def _recorded(self, trace: Trace) -> Trace:
        self.place.check_time()
        found = record_sources(
            self.pair.target, trace, self._modules, draft_offsets=OFFSETS, only=[self.source.key]
        )
        return drafted_trace(trace, self.source, found)

    def _timed(self, cells: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return the target's cells, with the drafter's instead of the draft model's."""
        place = self.place
        widths, contexts = ((1, 2), (16, 48)) if place.quick else ((1, 2, 3, 5, 9), (64, 384))
        repeats = 1 if place.quick else 5
        limit = int(self.pair.target.config.get_text_config().max_position_embeddings)
        target = LayerRunner(self.pair.target, min(limit, max(contexts) + max(widths)))
        place.check_time()
        own = measure_drafters(target, self._modules.drafters, repeats, widths, contexts)
        frame = pd.DataFrame(cells, columns=list(CELL_COLUMNS))
        table = LatencyTable(pd.concat([frame, own], ignore_index=True))
        rows: list[list[Any]] = in_the_drafts_place(table, self.source.key).cells.values.tolist()
        return rows

    def run(self, checks: Checks, seconds: float) -> dict[str, Any]:
        """Run policies with it on the requests of `checks`, interleaved, and compare the rounds."""
        drafted = read_trace(self.path)
        count = min(len(drafted.requests), len(checks.trace.requests))
        trace = checks.trace.select(range(count))
        names = QUICK_ARMS if self.place.quick else ARMS
        arms = arms_named(names, drafted)
        runner = SourceRunner(self.pair.target, trace, self._modules)
        plain = names[0]

        def opened(arm: Arm, i: int) -> Any:
            return checks.plain(i) if arm.name == plain else runner.decoder(self.source, i)

        return compared_runs(
            self.place, self.pair_name, EAGER, arms, trace, opened, seconds=seconds,
            drafted=drafted.select(range(count)),
        )  # fmt: skip
