"""Recordings and latencies that the tests of tuning share."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

from simulator.serving import ClosedLoop, Limits, Poisson, Scenario
from tests.serving import table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

CHEAP = LatencyTable.constant(1.0, 0.1)


@cache
def iid(alpha: float, requests: int = 80, tokens: int = 150) -> Trace:
    return synthetic_trace(alpha, requests=requests, tokens=tokens, seed=3)


@cache
def batched(per_token: float = 2e-4) -> LatencyTable:
    """Passes whose cost rises with batch x width: speculation pays less and less."""
    cells: list[tuple[Any, ...]] = []
    for batch in (1, 4, 16, 64):
        for context, width in product((16, 512), (1, 2, 4, 9)):
            target = 1e-2 + per_token * batch * width
            cells.append(("target", "forward", batch, width, context, target, 0.0, 10))
        for context, width in product((16, 512), (1, 2)):
            draft = 1e-3 + per_token / 10 * batch * width
            cells.append(("draft", "forward", batch, width, context, draft, 0.0, 10))
    return table_of(cells)


def loads(trace: Trace) -> list[Scenario]:
    closed = [
        Scenario(ClosedLoop(b), Limits(max_batch=b), requests=max(len(trace.requests), 2 * b))
        for b in (1, 40)
    ]
    return [*closed, Scenario(Poisson(3.0), Limits(max_batch=16), requests=40)]
