"""One decode iteration's decisions: a round for every decoding slot, and no seconds.

`PerRequest` runs single-stream policies unchanged, `Jointly` a batch policy; the last two
are the synchronised styles of static batches.  All return one `Round` per slot, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy, Round
from simulator.serving.sequence import Slot


class Speculation(ABC):
    """Turns a policy into rounds of a batch."""

    reads: tuple[str, ...] = ()
    changes = 0
    """Iterations that drafted another length than the one before, where one holds for all."""

    @abstractmethod
    def join(self, slot: Slot) -> None:
        """A request begins to decode."""

    @abstractmethod
    def step(self, slots: Sequence[Slot]) -> list[Round]:
        """One round of every slot; `slots` is not empty."""


class Seats:
    """The policies of the requests that decode together: one each, of one run.

    A policy that learns across requests has one copy per place in the batch, shared by
    the requests that take that place in turn, as in `profiler.decoding.batch_styles`: requests
    decoded side by side cannot learn from each other's unfinished rounds.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy.for_run()
        self._seats: list[tuple[DraftPolicy, Slot | None]] = []

    def take(self, slot: Slot) -> DraftPolicy:
        """The policy of a request that begins to decode."""
        if not self.policy.learns_across_requests:
            return self.policy.fresh()
        seat = next((i for i, (_, taken) in enumerate(self._seats) if taken is None), None)
        if seat is None:
            seat = len(self._seats)
            self._seats.append((self.policy.for_run(), slot))
        policy = self._seats[seat][0]
        self._seats[seat] = policy, slot
        return policy.fresh()

    def free(self) -> None:
        """Give up the places of requests that have ended."""
        for i, (policy, slot) in enumerate(self._seats):
            if slot is not None and slot.decoder.ended:
                self._seats[i] = policy, None


class PerRequest(Speculation):
    """A single-stream policy, copied per request (`Seats`); acceptance is ragged."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.reads = policy.reads
        self._seats = Seats(policy)

    def join(self, slot: Slot) -> None:
        """Give the request its own copy of the policy, or its seat's."""
        slot.rounds = slot.decoder.rounds(self._seats.take(slot))

    def step(self, slots: Sequence[Slot]) -> list[Round]:
        """Each request's next round."""
        rounds = [next(slot.rounds) for slot in slots]
        self._seats.free()
        return rounds


class Jointly(Speculation):
    """A batch policy that decides for all slots of an iteration together."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy.fresh()
        self.reads = policy.reads
        self._began = False

    def join(self, slot: Slot) -> None:
        """The policy belongs to the engine, which tells the request what it reads."""
        slot.decoder.declare(self.reads)

    def step(self, slots: Sequence[Slot]) -> list[Round]:
        """Plan, draft in lockstep, allot, verify, observe."""
        policy = self.policy
        loads = [slot.decoder.load for slot in slots]
        before = policy.planned
        caps = policy.plan_each([slot.index for slot in slots], loads)
        self.changes += self._began and policy.planned != before
        self._began = True
        limits = [min(c, s.decoder.remaining - 1) for c, s in zip(caps, slots, strict=True)]
        drafts: list[list[Any]] = [[] for _ in slots]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        while active and policy.keep_drafting(drafts):
            active = _draft_step(slots, drafts, limits, active)
        forwards = [len(draft) for draft in drafts]
        for draft, length in zip(drafts, policy.allot(drafts), strict=True):
            del draft[length:]
        accepted = [s.decoder.judge(d) for s, d in zip(slots, drafts, strict=True)]
        rounds = _commit(slots, drafts, forwards, accepted)
        policy.observe(rounds)
        return rounds


class _Synchronised(Speculation):
    """Single-stream policies of a batch whose sequences wait for each other."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.reads = policy.reads
        self._seats = Seats(policy)

    def join(self, slot: Slot) -> None:
        """Give the request its own copy of the policy, or its seat's."""
        slot.policy = self._seats.take(slot)
        slot.decoder.declare(self.reads)

    def step(self, slots: Sequence[Slot]) -> list[Round]:
        """Draft as the style says, verify, truncate as the style says."""
        for slot in slots:
            slot.policy.begin_round(slot.decoder.load)
        limits = [slot.decoder.remaining - 1 for slot in slots]
        drafts: list[list[Any]] = [[] for _ in slots]
        self._draft(slots, drafts, limits)
        forwards = [len(draft) for draft in drafts]
        for slot, draft in zip(slots, drafts, strict=True):
            del draft[slot.policy.submit(draft) :]
        accepted = [s.decoder.judge(d) for s, d in zip(slots, drafts, strict=True)]
        rounds = _commit(slots, drafts, forwards, self._truncate(slots, accepted))
        for slot, outcome, draft in zip(slots, rounds, drafts, strict=True):
            slot.policy.observe(outcome, draft)
        self._seats.free()
        return rounds

    def _draft(self, slots: Sequence[Slot], drafts: list[list[Any]], limits: list[int]) -> None:
        active = [i for i, limit in enumerate(limits) if limit > 0]
        while active := [i for i in active if slots[i].policy.keep_drafting(drafts[i])]:
            active = _draft_step(slots, drafts, limits, active)

    def _truncate(self, slots: Sequence[Slot], accepted: list[int]) -> list[int]:
        del slots
        return accepted


class TruncateToMinimum(_Synchronised):
    """Every sequence keeps as many tokens as the worst of the batch had accepted.

    A sequence that ends within the round holds nobody back.
    """

    def _truncate(self, slots: Sequence[Slot], accepted: list[int]) -> list[int]:
        going_on = [a for s, a in zip(slots, accepted, strict=True) if not s.decoder.ends_after(a)]
        shared = min(going_on, default=max(accepted))
        return [min(a, shared) for a in accepted]


class StopAtMean(_Synchronised):
    """All sequences draft alike, until the mean of their wishes to go on is below a half.

    A batch policy that stops on a batch-mean signal needs no such style: run it `Jointly`.
    """

    def _draft(self, slots: Sequence[Slot], drafts: list[list[Any]], limits: list[int]) -> None:
        active = [i for i, limit in enumerate(limits) if limit > 0]
        while active:
            votes = sum(slots[i].policy.keep_drafting(drafts[i]) for i in active)
            if 2 * votes < len(active):
                return
            active = _draft_step(slots, drafts, limits, active)


def _draft_step(
    slots: Sequence[Slot], drafts: list[list[Any]], limits: list[int], active: list[int]
) -> list[int]:
    """Draft one token for each active slot; returns those that may draft another."""
    still = []
    for i in active:
        draft = drafts[i]
        token = slots[i].decoder.draft(draft)
        if token is None:
            continue
        draft.append(token)
        if len(draft) < limits[i] and not token.ends:
            still.append(i)
    return still


def _commit(
    slots: Sequence[Slot], drafts: list[list[Any]], forwards: list[int], accepted: list[int]
) -> list[Round]:
    rounds = []
    for slot, draft, passes, kept in zip(slots, drafts, forwards, accepted, strict=True):
        decoder = slot.decoder
        position = decoder.position
        decoder.commit(kept)
        rounds.append(
            Round(position, len(draft), kept, decoder.position - position, passes, slot.catch_up)
        )
        # As in `policies.core.speculate`: the last drafted token was never fed back.
        if passes:
            processed = 0 if decoder.takes_verified else min(kept, passes - 1)
            slot.catch_up = kept - processed + 1
        else:
            slot.catch_up += 1
    return rounds
