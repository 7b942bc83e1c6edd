"""Single layers and the output head of a model: by hooks, or run by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from profiler.features.heads import ExitHeads
from profiler.latency.passes import passes_of, random_ids
from profiler.latency.table import Block, Grid, Step, rows_of
from profiler.machine import Repeats, Stopwatch, Timing
from profiler.models.graphs import captured
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner


def measure_layers(runner: Runner, model: str, grid: Grid) -> pd.DataFrame:
    """Measure per-layer and output-head seconds of one model, from hooks around its modules."""
    layers, head = _parts(runner.stack, runner.layers), runner.model.get_output_embeddings()
    parts: list[pd.DataFrame] = []
    watch, again, passes = Stopwatch(runner.device), Repeats(), passes_of(runner, grid)

    def timed(run: Callable[[], object]) -> tuple[Timing, list[float]]:
        with _timed_modules([*layers, head], runner.device) as seconds:
            taken = watch.measure(run)
        return taken, seconds()

    for width in grid.widths:
        for context in passes.contexts:
            samples = np.empty((grid.repeats, 2))
            run = partial(timed, passes.run(width, context, keep=0))
            for repeat in range(-grid.warmup, grid.repeats):
                _, times = again.best(run)
                if repeat >= 0:
                    samples[repeat] = np.mean(times[:-1]), times[-1]
            cells = [(model, phase, 1, width, context) for phase in ("layer", "head")]
            parts.append(rows_of(cells, samples))
    return pd.concat(parts, ignore_index=True)


def _parts(model: Any, count: int) -> list[torch.nn.Module]:
    """Return the model's transformer layers, under any of the usual names."""
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


def layer_blocks(
    runner: LayerRunner, name: str, widths: Sequence[int], contexts: Sequence[int], *,
    graphs: bool = False, exits: bool = False,
) -> Iterator[Block]:  # fmt: skip
    """Yield blocks of the cells ``layer`` and ``head`` of a model, and ``head`` of an exit.

    A cell ``layer`` is the time of all layers, which run one after another (`a_layer`).  The head
    is the final norm, the output projection and the argmax; an exit's is its low-rank block, norm,
    projection and confidence.  ``graphs``: each is one CUDA graph; ``exits``: with the exit's.

    In graphs, layers with several tokens are timed at the shortest context alone: their attention
    is not split over the keys, as a whole pass's is.  At 4,096 tokens of context an H200 took twice
    as long for them as for the pass that contains them.
    """
    like, device = runner.model, runner.device
    hidden_size = like.config.get_text_config().hidden_size
    heads = ExitHeads((max(1, runner.layers // 2),), hidden_size).to(device)
    runner.forward(random_ids(runner, runner.cache.slots), 0, keep=1)

    def block(model: str, phase: str, width: int, context: int, run: Callable[[], Tensor]) -> Block:
        own = captured(run, device) if graphs else run
        return Block([[Step(model, phase, width, context, own)]] * 3, 1)

    for width in widths:
        states = torch.randn(width, hidden_size, device=device, dtype=like.dtype)
        for context in contexts[:1] if graphs and width > 1 else contexts:
            run = partial(runner.run_layers, states, context, range(runner.layers))
            yield block(name, "layer", width, context, run)

        def finish(states: Tensor = states) -> Tensor:
            return runner.logits(states).argmax(-1)

        def leave(states: Tensor = states) -> Tensor:
            logits = runner.project(heads.states(0, states)).float()
            return logits.amax(-1) - logits.logsumexp(-1)

        yield block(name, "head", width, 0, finish)
        if exits:
            yield block("exit", "head", width, 0, leave)


def a_layer(cells: pd.DataFrame, layers: int) -> pd.DataFrame:
    """Return the `cells` of `layer_blocks` with the time of all layers divided by their number."""
    each = cells["phase"].eq("layer").map({True: 1.0 / layers, False: 1.0})
    return cells.assign(median_s=cells["median_s"] * each, spread_s=cells["spread_s"] * each)
