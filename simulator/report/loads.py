"""What the page says of batches, contexts and load: maps of fixed lengths, serving curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.serving import sweep
from simulator.tune import (
    RIVALS,
    Grid,
    Tuned,
    check_seed,
    closed_load,
    default_batches,
    fixed_logs,
    price_grid,
    tune_vllm,
)
from simulator.tune.choice import Floats, resamples
from simulator.tune.costs import DEFAULT_LENGTHS, default_contexts
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog

SERVED_BATCHES = 6
REPLICATIONS = 2
"""Of the five that ``draftsim tune --check`` serves, on the same random numbers."""
MAPPED_CONTEXTS = 8


def loads(trace: Trace, latency: LatencyTable, serve: bool, draws: int) -> dict[str, Any]:
    """``batches``, ``contexts`` and ``serving``; None where nothing was measured for them."""
    sizes = default_batches(latency)
    if len(sizes) < 2:
        return {"batches": None, "contexts": None, "serving": None}
    plain, logs = fixed_logs(trace, [k for k in DEFAULT_LENGTHS if k])
    weights = resamples(len(trace.requests), draws, 0)
    priced = [plain, *logs.values()]
    return {
        "batches": by_length(priced, list(logs), latency, sizes, weights),
        "contexts": by_context(priced, list(logs), latency, sizes, weights),
        "serving": serving(trace, latency, sizes) if serve else None,
    }


def by_length(
    logs: Sequence[RoundLog], lengths: Sequence[int], latency: LatencyTable,
    sizes: Sequence[int], weights: Floats,
) -> dict[str, Any]:  # fmt: skip
    """Speedup of every fixed length at every batch, (batches, lengths), with its bounds.

    `logs` are plain decoding and the fixed `lengths`; `weights` of `simulator.tune.resamples`.
    """
    rows = [_speedups(price_grid(logs, latency, b), weights) for b in sizes]
    return {
        "batches": list(sizes), "lengths": list(lengths),
        "speedup": [row[0].tolist() for row in rows],
        "low": [row[1].tolist() for row in rows], "high": [row[2].tolist() for row in rows],
    }  # fmt: skip


def by_context(
    logs: Sequence[RoundLog], lengths: Sequence[int], latency: LatencyTable,
    sizes: Sequence[int], weights: Floats,
) -> dict[str, Any] | None:  # fmt: skip
    """The best fixed length at every batch and context and its speedup, (batches, contexts).

    None where passes were measured at one context alone.
    """
    measured = default_contexts(latency, max(lengths))
    if len(measured) < 2:
        return None
    places = np.linspace(0, len(measured) - 1, min(len(measured), MAPPED_CONTEXTS))
    contexts = [measured[round(i)] for i in places]
    found: dict[str, Any] = {"batches": list(sizes), "contexts": contexts}
    found |= {key: [] for key in ("speedup", "low", "high", "length")}
    for b in sizes:
        cells = [_speedups(price_grid(logs, latency, b, c), weights) for c in contexts]
        best = [int(cell[0].argmax()) for cell in cells]
        found["length"].append([lengths[k] for k in best])
        for i, key in enumerate(("speedup", "low", "high")):
            found[key].append([float(cell[i][k]) for cell, k in zip(cells, best, strict=True)])
    return found


def _speedups(grid: Grid, weights: Floats) -> Floats:
    """Speedup of every option but the first over the first, and its bounds: (3, options)."""
    tokens, seconds = grid.tokens, grid.seconds
    rate = tokens.sum(axis=1) / seconds.sum(axis=1)
    drawn = (tokens @ weights.T) / (seconds @ weights.T)
    bounds = np.percentile(drawn[1:] / drawn[0], [2.5, 97.5], axis=1)
    return np.stack([rate[1:] / rate[0], *bounds])


def serving(trace: Trace, latency: LatencyTable, sizes: Sequence[int]) -> dict[str, Any]:
    """Throughput and latency of the tuned table and its rivals in full engines.

    The loads are those of ``draftsim tune --check``.  ``deploy`` holds, by batch served, what
    the search says to run there: ``on``, or ``off`` where no speculation is faster.
    """
    tuned = tune_vllm(trace, latency, sizes, draws=400)
    some = sorted({sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, SERVED_BATCHES)})
    scenarios = [
        replace(closed_load(trace, b, None, check_seed(0)), replications=REPLICATIONS) for b in some
    ]
    policies = RIVALS if tuned.document is None else {**RIVALS, "tuned": tuned.policy}
    rows = sweep(trace, latency, policies, scenarios)
    kept = [
        {
            "policy": r["policy"], "batch": r["batch"], "throughput_tok_s": r["throughput_tok_s"],
            "tpot_s": r["tpot_s"]["mean"],
        } for r in rows
    ]  # fmt: skip
    return {
        "rows": kept,
        "policies": list(policies),
        "deploy": deployment(tuned, some),
        "table": (tuned.document or {}).get("num_speculative_tokens_per_batch_size"),
    }


def deployment(tuned: Tuned, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Per batch of `batches` what to deploy there, and the draft length of the table."""
    at = {row["batch"]: row for row in tuned.rows}
    return [{"batch": b, "deploy": at[b]["deploy"], "setting": at[b]["setting"]} for b in batches]
