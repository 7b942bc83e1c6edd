"""The profiled cost that policies weigh gain against, from a latency table."""

from __future__ import annotations

from simulator.serving.cost.iteration import IterationCost
from simulator.serving.cost.work import Work
from traces.latency.table import LatencyTable


class TableCost:
    """Seconds of a decode iteration over equal sequences (`policies.batch.base.IterationCost`).

    The price of serving (`simulator.serving.cost.iteration`) for an iteration in which every
    sequence drafts alike, catches up on one token, and nothing is taken out of a cache.
    """

    def __init__(self, latency: LatencyTable) -> None:
        self.latency = latency
        self._cost = IterationCost(latency)

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Seconds of `draft_length` batched draft steps and one verification."""
        known = (context + 1) * batch
        drafting = batch if draft_length else 0
        work = Work(
            known, verify_tokens - batch, draft_length, drafting, drafting, known,
            rejected=False, unread=False,
        )  # fmt: skip
        return self._cost.of_work(work, batch).total_s
