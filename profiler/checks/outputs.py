"""What real runs wrote, beside what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from profiler.checks.spot_check import Arm, Measured
from profiler.models.loading import Pair
from traces.acceptance.trace import Trace
from traces.store.outputs import Output, RealRun


def real_run(
    pair: Pair, greedy: Trace, arm: Arm, measured: Measured, meta: Mapping[str, Any]
) -> RealRun:
    """The rounds and outputs of an arm with a lossy rule.

    ``greedy`` is the recording of the target's own outputs, which may hold more requests.
    """
    place = {request.id: i for i, request in enumerate(greedy.requests)}
    log = measured.logs[arm.label]
    texts = (pair.tokenizer.decode(ids) for ids in measured.outputs[arm.label])
    outputs = [
        Output(
            request.id, tokens, text,
            pair.tokenizer.decode(output_of(greedy, place[request.id])), float(nats),
        )
        for request, tokens, text, nats in zip(
            log.requests, measured.outputs[arm.label], texts,
            measured.log_likelihoods[arm.label], strict=True,
        )
    ]  # fmt: skip
    table = getattr(log.rule, "table", None)
    memory = {} if table is None else {"sizes": list(table.sizes), "evictions": table.evictions}
    return RealRun(log, outputs, {**pair.meta, **meta, "memory": memory})


def output_of(trace: Trace, request: int) -> list[int]:
    """The recorded output of a request."""
    starts = trace.request_starts
    rows = trace.on_path[starts[request] : starts[request + 1]]
    tokens: list[int] = np.asarray(trace.columns["token"])[rows].tolist()
    return tokens
