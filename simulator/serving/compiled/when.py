"""When the compiled engine serves."""

from __future__ import annotations

from simulator.serving.compiled.jit import installed
from simulator.serving.scenario import Scenario
from traces.latency.table import LatencyTable

MANY = 2000
"""Requests from which on it pays to load the compiler."""


def compiles(
    scenario: Scenario, latency: LatencyTable, expected: int, of_many: bool = False
) -> bool:
    """Whether a `CompiledEngine` may serve `expected` requests, and is worth while.

    So it is for any number where many runs follow each other.

    Nothing but arrivals and iterations decides who runs: no bound cuts the run off, and no answer
    brings the next request.  Sizes that were never varied are refused as they occur, which is left
    to the others.
    """
    one_size = not latency.batch_free and any(
        len(latency.grid(model, "forward").batches) == 1
        for model in ("target", "draft") if latency.has(model, "forward")
    )  # fmt: skip
    one_width = not latency.is_constant and len(latency.grid("target", "forward").widths) == 1
    return (
        (of_many or expected >= MANY) and scenario.mode == "continuous"
        and scenario.arrivals.concurrency is None and scenario.max_tokens is None
        and scenario.max_time_s is None and (scenario.replicas == 1 or scenario.splits)
        and not one_size and not one_width and installed()
    )  # fmt: skip
