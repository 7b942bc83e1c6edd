"""One profiling run: the latency table and the acceptance trace of a pair, in a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.progress import Progress

from profiler.checks.differences import ANSWERS, SOLVED, answers_to, solved_by
from profiler.latency.host import (
    GPU_GAMMAS,
    host_beyond,
    measure_batch_host,
    measure_choosing,
    measure_host,
)
from profiler.latency.passes import fitting_grid, measure_layers, pass_blocks
from profiler.latency.table import Grid, Sweeps
from profiler.machine import Machine
from profiler.models.loading import Pair
from profiler.models.runner import Runner, context_of
from profiler.models.seq2seq import Seq2SeqRunner, check_room, is_seq2seq, make_runner
from profiler.models.stack import LayerRunner
from profiler.prompts import TEXTS, Prompt
from profiler.recording.run import DONE_WITH, digest_of
from profiler.recording.trace import Recorder, slots_needed
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Request, Trace
from traces.aliases import Columns
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.store.checkpoint import Checkpoint
from traces.store.files import write_latency, write_trace

LEAST_PROMPTS = 4
"""Prompts that are recorded even if the time is over."""
GRID = "grid"
"""Provenance of a latency table: the points that it was measured at."""
NEAR_TIE = 1e-3
"""Top-2 logit margins below this count as near-ties: in lower precision the other may win."""


@dataclass(frozen=True)
class Settings:
    """The settings of a recording: limits, sampling and the latency grid."""

    max_new_tokens: int = 128
    max_gamma: int = 24
    sampling: Sampling = GREEDY
    seed: int = 0
    grid: Grid = field(default_factory=Grid)
    chat: bool = False
    """True if prompts are users' turns, to be put into the target's chat template."""
    together: int = 1
    """Prompts that the target decodes at once while recording."""


class LatencyProfile:
    """The measurement of a pair's latency table, sweep by sweep over all passes.

    Raises DraftsimError if the pair cannot be measured over the grid.
    """

    def __init__(self, pair: Pair, grid: Grid, checkpoint: Checkpoint | None = None) -> None:
        self._grid = grid = fitted_grid(pair, grid)
        slots = min(max(grid.contexts) + grid.widest, _positions(pair))
        self._pair, self._batched = pair, None
        self._short = pair.device.type == "cuda"
        self._runners = _runner(pair.target, slots), _runner(pair.draft, slots)
        target, draft = self._runners
        single = self._short and not isinstance(target, Seq2SeqRunner)
        blocks = pass_blocks(target, draft, self._grid, short=single)
        if (largest := max(grid.batches, default=1)) > 1:
            self._batched = Runner(pair.target, slots, largest), Runner(pair.draft, slots, largest)
            for i, batch in enumerate(b for b in grid.batches if b > 1):
                blocks += pass_blocks(
                    *self._batched, self._grid, batch, short=self._short, filled=i > 0
                )
        self.sweeps = Sweeps(blocks, pair.device, warmup=grid.warmup, checkpoint=checkpoint)
        self._machine = Machine(pair.target, pair.device)

    def step(self) -> None:
        """Run the next block of a sweep, and now and then the reference work."""
        if self.sweeps.steps % 8 == 0:
            self._machine.pulse()
        self.sweeps.step()

    def table(self, passes_alone: bool = False) -> LatencyTable:
        """Return the passes swept so far; the host's work is measured here and now.

        So are single layers, and what lossy rules and draws take, unless `passes_alone`: lossless
        greedy rounds of the draft model need neither, and both take minutes with large models on a
        CPU.
        """
        cells = self.sweeps.cells()
        parts = [cells, *self._host(cells)]
        if not passes_alone:
            longest, repeats = self._grid.longest, min(25, self._grid.repeats)
            parts.append(measure_choosing(*self._runners, longest=longest, repeats=repeats))
            parts += self._layers()
        meta = {
            "kind": "measured", "mode": "eager", "estimator": "mean", **self._pair.meta,
            "machine": self._machine.state([self.sweeps.repeats]),
        }  # fmt: skip
        return LatencyTable(pd.concat(parts, ignore_index=True), meta)

    def _layers(self) -> Iterator[pd.DataFrame]:
        """Yield the cells of each model's single layers, at a few widths, if it can run them."""
        grid = replace(self._grid, repeats=max(3, self._grid.repeats // 2))
        few = [w for w in grid.widths if w in (1, 5, max(grid.widths))]
        for name, runner in zip(("target", "draft"), self._runners, strict=True):
            if isinstance(runner, LayerRunner):
                yield measure_layers(runner, name, few, grid.contexts, grid)

    def _host(self, cells: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """Yield the host's time in rounds, alone and at every batch."""
        if not self._short:
            repeats = min(7, self._grid.repeats)  # each run makes real passes
            yield measure_host(*self._runners, repeats=repeats, longest=self._grid.longest)
            if self._batched is not None:
                yield measure_batch_host(*self._batched, self._grid.batches)
            return
        gammas = sorted({min(gamma, self._grid.longest) for gamma in GPU_GAMMAS})
        yield host_beyond(*self._runners, cells, gammas=gammas)
        for batch in [b for b in self._grid.batches if b > 1]:
            assert self._batched is not None
            yield host_beyond(*self._batched, cells, batch=batch, gammas=gammas)


def _runner(model: Any, slots: int) -> Runner:
    """Return a runner of the model's kind, which runs single layers if the model's can run so."""
    try:
        return LayerRunner(model, slots)
    except DraftsimError:
        return make_runner(model, slots)


def profile_latency(
    pair: Pair, settings: Settings, folder: Path, progress: Progress
) -> LatencyTable:
    """Measure the pair's latency table, or continue a stopped measurement."""
    grid = settings.grid
    checkpoint = Checkpoint(folder / ".latency", latency_options(pair, settings))
    profile = LatencyProfile(pair, grid, checkpoint)
    sweeps = profile.sweeps
    task = progress.add_task(
        "measuring latency", total=grid.repeats * len(sweeps.blocks), completed=sweeps.steps
    )
    while len(sweeps) < grid.repeats:
        profile.step()
        progress.update(task, completed=sweeps.steps)
    task = progress.add_task("measuring the host's work and single layers", total=None)
    latency = profile.table()
    progress.update(task, total=1, completed=1)
    done = digest_of(latency_options(pair, settings))
    latency = replace(latency, meta={**latency.meta, DONE_WITH: done, GRID: asdict(grid)})
    write_latency(latency, folder / "latency.parquet")
    checkpoint.close()
    return latency


def fitted_grid(pair: Pair, grid: Grid) -> Grid:
    """Return `grid` cut to the pair's positions; DraftsimError if nothing fits."""
    return fitting_grid(grid, _positions(pair), is_seq2seq(pair.target))


def _positions(pair: Pair) -> int:
    """Return the positions that both models know."""
    return min(context_of(model) for model in (pair.target, pair.draft))


def held_grid(pair: Pair, settings: Settings, meta: Mapping[str, Any]) -> Grid:
    """Return the grid of a finished table with the provenance `meta`, if it holds the settings'.

    The settings' own grid otherwise, as for a table that was measured under other conditions.
    """
    done = digest_of({"grid": meta.get(GRID), "meta": pair.meta})
    if meta.get(DONE_WITH) == done and (held := Grid(**meta[GRID])).holds(settings.grid):
        return held
    return settings.grid


def latency_options(pair: Pair, settings: Settings) -> dict[str, Any]:
    """Return the conditions that a latency table is measured under."""
    return {"grid": asdict(settings.grid), "meta": pair.meta}


def trace_options(pair: Pair, prompts: Sequence[Prompt], settings: Settings) -> dict[str, Any]:
    """Return the conditions that a trace is recorded under."""
    recorded = {k: v for k, v in asdict(settings).items() if k != "grid"}
    if settings.together == 1:
        del recorded["together"]  # recordings made before it existed stay finished
    return {"settings": recorded, "meta": pair.meta, "prompts": [p.id for p in prompts]}


def encoded_prompts(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings
) -> list[torch.Tensor]:
    """Return the ids of each prompt, (tokens,).

    Raises DraftsimError if the pair cannot record one of them with these settings.
    """
    if settings.together > 1 and is_seq2seq(pair.target):
        raise DraftsimError(
            "--record-batch: encoder-decoder pairs are recorded one prompt at a time: leave it out"
        )
    encoded = [pair.encode(p.text, settings.chat) for p in prompts]
    _check_context(pair, prompts, encoded, settings.max_new_tokens)
    return encoded


def profile_trace(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, folder: Path, progress: Progress
) -> Trace:
    """Record the pair's acceptance trace on `prompts`, or continue a stopped recording."""
    encoded = encoded_prompts(pair, prompts, settings)
    longest = max(int(ids.shape[0]) for ids in encoded)
    # Sized for what is recorded, beyond the positions a model knows: branches share them.
    slots = slots_needed(longest, settings.max_new_tokens, settings.max_gamma)
    target = make_runner(pair.target, slots)
    if settings.together > 1:
        target = Runner(pair.target, slots, settings.together + 1)
    name = "trace" if settings.sampling.greedy else "sampled"
    options = trace_options(pair, prompts, settings)
    checkpoint = Checkpoint(folder / f".{name}", options)
    task = progress.add_task(f"recording {name}", total=len(prompts))
    trace = recorded_trace(
        pair, (target, make_runner(pair.draft, slots)), prompts, encoded, settings, checkpoint,
        advance=lambda done: progress.update(task, completed=done),
    )  # fmt: skip
    trace = replace(trace, meta={**trace.meta, DONE_WITH: digest_of(options)})
    write_trace(trace, folder / f"{name}.parquet")
    checkpoint.close()
    return trace


def recorded_trace(
    pair: Pair, runners: tuple[Runner, Runner], prompts: Sequence[Prompt],
    encoded: Sequence[torch.Tensor], settings: Settings, kept: Checkpoint, *,
    until: float = math.inf, advance: Callable[[int], None] = lambda _: None,
) -> Trace:  # fmt: skip
    """Return the trace of the prompts, from `kept` where a stopped recording left them.

    ``encoded``: the prompts' ids.  ``until``: monotonic seconds after which no further prompt
    begins, but the first `LEAST_PROMPTS`; the trace is then of the first prompts alone.
    ``advance`` gets the number of prompts done.
    """
    recorder = Recorder(
        *runners, max_new_tokens=settings.max_new_tokens, max_gamma=settings.max_gamma,
        eos=pair.eos, sampling=settings.sampling, generator=torch.Generator(pair.device),
    )  # fmt: skip
    of = [repr((prompt.id, ids.tolist())) for prompt, ids in zip(prompts, encoded, strict=True)]
    recorded = [kept.get(f"{i:05d}", name) for i, name in enumerate(of)]
    missing = [i for i, columns in enumerate(recorded) if columns is None]
    done = len(recorded) - len(missing)
    advance(done)
    # A seed per prompt: a resumed recording draws what an uninterrupted one would.
    seeds = [settings.seed * 1_000_003 + i for i in range(len(encoded))]
    in_time = takewhile(lambda i: i < LEAST_PROMPTS or time.monotonic() <= until, missing)
    begin = time.perf_counter()
    for i, columns, decode_s in _record(recorder, encoded, seeds, in_time, settings.together):
        columns["seconds"] = np.array([decode_s, time.perf_counter() - begin])
        kept.put(f"{i:05d}", columns, of[i])
        recorded[i] = columns
        begin = time.perf_counter()
        done += 1
        advance(done)
    made = [columns for columns in takewhile(lambda c: c is not None, recorded) if columns]
    return assemble(pair, prompts[: len(made)], encoded[: len(made)], made, settings)


def _record(
    recorder: Recorder,
    encoded: Sequence[torch.Tensor],
    seeds: Sequence[int],
    missing: Iterable[int],
    together: int,
) -> Iterator[tuple[int, Columns, float]]:
    """Record the prompts `missing`; yield place, columns and seconds of plain decoding.

    The seconds are NaN where several prompts are decoded together.
    """
    if together == 1:
        for i in missing:
            assert recorder.generator is not None
            recorder.generator.manual_seed(seeds[i])
            yield i, recorder.record(encoded[i]), recorder.decode_s
        return
    # Prompts of like lengths: a pass attends to as many slots as the longest needs.
    order = sorted(missing, key=lambda i: int(encoded[i].shape[0]))
    prompts, own = [encoded[i] for i in order], [seeds[i] for i in order]
    for place, columns in recorder.record_together(prompts, own):
        yield order[place], columns, math.nan


def assemble(
    pair: Pair,
    prompts: Sequence[Prompt],
    encoded: Sequence[torch.Tensor],
    recorded: Sequence[Columns],
    settings: Settings,
) -> Trace:
    """Make one trace of the columns recorded of each prompt, and score its answers."""
    seconds = np.array([columns.pop("seconds") for columns in recorded])
    requests, eos, together = [], pair.eos, settings.together > 1
    for i, (prompt, ids, columns) in enumerate(zip(prompts, encoded, recorded, strict=True)):
        on_path = columns["offset"] == 0
        last = int(columns["token"][on_path][-1])
        columns["request"] = np.full(len(on_path), i, dtype=np.int32)
        requests.append(
            Request(
                prompt.id, prompt.category, int(ids.shape[0]), int(on_path.sum()),
                settings.max_new_tokens, "eos" if last in eos else "length",
                tuple(ids.tolist()), None if together else float(seconds[i, 0]),
            )
        )  # fmt: skip
    columns = {name: np.concatenate([c[name] for c in recorded]) for name in recorded[0]}
    on_path = columns["offset"] == 0
    margins = columns["target_top1"][on_path] - columns["target_top2"][on_path]
    meta: dict[str, Any] = {
        **pair.meta,
        "chat_template": settings.chat,
        TEXTS: {prompt.id: prompt.digest for prompt in prompts},
        "sampling": {**settings.sampling.meta, "seed": settings.seed},
        "eos_token_ids": sorted(eos),
        "near_ties": {"below": NEAR_TIE, "count": int((margins < NEAR_TIE).sum())},
        "recording_s": {
            "plain": None if together else float(seconds[:, 0].sum()),
            "all": float(seconds[:, 1].sum()),
        },
        **({"decoded_together": settings.together} if together else {}),
    }
    trace = Trace(columns, requests, settings.max_gamma, meta)
    answers = answers_to(trace, prompts)
    scored = {ANSWERS: answers, SOLVED: solved_by(pair, trace, answers)} if answers else {}
    return replace(trace, meta={**meta, **scored})


def _check_context(
    pair: Pair, prompts: Sequence[Prompt], encoded: Sequence[torch.Tensor], new: int
) -> None:
    room = _positions(pair)
    for prompt, ids in zip(prompts, encoded, strict=True):
        length = int(ids.shape[0])
        if length == 0:
            raise DraftsimError(f"prompt {prompt.id!r} has no tokens: give some text")
        if is_seq2seq(pair.target):
            for model in (pair.target, pair.draft):
                check_room(model, length, new, f"prompt {prompt.id!r}: ")
        elif length + new > room:
            raise DraftsimError(
                f"prompt {prompt.id!r} of {length} tokens and {new} new ones exceed the pair's "
                f"context of {room}: shorten it or lower --max-new-tokens"
            )
