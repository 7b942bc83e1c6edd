"""Real decoding of a trained pair: every policy against replay, and against transformers.

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

import numpy as np
import pandas as pd
import torch

from policies.core import DraftPolicy, Round, speculate
from policies.lengths.basic import Fixed
from profiler import smollm2
from profiler.checks.assisted import assisted_generation
from profiler.checks.spot_check import Arm
from profiler.decoding.single import ModelDecoder
from profiler.features import (
    Eagle,
    Eagle3,
    FeatureDrafter,
    default_depths,
    layer_config,
    read_drafter,
)
from profiler.fetched import places as fetched
from profiler.machine import timed
from profiler.models.loading import Pair
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner
from profiler.recording.run import model_path
from profiler.sources.latency import measure_drafters
from profiler.sources.run import SourceRunner, record_sources
from profiler.sources.start_record import RecordOptions
from profiler.suite.environment import Workplace
from profiler.suite.latency.passes import EAGER, GRAPH, make_runner
from profiler.suite.runs.arms import arms_named, arms_of, compared_runs
from profiler.suite.runs.forced_stage import prepare
from profiler.suite.runs.training import write_within
from profiler.train.stored import feature_drafter, read_stored
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.starts.as_draft import drafted_trace, in_the_drafts_place
from traces.sources.starts.features import Eagle as EagleSource
from traces.store.files import read_trace

NAME = "trained-12+3"
TRAINED_MODES = (EAGER, GRAPH)
"""Modes of real decoding: what it tests is verdicts, and compiled passes are no other ones."""
ASSISTED = {
    "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}  # fmt: skip


class Checks:
    """Real decoding of some recorded requests, against replay and against transformers."""

    def __init__(
        self, place: Workplace, pair: Pair, trace: Trace, new: int, name: str = NAME
    ) -> None:
        self.place, self.pair, self.new, self.name = place, pair, new, name
        # The first requests are of every category in turn.
        self.trace = trace.select(range(min(2 if place.quick else 7, len(trace.requests))))
        self._all = trace
        self._made: dict[str, tuple[Runner, Runner]] = {}

    def own_text(self, request: int) -> torch.Tensor:
        """The last tokens of a request's prompt and output, as many for every request."""
        info, starts = self._all.requests[request], self._all.request_starts
        rows = self._all.on_path[starts[request] : starts[request + 1]]
        ids = [*(info.prompt_ids or ()), *self._all.columns["token"][rows].tolist()]
        return torch.tensor(ids[-self.new :], device=self.pair.device)

    def run(self, mode: str, seconds: float, requests: int) -> dict[str, Any]:
        """Every policy on the first `requests`, interleaved; real rounds against replay.

        Returns the measured ``times``, rows of `profiler.suite.runs.arms.COLUMNS`, and what was
        ``checked``.  Raises NoTimeError if there is no time to run every policy once.
        """
        trace = self.trace.select(range(min(requests, len(self.trace.requests))))
        target, draft = self._runners(mode)
        return compared_runs(
            self.place, self.name, mode, arms_of(trace, self.place.quick), trace,
            lambda _, i: self._decoder(target, draft, i), seconds=seconds,
        )  # fmt: skip

    def plain(self, i: int) -> ModelDecoder:
        """A decoder of a request for policies that draft nothing, launched kernel by kernel."""
        return self._decoder(*self._runners(EAGER), i)

    def against_assisted(self, prompts: int, within: float) -> dict[str, Any]:
        """Tokens per second, prefill included, of our decoder and of transformers', interleaved.

        At most `prompts` prompts, none begun after `within` seconds but the first; raises
        NoTimeError if the stage has no time left for that one.
        """
        begin = time.monotonic()
        pair, trace = self.pair, self.trace
        runners = {mode: self._runners(mode) for mode in TRAINED_MODES}
        spent: dict[str, list[float]] = {}
        for i in range(-1, min(prompts, len(trace.requests))):  # the first one warms up
            if spent and (self.place.left <= 0 or time.monotonic() - begin > within):
                break
            self.place.check_time()
            info = trace.requests[max(i, 0)]
            prompt = torch.tensor(info.prompt_ids, device=pair.device)
            seconds: dict[str, float] = {}
            for mode, (target, draft) in runners.items():
                for gamma in (0, 5):
                    seconds[f"ours, {mode}, gamma {gamma}"] = self._whole(
                        target, draft, max(i, 0), Fixed(gamma)
                    )
            _, _, seconds["transformers assisted, gamma 5"] = assisted_generation(
                pair, prompt, info.max_new_tokens, **ASSISTED
            )
            with torch.inference_mode(), timed(pair.device) as plain:
                pair.target.generate(
                    input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None],
                    max_new_tokens=info.max_new_tokens, do_sample=False,
                )  # fmt: skip
            seconds["transformers plain"] = plain()
            if i >= 0:
                for name, value in seconds.items():
                    spent.setdefault(name, []).append(info.max_new_tokens / value)
        return {
            name: {"tokens_per_s": float(np.median(v)), "prompts": len(v)}
            for name, v in spent.items()
        }

    def _whole(self, target: Runner, draft: Runner, i: int, policy: DraftPolicy) -> float:
        with timed(self.pair.device) as spent:
            list(speculate(self._decoder(target, draft, i), policy.for_run().fresh()))
        return spent()

    def _runners(self, mode: str) -> tuple[Runner, Runner]:
        """Target and draft in a mode; captured once, as that takes a good part of the time."""
        if mode in self._made:
            return self._made[mode]
        slots = self.trace.longest
        target = make_runner(mode, self.pair.target, slots)
        draft = make_runner(mode, self.pair.draft, slots)
        prepare(target, draft, slots, self.trace.max_gamma or 1, self.place.check_time)
        self._made[mode] = target, draft
        return target, draft

    def _decoder(self, target: Runner, draft: Runner, i: int) -> ModelDecoder:
        info, starts = self.trace.requests[i], self.trace.request_starts
        runs = self.trace.run_lengths[starts[i] : starts[i + 1]].tolist()
        prompt = torch.tensor(info.prompt_ids, device=self.pair.device)
        return ModelDecoder(
            target, draft, prompt, info.max_new_tokens, self.pair.eos, run_lengths=runs
        )


def sampled_rounds(pair: Pair, trace: Trace, gamma: int = 4) -> dict[str, Any]:
    """Accepted per full round in real rejection sampling and in replay, and how far apart."""
    some = trace.select(range(min(16, len(trace.requests))))
    slots = some.longest
    target, draft = make_runner(GRAPH, pair.target, slots), make_runner(GRAPH, pair.draft, slots)
    generator = torch.Generator(pair.device).manual_seed(7)
    real: list[Sequence[Round]] = []
    for info in some.requests:
        decoder = ModelDecoder(
            target, draft, torch.tensor(info.prompt_ids, device=pair.device), info.max_new_tokens,
            pair.eos, sampling=trace.sampling, generator=generator,
        )  # fmt: skip
        real.append(list(speculate(decoder, Fixed(gamma))))
    means = []
    for log in (RoundLog.pack(real), replay(some, Fixed(gamma)).rounds):
        full = log["drafted"] == gamma
        sums, counts = (
            np.bincount(log["request"][full], weights=w, minlength=len(some.requests))
            for w in (log["accepted"][full].astype(float), np.ones(int(full.sum())))
        )
        means.append(sums / np.maximum(counts, 1))
    gap = means[0] - means[1]
    error = float(gap.std(ddof=1) / np.sqrt(len(gap))) if len(gap) > 1 else float("nan")
    return {
        "accepted_real": float(means[0].mean()), "accepted_replayed": float(means[1].mean()),
        "standard_error": error, "gamma": gamma,
    }  # fmt: skip


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
        self._modules = {self.source.key: drafter}

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
            self.pair.target,
            trace,
            self._modules,
            RecordOptions(offsets=OFFSETS),
            only=[self.source.key],
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
        own = measure_drafters(target, self._modules, repeats, widths, contexts)
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
