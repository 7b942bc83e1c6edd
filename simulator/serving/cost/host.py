"""The host's seconds of an iteration, batch size by batch size."""

from __future__ import annotations

from typing import NamedTuple

from simulator.host import host_seconds, scalar_seconds
from traces.latency.table import LatencyTable


class Host(NamedTuple):
    """The host's seconds at one batch size."""

    round_s: float
    draft_s: float
    """Of each draft step, signals included where the policy reads any."""
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

    def _read(self, batch: int) -> Host:
        draft_s = host_seconds(self.latency, "host_draft", batch)
        if self.reads:
            draft_s += host_seconds(self.latency, "signal", batch)
        rollbacks = self._rollback("target", batch), self._rollback("draft", batch)
        return Host(host_seconds(self.latency, "host_round", batch), draft_s, *rollbacks)

    def _rollback(self, model: str, batch: int) -> float:
        if not self.latency.has(model, "rollback"):
            return 0.0
        return scalar_seconds(self.latency, model, "rollback", batch)
