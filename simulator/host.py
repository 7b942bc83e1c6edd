"""The host's seconds of a round or an iteration, and a server's around them, by batch size."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from traces.latency.schema import SERVER
from traces.latency.table import LatencyTable

HOSTS = ("target", "draft")
"""Models under which a host phase may be stored."""


def host_seconds(latency: LatencyTable, phase: str, batch: int) -> float:
    """Return seconds of a host phase at `batch`, under whichever models it was stored; else 0."""
    return sum(scalar_seconds(latency, model, phase, batch) for model in HOSTS)


def scalar_seconds(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    """Seconds at `batch` of a phase that was measured at one number of tokens and one context.

    0 where the table lacks the phase.
    """
    # Many logs, and every engine of a search, read the same cells of a table that never changes.
    known = _scalars.setdefault(latency, {})
    seconds = known.get((model, phase, batch))
    if seconds is None:
        seconds = _read(latency, model, phase, batch) if latency.has(model, phase) else 0.0
        known[model, phase, batch] = seconds
    return seconds


_scalars: WeakKeyDictionary[LatencyTable, dict[tuple[str, str, int], float]] = WeakKeyDictionary()


def _read(latency: LatencyTable, model: str, phase: str, batch: int) -> float:
    cells = latency.cells
    own = cells[(cells["model"] == model) & (cells["phase"] == phase)]
    # Read at the size it was measured at, whatever the context.
    sizes = {"new_tokens": int(own["new_tokens"].iloc[0]), "context": int(own["context"].iloc[0])}
    nearest = int(np.clip(batch, own["batch"].min(), own["batch"].max()))
    return float(latency.seconds(model, phase, batch=nearest, **sizes))


class Host(NamedTuple):
    """The host's seconds at one batch size, and a server's own."""

    round_s: float
    """Seconds of each iteration, the server's own time around it included."""
    draft_s: float
    """Seconds of each draft step, with signals if the policy reads any."""
    target_rollback_s: float
    draft_rollback_s: float
    iteration_s: float
    """The server's own time around an iteration over as many requests."""
    request_s: float
    """The server's own time around a request that ends with as many running, itself included."""


class HostCost:
    """The host's seconds at every batch size; phases that the table lacks cost nothing.

    ``reads`` says whether the policy reads draft signals.
    """

    def __init__(self, latency: LatencyTable, reads: bool) -> None:
        self.latency = latency
        self.reads = reads
        self._at: dict[int, Host] = {}

    def at(self, batch: int) -> Host:
        """Return seconds at `batch`."""
        host = self._at.get(batch)
        if host is None:
            host = self._at[batch] = self._read(batch)
        return host

    def apart_s(self, requests: int) -> float:
        """Return the seconds between requests at a server's engine if `requests` come at once."""
        return scalar_seconds(self.latency, SERVER, "apart", requests)

    def _read(self, batch: int) -> Host:
        latency = self.latency
        draft_s = host_seconds(latency, "host_draft", batch)
        if self.reads:
            draft_s += host_seconds(latency, "signal", batch)
        rollbacks = (scalar_seconds(latency, model, "rollback", batch) for model in HOSTS)
        around = [scalar_seconds(latency, SERVER, of, batch) for of in ("iteration", "request")]
        round_s = host_seconds(latency, "host_round", batch) + around[0]
        return Host(round_s, draft_s, *rollbacks, *around)
