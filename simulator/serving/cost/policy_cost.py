"""The profiled cost that batch policies weigh gain against, from a latency table."""

from __future__ import annotations

from simulator.serving.cost.reader import PassReader
from traces.latency.settling import settling_s
from traces.latency.table import LatencyTable
from traces.replay.always import passes_always


class TableCost:
    """Seconds of a decode iteration over equal sequences (`policies.batch.base.IterationCost`).

    What a policy was told in advance, not what the engine then charges: every sequence
    drafts alike, catches up on one token, and nothing is taken out of a cache.
    """

    def __init__(self, latency: LatencyTable) -> None:
        self.latency = latency
        self._target = PassReader(latency, "target")
        self._draft = PassReader(latency, "draft")
        self._first = PassReader(latency, "draft", latency.first_draft_phase("draft"))
        self._round_s = self._host("host_round")
        self._draft_s = self._host("host_draft")
        self._always = passes_always(latency)

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Seconds of `draft_length` batched draft steps and one verification."""
        draft_length = max(draft_length, self._always)
        drafting = 0.0
        if draft_length:
            drafting = self._first(batch, 1.0, context)
            drafting += self._draft.run(batch, context + 1, draft_length - 1)
            drafting += float(settling_s(self.latency, "draft", batch, draft_length - 1))
        verifying = self._target(batch, verify_tokens / batch, context)
        return drafting + verifying + self._round_s + draft_length * self._draft_s

    def _host(self, phase: str) -> float:
        cells = self.latency.cells
        # The median over what was measured: host phases hardly depend on sizes.
        own = cells[cells["phase"] == phase]
        return float(own["median_s"].median()) if len(own) else 0.0
