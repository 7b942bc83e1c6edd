"""Times single transformer layers and output heads, as early exit runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiler.features.heads import ExitHeads
from profiler.models.graphs import capture
from profiler.models.stack import LayerRunner
from profiler.suite.latency.passes import GRAPH, Timer, cell, fill


def captured(run: Callable[[], Tensor], device: torch.device) -> Callable[[], object]:
    """`run` as one CUDA graph; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    graph, _ = capture(run, device)
    return graph.replay


@torch.inference_mode()
def layer_cells(
    mode: str,
    model: Any,
    name: str,
    widths: Sequence[int],
    contexts: Sequence[int],
    timer: Timer,
    *,
    exits: bool,
    check_time: Callable[[], None] = lambda: None,
) -> list[list[Any]]:
    """Cells ``layer`` and ``head`` of a model, and ``head`` of its exits.

    A layer's time is that of the whole stack over the number of layers: one after another
    is how they run.  The head is the final norm, the output projection and the argmax; an
    exit's is its low-rank block, norm, projection and confidence.  `check_time` is asked before
    every cell, and may raise.
    """
    runner = LayerRunner(model, max(contexts) + max(widths))
    fill(runner)
    device, rows = runner.device, []
    hidden_size = model.config.get_text_config().hidden_size
    heads = ExitHeads((max(1, runner.layers // 2),), hidden_size).to(device)

    def timed(run: Callable[[], Tensor]) -> Any:
        check_time()
        return timer.time(captured(run, device) if mode == GRAPH else run)

    for width in widths:
        states = torch.randn(width, hidden_size, device=device, dtype=model.dtype)
        for context in contexts:
            sample = timed(partial(runner.run_layers, states, context, range(runner.layers)))
            share = sample._replace(
                median_s=sample.median_s / runner.layers, spread_s=sample.spread_s / runner.layers
            )
            rows.append(cell(name, "layer", 1, width, context, share))

        def finish(s: Tensor = states) -> Tensor:
            return runner.logits(s).argmax(-1)

        sample = timed(finish)
        rows.append(cell(name, "head", 1, width, 0, sample))
        if exits:

            def leave(s: Tensor = states) -> Tensor:
                logits = runner.project(heads.states(0, s)).float()
                return logits.amax(-1) - logits.logsumexp(-1)

            rows.append(cell("exit", "head", 1, width, 0, timed(leave)))
    return rows
