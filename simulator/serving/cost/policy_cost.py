"""The profiled cost that policies weigh gain against, from a latency table."""

from __future__ import annotations

from simulator.serving.cost.iteration import IterationCost
from simulator.serving.cost.work import Work
from traces.latency.table import LatencyTable


class TableCost:
    """Seconds of a decode iteration over equal sequences (`policies.batch.base.IterationCost`).

    The price of serving (`simulator.serving.cost.iteration`) for an iteration in which every
    sequence drafts alike, catches up on one token, and nothing is taken out of a cache.

    Parameters
    ----------
    latency:
        The table; host phases it lacks cost nothing.
    signals:
        True if the policy that asks reads draft signals, whose phase is then charged for each
        drafted token.
    """

    def __init__(self, latency: LatencyTable, signals: bool = False) -> None:
        self.latency, self.signals = latency, signals
        self._cost = IterationCost(latency, reads=signals)

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        """Seconds of `draft_length` batched draft steps and one verification."""
        known = (context + 1) * batch
        drafting = batch if draft_length else 0
        work = Work(
            known, verify_tokens - batch, draft_length, drafting, drafting, known,
            rejected=False, unread=False,
        )  # fmt: skip
        return self._cost.of_work(work, batch).total_s
