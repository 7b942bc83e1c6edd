"""A small recording with target scores, for the papers' tables and lossy rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import COLUMNS, Trace
from traces.latency.table import LatencyTable
from traces.store.files import write_latency, write_trace

LATENCY = LatencyTable.constant(0.0143, 0.00176, 0.0150)


def scored_trace(requests: int = 8, seed: int = 1) -> Trace:
    """A synthetic recording with target scores made up to agree with its matches."""
    trace = synthetic_trace(
        0.7, requests=requests, tokens=60, max_gamma=24, concentration=4.0, seed=seed
    )
    rng = np.random.default_rng(seed)
    count = len(trace)
    tail = trace.columns["offset"] > 0
    match = np.where(tail, rng.random(count) < 0.5, trace.columns["match"] == 1)
    draft = rng.integers(0, 50, count)
    gap = np.where(match, 0.0, rng.exponential(2.0, count))
    columns = {
        **trace.columns,
        "match": match,
        "draft_token": draft,
        "token": np.where(trace.columns["offset"] == 0, np.where(match, draft, draft + 50), -1),
        "target_token": np.where(match, draft, draft + 50),
        "target_top1": np.full(count, 5.0),
        "target_top2": np.where(match, 3.0, 5.0 - gap * rng.random(count)),
        "target_draft_logit": 5.0 - gap,
        "target_draft_rank": np.where(match, 0, rng.integers(1, 8, count)),
    }
    typed = {name: np.asarray(v).astype(COLUMNS[name][0]) for name, v in columns.items()}
    meta = {**trace.meta, "target": {"vocab_size": 100}}
    return Trace(typed, trace.requests, trace.max_gamma, meta)


def write_scored(folder: Path) -> Path:
    """Write a run folder of `scored_trace` at the costs of `LATENCY`."""
    write_trace(scored_trace(), folder / "trace.parquet")
    write_latency(LATENCY, folder / "latency.parquet")
    return folder
