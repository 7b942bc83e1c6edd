"""The loop of `policies.core.speculate` and of batch policies, taken apart for an engine.

An engine asks for drafts at the end of one iteration and verifies them in the next, so a
round is begun (`Rounds.draft`) and settled (`Rounds.settle`) by separate calls.  Tests hold
the rounds to those of the replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy, Round, own_copy
from policies.guard import Guarded, UndeclaredSignal
from profiler.engines.drafts import Drafts

Policy = DraftPolicy | BatchPolicy


class Stream:
    """One request between its first token and its last."""

    def __init__(self, name: str, drafts: Drafts, output: Sequence[int] = ()) -> None:
        self.name, self.drafts = name, drafts
        self.output = [*output]
        """Tokens emitted so far."""
        self.policy: DraftPolicy | None = None
        self.seat = -1
        self.pending: list[Any] = []
        """What was handed to the engine and is not verified yet."""
        self.forwards = 0
        self.catch_up = 1
        self.rounds: list[Round] = []

    def settle(self, emitted: Sequence[int], verified: int) -> tuple[Round, list[Any]]:
        """The round that ended with `emitted`; `verified` drafted tokens were looked at."""
        position, forwards = self.drafts.position, self.forwards
        draft, accepted = self.pending[:verified], min(len(emitted) - 1, verified)
        self.drafts.advance(emitted)
        grown = self.drafts.position - position
        outcome = Round(position, len(draft), accepted, grown, forwards, self.catch_up)
        self.pending, self.forwards = [], 0
        if forwards:
            self.catch_up = accepted - min(accepted, forwards - 1) + 1
        else:
            self.catch_up += 1
        self.rounds.append(outcome)
        return outcome, draft


class Rounds(ABC):
    """A policy's rounds over the streams of an engine."""

    def join(self, stream: Stream) -> None:  # noqa: B027
        """A request begins to decode."""

    policy: Policy
    """The run's copy of the prototype."""

    def draft(self, streams: Sequence[Stream], scheduled: int) -> list[list[int]]:
        """Token ids for every stream that decodes in the next iteration.

        ``scheduled``: requests of this one, those included that end with it or whose prompts it
        processed.
        Raises UndeclaredSignal if the policy reads a signal that it does not declare.
        """
        try:
            return self._drafts(streams, scheduled)
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None

    def settle(
        self, streams: Sequence[Stream], emitted: Sequence[Sequence[int]], verified: Sequence[int]
    ) -> None:
        """Every stream's round ended.  Raises as `draft` does."""
        ended = [s.settle(e, v) for s, e, v in zip(streams, emitted, verified, strict=True)]
        try:
            self._observe(streams, ended)
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None

    @abstractmethod
    def _drafts(self, streams: Sequence[Stream], scheduled: int) -> list[list[int]]: ...

    @abstractmethod
    def _observe(
        self, streams: Sequence[Stream], ended: Sequence[tuple[Round, list[Any]]]
    ) -> None: ...

    def leave(self, stream: Stream) -> None:  # noqa: B027
        """A request has ended."""


class PerRequest(Rounds):
    """A policy per request; one that learns across requests per place in the batch.

    As `simulator.serving.speculation.PerRequest` does it: requests decoded side by side
    cannot learn from each other's unfinished rounds.
    """

    policy: DraftPolicy

    def __init__(self, policy: DraftPolicy, longest: int, vocab_size: int | None = None) -> None:
        self.policy, self.longest = own_copy(policy, vocab_size), longest
        self._seats: list[tuple[DraftPolicy, bool]] = []

    def join(self, stream: Stream) -> None:
        if not self.policy.learns_across_requests:
            stream.policy = self.policy.fresh()
            return
        free = next((i for i, (_, taken) in enumerate(self._seats) if not taken), None)
        if free is None:
            free = len(self._seats)
            self._seats.append((self.policy.for_run(), True))
        policy = self._seats[free][0]
        self._seats[free] = policy, True
        stream.policy, stream.seat = policy.fresh(), free

    def leave(self, stream: Stream) -> None:
        if stream.seat >= 0:
            self._seats[stream.seat] = self._seats[stream.seat][0], False

    def _drafts(self, streams: Sequence[Stream], scheduled: int) -> list[list[int]]:
        return [self._draft(s, len(streams), scheduled) for s in streams]

    def _draft(self, stream: Stream, batch: int, scheduled: int) -> list[int]:
        policy, drafts = stream.policy, stream.drafts
        assert policy is not None
        policy.begin_round(drafts.load._replace(batch=batch, scheduled=scheduled))
        draft: list[Any] = []
        seen: list[Any] = []
        limit = min(drafts.remaining - 1, self.longest)
        while len(draft) < limit and policy.keep_drafting(seen):
            token = drafts.draft(draft)
            if token is None:
                break
            draft.append(token)
            seen.append(Guarded(token, policy.reads))
            if token.ends:
                break
        stream.forwards = len(draft)
        del draft[policy.submit(seen) :]
        stream.pending = draft
        return drafts.ids(draft)

    def _observe(self, streams: Sequence[Stream], ended: Sequence[tuple[Round, list[Any]]]) -> None:
        for stream, (outcome, draft) in zip(streams, ended, strict=True):
            assert stream.policy is not None
            stream.policy.observe(outcome, [Guarded(t, stream.policy.reads) for t in draft])


class Jointly(Rounds):
    """A batch policy that decides for all streams of an iteration together."""

    policy: BatchPolicy

    def __init__(self, policy: BatchPolicy, longest: int) -> None:
        self.policy, self.longest = policy.fresh(), longest

    def _drafts(self, streams: Sequence[Stream], scheduled: int) -> list[list[int]]:
        policy = self.policy
        loads = [s.drafts.load._replace(batch=len(streams), scheduled=scheduled) for s in streams]
        caps = policy.plan_each([s.name for s in streams], loads)
        limits = [
            min(cap, s.drafts.remaining - 1, self.longest)
            for cap, s in zip(caps, streams, strict=True)
        ]
        drafts: list[list[Any]] = [[] for _ in streams]
        seen: list[list[Any]] = [[] for _ in streams]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        while active and policy.keep_drafting(seen):
            active = [i for i in active if self._grow(streams[i], drafts[i], limits[i])]
            for own, draft in zip(seen, drafts, strict=True):
                own += [Guarded(token, policy.reads) for token in draft[len(own) :]]
        for stream, draft, length in zip(streams, drafts, policy.allot(seen), strict=True):
            stream.forwards = len(draft)
            stream.pending = draft[:length]
        return [s.drafts.ids(s.pending) for s in streams]

    @staticmethod
    def _grow(stream: Stream, draft: list[Any], limit: int) -> bool:
        """Draft one token more; whether another may follow."""
        token = stream.drafts.draft(draft)
        if token is None:
            return False
        draft.append(token)
        return len(draft) < limit and not token.ends

    def _observe(self, streams: Sequence[Stream], ended: Sequence[tuple[Round, list[Any]]]) -> None:
        self.policy.observe([outcome for outcome, _ in ended])


def rounds_of(policy: Policy, longest: int, vocab_size: int | None = None) -> Rounds:
    """The rounds of a prototype, which is not touched, at most `longest` tokens a draft.

    ``vocab_size`` is that of the drafts' signals.  Raises ValueError if the policy needs it, and
    neither it nor the prototype has one.
    """
    if isinstance(policy, BatchPolicy):
        return Jointly(policy, longest)
    return PerRequest(policy, longest, vocab_size)
