"""Replay speed in recorded tokens per second on one core; the aim is 500,000 or more.

Run with ``make bench``, or ``pytest -s benchmarks/bench_replay.py``; the rate of the
fastest run, the one least disturbed, is printed and stored as ``tokens_per_s``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import (
    SVIP,
    Autoregressive,
    Confidence,
    DraftAndVerify,
    Fixed,
    GammaTune,
    GammaTunePlus,
    HFHeuristic,
    Oracle,
)
from policies.core import DraftPolicy
from simulator.check_iid import iid_trace
from traces.replay import replay
from traces.trace import Trace

TOKENS, REQUESTS, ALPHA, MAX_GAMMA = 500, 300, 0.8, 24
POLICIES: dict[str, DraftPolicy] = {
    "autoregressive": Autoregressive(),
    "fixed": Fixed(5),
    "hf-heuristic": HFHeuristic(gamma_max=MAX_GAMMA),
    "confidence": Confidence(roc_update="off"),
    "svip": SVIP(gamma_max=MAX_GAMMA),
    "draft-and-verify": DraftAndVerify(),
    "gammatune": GammaTune(),
    "gammatune-plus": GammaTunePlus(),
    "oracle": Oracle(),
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """150,000 positions of i.i.d. matches, with signals and off-path tails."""
    plain = iid_trace(ALPHA, TOKENS, REQUESTS)
    match = plain.columns["match"]
    rows = np.where(match == 1, 1, MAX_GAMMA)
    source = np.repeat(np.arange(len(match)), rows)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(rows) - rows, rows)
    rng = np.random.default_rng(1)
    # Confident where it matches, as a draft model is.
    prob = np.clip(rng.beta(2, 1, len(source)) * (0.6 + 0.4 * match[source]), 0.01, 1)
    columns = {name: values[source] for name, values in plain.columns.items()}
    columns["offset"] = offset.astype(np.int16)
    columns["match"] = np.where(offset == 0, columns["match"], 0).astype(np.int8)
    columns["draft_logprob"] = np.log(prob).astype(np.float32)
    columns["draft_entropy"] = (2 * (1 - prob)).astype(np.float32)
    made = Trace(columns, plain.requests, MAX_GAMMA)
    replay(made, Autoregressive())  # lays the trace out, as the first replay always does
    return made


@pytest.mark.parametrize("name", POLICIES)
def test_replay(benchmark: Any, trace: Trace, name: str) -> None:
    log = benchmark(replay, trace, POLICIES[name])
    assert log.rounds["emitted"].sum() == REQUESTS * (TOKENS - 1)
    rate = REQUESTS * TOKENS / benchmark.stats.stats.min
    benchmark.extra_info["tokens_per_s"] = round(rate)
    print(f"\n{name}: {rate:,.0f} recorded tokens/s")
