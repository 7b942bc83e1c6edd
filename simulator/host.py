"""Seconds that a latency table knows at one size: the host's work around the passes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from traces.latency.table import LatencyTable

HOSTS = ("target", "draft")
"""Models under which a host phase may be stored."""


def host_seconds(latency: LatencyTable, phase: str, batch: int) -> float:
    """Seconds of a host phase at `batch`, under whichever models it was stored; else 0."""
    return sum(scalar_seconds(latency, m, phase, batch) for m in HOSTS if latency.has(m, phase))


def scalar_seconds(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    """Seconds of a phase that was measured at one number of tokens and one context, at `batch`.

    The table has to hold the phase (`LatencyTable.has`).
    """
    # Many logs, and every engine of a search, read the same cells of a table that never changes.
    known = _scalars.setdefault(latency, {})
    seconds = known.get((model, phase, batch))
    if seconds is None:
        seconds = known[model, phase, batch] = _read(latency, model, phase, batch)
    return seconds


_scalars: WeakKeyDictionary[LatencyTable, dict[tuple[str, str, int], float]] = WeakKeyDictionary()


def _read(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    cells = latency.cells
    own = cells[(cells["model"] == model) & (cells["phase"] == phase)]
    # Read at the size it was measured at, whatever the context.
    sizes = {"new_tokens": int(own["new_tokens"].iloc[0]), "context": int(own["context"].iloc[0])}
    nearest = int(np.clip(batch, own["batch"].min(), own["batch"].max()))
    return float(latency.seconds(model, phase, batch=nearest, **sizes))
