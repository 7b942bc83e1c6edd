"""Measures how long each step of decoding takes, on the device in front of you.

Every cell runs the very code the decoder runs.  Repeats are interleaved: each sweep
times all cells once in a fresh random order, so that drift of the machine spreads over
all of them instead of biasing some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from policies.basic import Fixed
from policies.core import Round, speculate
from profiler.checkpoint import Checkpoint
from profiler.decoder import ModelDecoder, ModelToken
from profiler.runner import Runner
from traces.latency import CELL_COLUMNS, LatencyTable

HOST_GAMMAS = (0, 1, 2, 4, 8, 16)
"""Draft lengths over which the host's time per round and per drafted token is fitted."""


FIRST_WIDTHS = (1, 2, 4)
"""Tokens a round's first draft pass catches up on: one, two after a fully accepted draft,
more after rounds that drafted nothing."""


@dataclass(frozen=True)
class Grid:
    """The points to measure: tokens fed, tokens in the cache, sequences decoded together.

    ``batches`` above 1 are measured by `profiler.batch_latency`, at ``batch_widths``.
    """

    widths: Sequence[int] = (1, 2, 3, 4, 5, 7, 9, 13, 17, 21, 25)
    contexts: Sequence[int] = (32, 128, 256, 512)
    prompts: Sequence[int] = (32, 64, 128, 256)
    batches: Sequence[int] = (1,)
    batch_widths: Sequence[int] = (1, 2, 3, 5, 9, 17, 25)
    repeats: int = 25
    warmup: int = 3

    @property
    def widest(self) -> int:
        """Tokens of the widest pass."""
        return max(*self.widths, *self.batch_widths, *FIRST_WIDTHS)


@dataclass(frozen=True)
class Step:
    """One cell, the call that takes its time, and the call that comes before it in decoding.

    What ran just before decides what the processor's caches hold, which is worth up to a
    third of a small model's pass: a draft pass after another one is not a draft pass after
    the target's.
    """

    model: str
    phase: str
    new_tokens: int
    context: int
    run: Callable[[], object]
    batch: int = 1
    before: Callable[[], object] = lambda: None


class Stopwatch:
    """Seconds a call takes on a device: host clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def time(self, run: Callable[[], object]) -> float:
        """Run once; the device is idle before and after."""
        if not self._cuda:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def measure_steps(
    steps: Sequence[Step],
    device: torch.device,
    *,
    repeats: int,
    warmup: int = 3,
    checkpoint: Checkpoint | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """Time every step `repeats` times, interleaved; rows as in `traces.latency`.

    ``advance`` is called once per sweep over all steps.  With a checkpoint, sweeps
    already kept are not repeated.
    """
    watch = Stopwatch(device)
    kept = checkpoint.get("latency") if checkpoint else None
    samples = kept["samples"] if kept else np.empty((0, len(steps)))
    for _ in range(len(samples)):
        advance()
    if len(samples) < repeats:
        for step in steps:
            for _ in range(warmup):
                step.run()
    rng = np.random.default_rng([seed, len(samples)])
    while len(samples) < repeats:
        sweep = np.empty(len(steps))
        for i in rng.permutation(len(steps)):
            steps[i].before()
            sweep[i] = watch.time(steps[i].run)
        samples = np.vstack([samples, sweep])
        if checkpoint:
            checkpoint.put("latency", {"samples": samples})
        advance()
    low, median, high = np.quantile(samples, [0.25, 0.5, 0.75], axis=0)
    rows = [
        (
            s.model,
            s.phase,
            s.batch,
            s.new_tokens,
            s.context,
            median[i],
            (high[i] - low[i]) / 2,
            repeats,
        )
        for i, s in enumerate(steps)
    ]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def pass_steps(target: Runner, draft: Runner, grid: Grid) -> list[Step]:
    """Prefill and forward passes of both models over the grid, and the signals' cost."""
    ids = {"target": _random_ids(target, target.cache.slots)}
    ids["draft"] = ids["target"][: draft.cache.slots] % draft.vocab_size
    for name, runner in (("target", target), ("draft", draft)):
        runner.forward(ids[name], 0, keep=1)  # real keys and values in every slot
    context = min(c for c in grid.contexts)
    plain = _pass(target, ids["target"][:1], context, 1)
    drafting = _pass(draft, ids["draft"][:1], context, 1)
    logits = draft.forward(ids["draft"][:1], 0, keep=1)
    token = logits.argmax(-1)
    steps = [
        Step(
            "draft", "signal", 1, 0, lambda: ModelToken(token, logits, 0.0, None).prob, 1, drafting
        )
    ]
    for name, runner in (("target", target), ("draft", draft)):
        for length in grid.prompts:
            if length <= runner.cache.slots:
                run = _pass(runner, ids[name][:length], 0, 1)
                steps.append(Step(name, "prefill", length, 0, run))
    for context in grid.contexts:
        if context + grid.widest > target.cache.slots:
            continue
        for width in grid.widths:
            run = _pass(target, ids["target"][:width], context, width)
            before = plain if width == 1 else drafting
            steps.append(Step("target", "forward", width, context, run, 1, before))
        for phase, width, before in draft_passes(plain, drafting):
            run = _pass(draft, ids["draft"][:width], context, 1)
            steps.append(Step("draft", phase, width, context, run, 1, before))
    return steps


def draft_passes(
    target: Callable[[], object], draft: Callable[[], object]
) -> list[tuple[str, int, Callable[[], object]]]:
    """(phase, tokens fed, what runs before) of the draft passes that occur in decoding."""
    later = [("forward", width, draft) for width in (1, 2)]
    return later + [("catch_up", width, target) for width in FIRST_WIDTHS]


def _pass(runner: Runner, ids: Tensor, context: int, keep: int) -> Callable[[], object]:
    return lambda: runner.forward(ids, context, keep=keep)


def _random_ids(runner: Runner, count: int) -> Tensor:
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(runner.vocab_size, (count,), generator=seeded).to(runner.device)


class _Idle(Runner):
    """Stands in for a model: right shapes, no work.  What is left is the host's own time."""

    def __init__(self, like: Runner) -> None:
        self.cache, self.max_positions = like.cache, like.max_positions
        rows = max(HOST_GAMMAS) + 1
        self._rows = torch.randn(rows, like.vocab_size, device=like.device, dtype=like.model.dtype)

    def forward(
        self, tokens: Tensor, start: int, *, keep: int = 0, mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The first `keep` of some fixed rows."""
        del tokens, start, mask, positions
        return self._rows[:keep]


def measure_host(
    target: Runner, draft: Runner, *, repeats: int = 15, tokens: int = 40
) -> pd.DataFrame:
    """Seconds per round and per drafted token outside the models, by a linear fit.

    The real loop decodes `tokens` tokens with both models replaced by ones that do nothing.
    """
    idle = _Idle(target), _Idle(draft)
    prompt = _random_ids(draft, 4)
    watch = Stopwatch(target.device)
    samples = np.empty((repeats, len(HOST_GAMMAS)))
    counts = np.empty((repeats, len(HOST_GAMMAS), 2))
    for repeat in range(-1, repeats):  # the first sweep warms up and is overwritten
        for i, gamma in enumerate(HOST_GAMMAS):
            decoder = ModelDecoder(*idle, prompt, tokens, watch_eos=False)
            log: list[Round] = []
            samples[repeat, i] = watch.time(_run_into(log, decoder, Fixed(gamma)))
            counts[repeat, i] = len(log), sum(r.draft_forwards for r in log)
    fits = np.array(
        [np.linalg.lstsq(counts[r], samples[r], rcond=None)[0] for r in range(repeats)]
    ).clip(min=0)
    low, median, high = np.quantile(fits, [0.25, 0.5, 0.75], axis=0)
    rows = [
        ("target", phase, 1, 1, 0, median[i], (high[i] - low[i]) / 2, repeats)
        for i, phase in enumerate(("host_round", "host_draft"))
    ]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _run_into(log: list[Round], decoder: ModelDecoder, policy: Fixed) -> Callable[[], object]:
    return lambda: log.extend(speculate(decoder, policy))


def measure_layers(runner: Runner, model: str, grid: Grid) -> pd.DataFrame:
    """Per-layer and output-head seconds of one model, from hooks around its modules."""
    layers, head = _parts(runner.stack, runner.layers), runner.model.get_output_embeddings()
    rows = []
    ids = _random_ids(runner, max(grid.widths))
    for width in grid.widths:
        for context in grid.contexts:
            if context + width > runner.cache.slots:
                continue
            samples = np.empty((grid.repeats, 2))
            for repeat in range(-grid.warmup, grid.repeats):
                with _timed_modules([*layers, head], runner.device) as seconds:
                    runner.forward(ids[:width], context, keep=width)
                times = seconds()
                if repeat >= 0:
                    samples[repeat] = np.mean(times[:-1]), times[-1]
            low, median, high = np.quantile(samples, [0.25, 0.5, 0.75], axis=0)
            rows += [
                (model, phase, 1, width, context, median[i], (high[i] - low[i]) / 2, grid.repeats)
                for i, phase in enumerate(("layer", "head"))
            ]
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def _parts(model: Any, count: int) -> list[torch.nn.Module]:
    """The model's transformer layers, whatever they are called."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


@contextmanager
def _timed_modules(
    modules: Sequence[torch.nn.Module], device: torch.device
) -> Iterator[Callable[[], list[float]]]:
    """Time each module's forward inside the block; call the result for the seconds."""
    cuda = device.type == "cuda"
    marks: list[list[Any]] = [[] for _ in modules]

    def mark(at: int) -> None:
        if cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks[at].append(event)
        else:
            marks[at].append(time.perf_counter())

    def read() -> list[float]:
        if cuda:
            torch.cuda.synchronize()
            return [float(a.elapsed_time(b)) / 1e3 for a, b in marks]
        return [b - a for a, b in marks]

    handles = []
    for i, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(lambda *_, at=i: mark(at)))
        handles.append(module.register_forward_hook(lambda *_, at=i: mark(at)))
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


def table(parts: Sequence[pd.DataFrame], meta: dict[str, Any]) -> LatencyTable:
    """One latency table from measured parts."""
    return LatencyTable(pd.concat(parts, ignore_index=True), meta)
