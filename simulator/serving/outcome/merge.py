"""Rows of independent replications in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TOTALS = {
    "requests", "rejected", "preemptions", "interpolated", "extrapolated", "simulated_tokens",
    "elapsed_s", "simulated_s",
}  # fmt: skip
"""Fields of a row that replications add up; other numbers are averaged."""


def t_interval(values: Any, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the mean and t interval of independent `values`; NaN bounds for fewer than two."""
    from scipy.special import stdtrit

    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    half = float(
        stdtrit(len(values) - 1, 0.5 + confidence / 2) * values.std(ddof=1) / np.sqrt(len(values))
    )
    return mean, mean - half, mean + half


def merged_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rows of replications in one: numbers averaged, counts summed, flags or-ed.

    ``<metric>_lo`` and ``_hi`` bound throughput and the three mean latencies with 95% t
    intervals where there are two or more; ``over_time`` is that of the first.
    """
    if len(rows) == 1:
        return {**rows[0], "replications": 1}
    merged: dict[str, Any] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if key == "coverage":
            merged[key] = joined_coverage([entry for value in values for entry in value])
        elif key == "over_time":
            merged[key] = first
        elif isinstance(first, dict):
            merged[key] = {q: float(np.mean([v[q] for v in values])) for q in first}
        elif isinstance(first, bool):
            merged[key] = any(values)
        elif key in TOTALS:
            merged[key] = sum(values)
        elif isinstance(first, float):
            merged[key] = float(np.mean(values))
        elif key == "status":
            merged[key] = next((v for v in values if v != "complete"), "complete")
        else:
            merged[key] = first
    for key in ("throughput_tok_s", "ttft_s", "tpot_s", "e2e_s"):
        values = [row[key]["mean"] if isinstance(row[key], dict) else row[key] for row in rows]
        _, merged[f"{key}_lo"], merged[f"{key}_hi"] = t_interval(values)
    return {**merged, "replications": len(rows)}


def joined_coverage(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per model, phase and origin: passes added, spans widened."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        key = entry["model"], entry["phase"], entry["origin"]
        if key not in found:
            found[key] = dict(entry)
            continue
        old = found[key]
        old["passes"] += entry["passes"]
        for size in ("batch", "new_tokens", "context"):
            old[size] = [min(old[size][0], entry[size][0]), max(old[size][1], entry[size][1])]
    return list(found.values())
