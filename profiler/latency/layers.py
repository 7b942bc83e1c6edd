"""Measures single layers and the output head of a model, by hooks around its modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from profiler.latency.passes import random_ids
from profiler.latency.table import Grid, rows_of
from profiler.machine import Repeats, Stopwatch, Timing
from profiler.models.runner import Runner


def measure_layers(runner: Runner, model: str, grid: Grid) -> pd.DataFrame:
    """Measure per-layer and output-head seconds of one model, from hooks around its modules."""
    layers, head = _parts(runner.stack, runner.layers), runner.model.get_output_embeddings()
    parts: list[pd.DataFrame] = []
    watch, again = Stopwatch(runner.device), Repeats()
    ids = random_ids(runner, max(grid.widths))
    for width in grid.widths:
        for context in grid.contexts:
            if context + width > runner.cache.slots:
                continue
            samples = np.empty((grid.repeats, 2))
            modules, tokens = [*layers, head], ids[:width]

            def run(
                modules: list[Any] = modules, tokens: Tensor = tokens, context: int = context
            ) -> tuple[Timing, list[float]]:
                with _timed_modules(modules, runner.device) as seconds:
                    keep = len(tokens)
                    taken = watch.measure(lambda: runner.forward(tokens, context, keep=keep))
                return taken, seconds()

            for repeat in range(-grid.warmup, grid.repeats):
                _, times = again.best(run)
                if repeat >= 0:
                    samples[repeat] = np.mean(times[:-1]), times[-1]
            cells = [(model, phase, 1, width, context) for phase in ("layer", "head")]
            parts.append(rows_of(cells, samples))
    return pd.concat(parts, ignore_index=True)


def _parts(model: Any, count: int) -> list[torch.nn.Module]:
    """Return the model's transformer layers, whatever they are called."""
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
