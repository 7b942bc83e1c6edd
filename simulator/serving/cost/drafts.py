"""Seconds of an iteration's draft passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from policies.core import Round
from simulator.serving.cost.reader import PassReader
from simulator.serving.cost.work import Work
from simulator.serving.sequence import Slot
from traces.errors import DraftsimError
from traces.latency.settling import settling_sums
from traces.latency.table import LatencyTable


class DraftCost:
    """Prices the draft passes of an engine's iterations.

    Parameters
    ----------
    latency:
        The table.
    speculates:
        Whether the draft model runs at all.
    always:
        Draft passes that the engine runs in every iteration (`traces.replay.always`).
    draft_batch, passes:
        Of `simulator.serving.cost.iteration.IterationCost`.

    Attributes
    ----------
    later, first, along:
        Readers of a draft's later passes, of its first, and of what a drafter takes that an
        engine runs along in every iteration; None where there is no such.
    """

    def __init__(
        self,
        latency: LatencyTable,
        speculates: bool,
        always: int,
        draft_batch: Literal["padded", "active"],
        passes: Literal["ragged", "padded"],
    ) -> None:
        self._latency = latency
        self._always = always
        self._draft_batch = draft_batch
        self._passes = passes
        self.later = PassReader(latency, "draft") if speculates else None
        phase = latency.first_draft_phase("draft")
        own_first = speculates and phase != "forward"
        self.first = PassReader(latency, "draft", phase) if own_first else self.later
        runs_along = speculates and latency.has("draft", "along")
        self.along = PassReader(latency, "draft", "along") if runs_along else None
        self._settled: dict[int, list[float]] = {}

    @property
    def readers(self) -> list[PassReader]:
        """Return the readers in use, each once."""
        return list(dict.fromkeys(r for r in (self.later, self.first, self.along) if r))

    def running(self) -> tuple[PassReader, PassReader]:
        """The readers of a draft's later passes and of its first."""
        if self.later is None or self.first is None:
            raise DraftsimError("the policy drafted, but the engine was told it never would")
        return self.later, self.first

    def idle(self, work: Work) -> bool:
        """Return True if a drafter that always runs is asked for nothing.

        `policies.batch.base.KeptInStep` counts that pass as the draft's own.
        """
        return self.along is not None and not work.drafted and self._always < 2

    def _idle_s(self, work: Work, batch: int) -> float:
        """Seconds of an iteration without drafts."""
        if self.along is None or not self.idle(work):
            return 0.0
        return self.along(batch, 1.0, work.context / batch - 1.0)

    def of_work(self, work: Work, batch: int) -> float:
        """Seconds of the draft passes of an iteration over `batch` sequences, at their means."""
        if not work.longest or self.idle(work):
            return self._idle_s(work, batch)
        read, read_first = self.running()
        longest, mean = work.longest, work.draft_context / work.drafting
        width, cached = self._first_sizes(work, batch)
        first_s = read_first(batch, width, cached)
        settled = self.settling(batch)
        settling_s = settled[min(longest, len(settled)) - 1]
        return first_s + settling_s + read.run(batch, mean, longest - 1)

    def by_sequence(self, work: Work, slots: Sequence[Slot], rounds: Sequence[Round]) -> float:
        """Seconds where it matters which sequence drafts how long: one round per slot."""
        if not work.longest or self.idle(work):
            return self._idle_s(work, len(rounds))
        read, read_first = self.running()
        longest, drafting = work.longest, work.drafting
        if self._passes == "padded":
            return self._rectangles(slots, rounds, longest)
        batch = drafting if self.along is None else len(rounds)
        seconds = read_first(batch, *self._first_sizes(work, batch))
        settled = self.settling(drafting)
        seconds += settled[min(longest, len(settled)) - 1]
        for step in range(1, longest):
            still = [
                s.context for s, r in zip(slots, rounds, strict=True) if r.draft_forwards > step
            ]
            seconds += read(len(still), 1.0, sum(still) / len(still) + step - 1)
        return seconds

    def settling(self, batch: int) -> list[float]:
        """Return the extra time of the first 0, 1, ... draft passes after a round's first."""
        settled = self._settled.get(batch)
        if settled is None:
            settled = self._settled[batch] = settling_sums(self._latency, "draft", batch).tolist()
        return settled

    def _first_sizes(self, work: Work, batch: int) -> tuple[float, float]:
        """Tokens a sequence of a draft's first pass, and those cached before; both at their means.

        A drafter that runs along goes over all that the iteration verifies, of every sequence.
        """
        if self.along is not None:
            return work.drafted / batch + 1.0, work.context / batch - 1.0
        width, mean = work.catch_up / work.drafting, work.draft_context / work.drafting
        return width, mean - width if mean > width else 0.0

    def _rectangles(self, slots: Sequence[Slot], rounds: Sequence[Round], longest: int) -> float:
        read, read_first = self.running()
        sizes = [
            (r.draft_forwards, r.catch_up, slot.context)
            for slot, r in zip(slots, rounds, strict=True) if r.draft_forwards
        ]  # fmt: skip
        width = max(catch_up for _, catch_up, _ in sizes)
        settled = self.settling(len(rounds))
        seconds = settled[min(longest, len(settled)) - 1]
        for step in range(longest):
            active = [context for forwards, _, context in sizes if forwards > step]
            batch = len(active) if self._draft_batch == "active" else len(rounds)
            # What a pass sees when it ends: every known token and the drafts so far.
            pass_s = read if step else read_first
            seconds += pass_s(batch, width, max(max(active) + step - width, 0))
            width = 1
        return seconds
