"""Seconds of the passes of a model, read from a latency table and counted by their origin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traces.latency.settling import settling_s
from traces.latency.table import EXTRAPOLATED, INTERPOLATED, Estimate, LatencyTable
from traces.replay.calls import distinct

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PassCount(NamedTuple):
    """Model passes priced, and how many of them lay between or outside measured cells."""

    passes: int
    interpolated: int
    extrapolated: int

    def __add__(self, other: object) -> PassCount:
        if not isinstance(other, PassCount):
            return NotImplemented
        return PassCount(*(a + b for a, b in zip(self, other, strict=True)))


NO_PASSES = PassCount(0, 0, 0)


def draft_seconds(
    latency: LatencyTable, model: str, batch: int, forwards: Ints, catch_up: Ints, context: Ints
) -> tuple[Floats, PassCount]:
    """Seconds of each round's passes of `model`, (rounds,); ``catch_up`` 0 was paid before."""
    seconds = np.zeros(len(forwards))
    ran = np.flatnonzero((forwards > 0) & (catch_up > 0))
    before = np.maximum(context[ran] - catch_up[ran], 0)
    phase = latency.first_draft_phase(model)
    seconds[ran], first = pass_seconds(latency, model, batch, catch_up[ran], before, phase)
    ran = np.flatnonzero(forwards > 1)
    start, count = context[ran], forwards[ran] - 1
    if not len(ran):
        return seconds, first
    # Passes after the first run over consecutive contexts: a running sum prices any span.
    low, high = int(start.min()), int((start + count).max())
    span = latency.estimate(model, "forward", batch=batch, context=np.arange(low, high))
    begin, end = start - low, start + count - low
    seconds[ran] += _spans(span.seconds, begin, end) + settling_s(latency, model, batch, count)
    rest = PassCount(
        int(count.sum()),
        *(int(_spans(span.origin == o, begin, end).sum()) for o in (INTERPOLATED, EXTRAPOLATED)),
    )
    return seconds, first + rest


def _spans(values: npt.NDArray[np.generic], begin: Ints, end: Ints) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(running[end] - running[begin])


def pass_seconds(
    latency: LatencyTable, model: str, batch: int, width: Ints, context: Ints,
    phase: str = "forward",
) -> tuple[Floats, PassCount]:  # fmt: skip
    """Seconds of one pass per element."""
    if not len(width):
        return np.zeros(0), NO_PASSES
    read = read_each(latency, model, batch, width, context, phase)
    return read.seconds, _count(read.origin)


def read_each(
    latency: LatencyTable, model: str, batch: int, width: Ints, context: Ints, phase: str
) -> Estimate:  # fmt: skip
    """The pass of each element, of which there is one; equal (width, context) are read once."""
    scale = int(context.max()) + 1
    keys, inverse = distinct(width * scale + context)
    read = latency.estimate(
        model, phase, batch=batch, new_tokens=keys // scale, context=keys % scale
    )
    return Estimate(read.seconds[inverse], read.origin[inverse])


def prefill_seconds(
    latency: LatencyTable, model: str, batch: int, tokens: Ints
) -> tuple[Floats, PassCount]:
    """Return the seconds of reading prompts of `tokens` tokens in one pass each."""
    read = latency.estimate(model, "prefill", batch=batch, new_tokens=tokens)
    return read.seconds, _count(read.origin)


def _count(origin: npt.NDArray[np.int8]) -> PassCount:
    inside, outside = int((origin == INTERPOLATED).sum()), int((origin == EXTRAPOLATED).sum())
    return PassCount(len(origin), inside, outside)
