"""Spans of a batch policy whose draft lengths the number of requests decides.

While that number stays the same, so do the lengths, and every request's rounds are those of a
fixed length from where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from policies.batch.base import BatchPolicy, Planned, planned_of
from policies.core import DraftPolicy, Round
from simulator.serving.arrivals import Job
from simulator.serving.cost.work import Chunk
from simulator.serving.sequence import EngineState, ServedSequence, Slot
from simulator.serving.spans.engine import SpanEngine
from simulator.serving.spans.rounds import NOTHING, Ints, ReplayedSequence, Rounds
from simulator.serving.speculation import Speculation
from traces.acceptance.trace import Trace
from traces.replay.layout import layout_of
from traces.replay.walk import caught_up


class PlannedLength(DraftPolicy):
    """What every sequence does while `planned` holds."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.planned.passes

    def submit(self, draft: Sequence[Any]) -> int:
        return min(len(draft), self.planned.verified)


class PlannedRounds:
    """Rounds of a trace's sequences while some `Planned` holds, from any place on.

    Those of a `ServedSequence` under `PlannedLength`, read off what the recording tells of every
    start.
    """

    def __init__(self, trace: Trace, lookahead: int) -> None:
        # Not the trace itself: what is kept beside it must not keep it.
        self._trace, self._lookahead = ref(trace), lookahead
        self._starts: dict[tuple[Planned, bool], _Starts] = {}
        self._whole: dict[tuple[Planned, int], Rounds] = {}

    def sequence(self, job: Job) -> PlannedSequence:
        """A request, whose rounds nothing decides yet."""
        return PlannedSequence(job, self)

    def rounds(self, job: Job, planned: Planned, begin: int, behind: int) -> Rounds:
        """Those after `begin` output tokens, the first of which catches up on `behind`.

        Raises what replaying them one by one raises.
        """
        trace = self._trace()
        assert trace is not None
        recorded = trace.requests[job.sequence].tokens
        wraps = job.output_tokens > recorded
        starts = self._starts.get((planned, wraps))
        if starts is None:
            starts = self._starts[planned, wraps] = _Starts(trace, planned, self._lookahead, wraps)
        if wraps or begin > 1:
            return starts.rounds(trace, job, begin, behind)
        # From the first token on, the requests of a sequence differ in where they end alone.
        found = self._whole.get((planned, job.sequence))
        if found is None:
            whole = job._replace(output_tokens=recorded)
            found = starts.rounds(trace, whole, begin, behind)
            self._whole[planned, job.sequence] = found
        return found


class _Starts:
    """What one `Planned` makes of every start; ``wraps``: of requests longer than recordings."""

    def __init__(self, trace: Trace, planned: Planned, lookahead: int, wraps: bool) -> None:
        layout = layout_of(trace)
        left = layout.ends - np.arange(len(layout.ends))
        most = np.minimum(layout.most, lookahead)
        if wraps:  # no draft crosses the seam, behind which the recording begins again
            most = np.minimum(most, left - 1)
        self._planned, self._lookahead = planned, lookahead
        self._forwards = np.minimum(most, planned.passes)
        self._sent = np.minimum(self._forwards, planned.verified)
        self._accepted = np.minimum(self._sent, layout.runs)
        self._emitted = np.minimum(self._accepted + 1, left)
        self._lost = self._forwards > layout.recorded
        self._lost |= layout.open_ended & (self._sent > layout.runs)
        self._lists: dict[int, list[int]] = {}

    def rounds(self, trace: Trace, job: Job, begin: int, behind: int) -> Rounds:
        """As of `PlannedRounds`."""
        first = int(trace.request_starts[job.sequence])
        recorded = trace.requests[job.sequence].tokens
        emitted = self._lists.get(job.sequence)
        if emitted is None:
            emitted = self._emitted[first : first + recorded].tolist()
            self._lists[job.sequence] = emitted
        places, position = [], begin
        while position < job.output_tokens:
            places.append(position)
            position += emitted[position % recorded]
        positions: Ints = np.array(places, np.int64)
        at = first + positions % recorded
        if (lost := self._lost[at]).any():
            self._raise(trace, job, int(positions[lost.argmax()]))
        forwards, accepted = self._forwards[at], self._accepted[at]
        catch_up = caught_up(positions == begin, forwards, accepted, trace.takes_verified, behind)
        columns = positions, self._sent[at], accepted, self._emitted[at], forwards, catch_up
        return Rounds(np.array(columns), begin)

    def _raise(self, trace: Trace, job: Job, position: int) -> None:
        """Let the replay say why it cannot go on here."""
        served = ServedSequence(trace, job, self._lookahead, EngineState())
        while served.position < position:
            served.commit(position - served.position - 1)
        next(served.rounds(PlannedLength(self._planned)))


class PlannedSequence(ReplayedSequence):
    """A request that follows whatever is planned."""

    __slots__ = ("_rounds", "planned")

    def __init__(self, job: Job, rounds: PlannedRounds) -> None:
        self.job, self._rounds = job, rounds
        self.table, self.at, self.count, self.over = NOTHING, 0, 0, 0
        self.planned: Planned | None = None

    def plan(self, planned: Planned) -> None:
        """From here on draft so many."""
        if planned == self.planned:
            return
        begin, behind = int(self.table.reached[self.at]), 1
        if self.planned is not None:
            behind = self.table.round(self.at).catch_up
        self.planned = planned
        self.follow(self._rounds.rounds(self.job, planned, begin, behind))


class AsPlanned(Speculation):
    """A batch policy asked for what it plans at a number of requests (`planned_of`)."""

    def __init__(self, policy: BatchPolicy, state: EngineState) -> None:
        self.policy, self.state = policy, state
        self.reads = policy.reads
        self.planned: Planned | None = None

    def at(self, scheduled: int) -> Planned:
        """What holds after an iteration of so many requests."""
        planned = planned_of(self.policy, scheduled)
        assert planned is not None, "the policy looks at more than the number of requests"
        return planned

    def decide(self, together: int) -> Planned:
        """What holds for the iteration that now begins, in which so many decode."""
        before, planned = self.planned, self.at(self.state.scheduled or together)
        self.changes += before is not None and planned.verified != before.verified
        self.planned = planned
        return planned

    def join(self, slot: Slot) -> None:
        """`PlannedEngine` lets requests in."""

    def step(self, slots: Sequence[Slot]) -> list[Round]:
        """Each request's next round."""
        planned = self.decide(len(slots))
        for slot in slots:
            slot.decoder.plan(planned)
        return [next(slot.rounds) for slot in slots]


class PlannedEngine(SpanEngine):
    """The engine by spans, which enters its requests anew where another length is planned."""

    def __init__(self, *args: Any, policy: BatchPolicy, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked = self.speculation = AsPlanned(policy, self.state)
        self._followed: Planned | None = None
        """By all that are in the ledger."""

    def add(self, slot: Slot, after: int = 0) -> None:
        """Whatever is followed, that request's rounds are entered by."""
        if self._followed is None:
            self._followed = self._asked.at(self.state.scheduled or len(self.scheduler.running))
        slot.decoder.plan(self._followed)
        super().add(slot, after)

    def _plan(self) -> list[Chunk] | None:
        chunks = super()._plan()
        if chunks is not None and self.lengths_change():
            self.change_lengths()
        return chunks

    def lengths_change(self) -> bool:
        """Whether another length is planned than is followed."""
        together = len(self._since)
        return bool(together) and self._asked.decide(together) != self._followed

    def lengths_last(self) -> bool:
        """Whether none will be, as long as nobody comes or goes."""
        return self._asked.at(len(self._since)) == self._followed

    def change_lengths(self) -> None:
        """Enter the requests anew."""
        slots, pool = list(self._since), self.scheduler.pool
        held = pool.held(self)
        self.settle()
        self._followed = self._asked.planned
        for slot in slots:
            self._enter(slot)
        pool.hold(self, held)


def planned_rounds(trace: Trace, lookahead: int) -> PlannedRounds:
    """The rounds of `trace` at planned lengths, shared by all runs."""
    kept = _kept.setdefault(trace, {})
    if lookahead not in kept:
        kept[lookahead] = PlannedRounds(trace, lookahead)
    return kept[lookahead]


_kept: WeakKeyDictionary[Trace, dict[int, PlannedRounds]] = WeakKeyDictionary()
