"""Batches that fit into a device's memory next to the weights."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.models.architectures import Architecture
from profiler.suite.environment import Workplace


def fitting_contexts(
    place: Workplace, shape: Architecture, wanted: Sequence[int], batch: int, width: int
) -> tuple[list[int], list[str]]:
    """The contexts that the memory holds, up to the model's own, and why it does not the others.

    ``width``: tokens per sequence of the widest pass after them.
    """
    room = place.free_bytes()
    kept: list[int] = []
    why: list[str] = []
    for asked in wanted:
        context = min(asked, shape.positions - width)
        if context < asked:
            why.append(f"context {asked}: the model's context is {shape.positions}")
        # Cache, attention's copies of one layer, the logits, and the causal matrix.
        values = batch * (context + width) * shape.kv_values * (1 + 8 / shape.layers)
        values += 3 * batch * width * shape.vocab_size + context**2 / 2
        if values * place.dtype.itemsize > 0.9 * room:
            why.append(f"context {context}: the memory does not hold its cache")
        elif context not in kept:
            kept.append(context)
    return kept, why
