"""Inputs of the serving tests: a recording of coins, latency tables, files of arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from simulator.serving import Run
from simulator.serving.run import EventEngine
from simulator.serving.scheduler import BlockPool
from traces.acceptance.trace import Request, Trace
from traces.latency.table import CELL_COLUMNS, LatencyTable, as_cells


def bernoulli(alpha: float, requests: int, tokens: int, seed: int = 0, prompt: int = 32) -> Trace:
    rng = np.random.default_rng(seed)
    count = requests * tokens
    columns = {
        "request": np.repeat(np.arange(requests), tokens).astype(np.int32),
        "position": np.tile(np.arange(tokens), requests).astype(np.int32),
        "offset": np.zeros(count, np.int16),
        "match": (rng.random(count) < alpha).astype(np.int8),
    }
    infos = [
        Request(str(i), "synthetic", prompt, tokens, tokens, "length") for i in range(requests)
    ]
    return Trace(columns, infos)


def table_of(rows: Iterable[Sequence[Any]], meta: Mapping[str, Any] = {}) -> LatencyTable:
    """Return the table of (model, phase, batch, new tokens, context, seconds).

    Spread (0) and repeats (1) may follow.
    """
    full = [(*row, 0.0, 1)[: len(CELL_COLUMNS)] for row in rows]
    return LatencyTable(as_cells(full), dict(meta))


GRID = table_of(
    [
        (m, "forward", b, n, c, s * (0.01 + 1e-4 * b * n + 1e-6 * b * c + 1e-3 * (n > 1)))
        for m, s in (("target", 1.0), ("draft", 0.15))
        for b in (1, 2, 8)
        for n in (1, 2, 4, 9)
        for c in (0, 50, 300)
    ]
    + [
        (m, "prefill", 1, n, 0, s * 1e-4 * n)
        for m, s in (("target", 1), ("draft", 0.2))
        for n in (8, 99)
    ]
    + [
        ("draft", "catch_up", b, n, c, 0.002 + 1e-5 * b * n + 1e-7 * b * c)
        for b in (1, 2, 8)
        for n in (1, 2, 4)
        for c in (0, 50, 300)
    ]
    + [("target", "host_round", 1, 1, 0, 7e-4), ("target", "host_draft", 1, 1, 0, 3e-4)]
    + [("target", "rollback", 1, 1, 0, 2e-4), ("draft", "rollback", 1, 1, 0, 1e-4)]
)
CONSTANT = LatencyTable.constant(0.02, 0.002, 0.025)
SMALL = bernoulli(0.7, 20, 40, seed=1)
PAIR = ("--policy", "autoregressive", "--policy", "fixed:gamma=5")
"""Options of ``draftsim serve``: plain decoding, and a policy that spells out a default."""


def arrival_file(path: Path, *rows: str) -> Path:
    """A file of arrivals as published traces have them."""
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


@contextmanager
def kept_engines() -> Iterator[list[EventEngine]]:
    """Keep the engines that runs by events make inside."""
    made: list[EventEngine] = []

    class Kept(EventEngine):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    with patch("simulator.serving.run.EventEngine", Kept):
        yield made


def assert_no_block_is_lost(pool: BlockPool) -> None:
    """Hold the pool's count against what requests hold: none is lost, held twice or made."""
    assert pool.used == sum(pool._held.values())
    assert pool.used >= 0
    assert pool.blocks is None or pool.used <= pool.blocks


def little_error(run: Run) -> float:
    """Return the relative gap between the integral of the number in system and summed sojourns.

    Little's law (1961) equates them; anything beyond rounding is an accounting error.
    """
    columns = run.recorder.requests
    sojourns = float(np.sum(columns["finish_s"]) - np.sum(columns["arrival_s"]))
    sojourns += float((run.simulated_s - run.cut_off.arrival_s).sum())
    return abs(run.recorder.area_s - sojourns) / max(sojourns, 1e-300) if sojourns else 0.0
