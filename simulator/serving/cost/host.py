"""The host's seconds of an iteration, and a server's around it, batch size by batch size."""

from __future__ import annotations

from typing import NamedTuple

from simulator.host import host_seconds, scalar_seconds
from traces.latency.schema import SERVER
from traces.latency.table import LatencyTable


class Host(NamedTuple):
    """The host's seconds at one batch size."""

    round_s: float
    draft_s: float
    """Seconds of each draft step, with signals if the policy reads any."""
    target_rollback_s: float
    draft_rollback_s: float


class HostCost:
    """The host's seconds at every batch size; phases that the table lacks cost nothing.

    ``reads`` says whether the policy reads draft signals.
    """

    def __init__(self, latency: LatencyTable, reads: bool) -> None:
        self.latency = latency
        self.reads = reads
        self._at: dict[int, Host] = {}

    def at(self, batch: int) -> Host:
        """Seconds at `batch`."""
        host = self._at.get(batch)
        if host is None:
            host = self._at[batch] = self._read(batch)
        return host

    def around_iteration_s(self, batch: int) -> float:
        """Return the server's own time around an iteration over `batch` requests; `at` holds it."""
        return self._scalar(SERVER, "iteration", batch)

    def around_request_s(self, batch: int) -> float:
        """Return the server's own time around a request that ends with `batch` running, itself
        included.
        """
        return self._scalar(SERVER, "request", batch)

    def apart_s(self, requests: int) -> float:
        """Return the seconds between requests at a server's engine if `requests` come at once."""
        return self._scalar(SERVER, "apart", requests)

    def _read(self, batch: int) -> Host:
        draft_s = host_seconds(self.latency, "host_draft", batch)
        if self.reads:
            draft_s += host_seconds(self.latency, "signal", batch)
        rollbacks = (self._scalar(model, "rollback", batch) for model in ("target", "draft"))
        round_s = host_seconds(self.latency, "host_round", batch) + self.around_iteration_s(batch)
        return Host(round_s, draft_s, *rollbacks)

    def _scalar(self, model: str, phase: str, batch: int) -> float:
        if not self.latency.has(model, phase):
            return 0.0
        return scalar_seconds(self.latency, model, phase, batch)
