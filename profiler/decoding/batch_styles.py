"""How the sequences of a batch draft and accept together, with any policy object.

`PerRequest` runs single-stream policies unchanged and `Jointly` a batch policy; the other
two make single-stream policies wait for each other (batch minimum, batch mean).  The
simulator's static batches know the same four.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy, Round, own_copy
from profiler.decoding.batch_stream import Stream
from traces.errors import DraftsimError

Policy = DraftPolicy | BatchPolicy
Synchronise = Literal["ragged", "minimum", "mean"]


class Batch(Protocol):
    """What a style drafts with (`profiler.decoding.batch_passes.BatchedDecoder`)."""

    streams: list[Stream]

    def draft(self, active: Sequence[Stream]) -> list[Stream]:
        """One draft step for `active`; returns those that may draft another token."""
        ...


class Accepted(Protocol):
    """A sequence's verdict (`profiler.decoding.batch_passes.Verdict`)."""

    @property
    def accepted(self) -> int:
        """Drafted tokens accepted."""
        ...

    @property
    def ends(self) -> bool:
        """Whether that ends the sequence."""
        ...


class Style(ABC):
    """Drives the policy or policies of a batch."""

    policy: Any
    """The run's own."""

    @abstractmethod
    def join(self, stream: Stream) -> None:
        """A sequence begins to decode."""

    @abstractmethod
    def draft(self, batch: Batch) -> None:
        """Draft for every sequence of this iteration, and leave what is to be verified."""

    def keep(self, verdicts: Sequence[Accepted]) -> list[int]:
        """How many of its accepted tokens each sequence keeps; all, by default."""
        return [v.accepted for v in verdicts]

    @abstractmethod
    def observe(self, streams: Sequence[Stream], rounds: Sequence[Round]) -> None:
        """Learn from an iteration, one round per sequence."""


class PerRequest(Style):
    """A single-stream policy, one copy per request; acceptance is ragged.

    A policy that learns across requests has one copy per place in the batch, shared by
    the requests that take that place in turn: requests decoded side by side cannot learn
    from each other's unfinished rounds.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy: DraftPolicy = policy.for_run()
        self._seats: dict[int, DraftPolicy] = {}

    def join(self, stream: Stream) -> None:
        """Give the request its copy of the policy."""
        stream.reads = self.policy.reads
        if self.policy.learns_across_requests:
            if stream.seat not in self._seats:
                self._seats[stream.seat] = self.policy.for_run()
            stream.policy = self._seats[stream.seat].fresh()
        else:
            stream.policy = self.policy.fresh()

    def draft(self, batch: Batch) -> None:
        """Step until nobody wants another token; sequences that stopped sit idle."""
        for s in batch.streams:
            s.policy.begin_round(s.load(len(batch.streams)))
        active = [s for s in batch.streams if s.remaining > 1]
        while active := self._willing(active):
            active = batch.draft(active)
        for s in batch.streams:
            del s.draft[s.policy.submit(s.draft) :]

    def observe(self, streams: Sequence[Stream], rounds: Sequence[Round]) -> None:
        """Each policy its own round."""
        for s, outcome in zip(streams, rounds, strict=True):
            s.policy.observe(outcome, s.draft)

    def _willing(self, active: Sequence[Stream]) -> list[Stream]:
        return [s for s in active if s.policy.keep_drafting(s.draft)]


class TruncateToMinimum(PerRequest):
    """Every sequence keeps as many tokens as the worst of the batch had accepted.

    A sequence that ends within the round holds nobody back.
    """

    def keep(self, verdicts: Sequence[Accepted]) -> list[int]:
        """The smallest acceptance of those that go on, for all."""
        most = max(v.accepted for v in verdicts)
        shared = min((v.accepted for v in verdicts if not v.ends), default=most)
        return [min(v.accepted, shared) for v in verdicts]


class StopAtMean(PerRequest):
    """All sequences draft alike, until fewer than half of them wish to go on."""

    def _willing(self, active: Sequence[Stream]) -> list[Stream]:
        votes = sum(s.policy.keep_drafting(s.draft) for s in active)
        return list(active) if 2 * votes >= len(active) else []


class Jointly(Style):
    """A batch policy that decides for all sequences of an iteration together."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy: BatchPolicy = policy.fresh()

    def join(self, stream: Stream) -> None:
        """The policy belongs to the batch, and reads of every sequence alike."""
        stream.reads = self.policy.reads

    def draft(self, batch: Batch) -> None:
        """Plan, draft in step, allot."""
        streams, policy = batch.streams, self.policy
        loads = [s.load(len(streams)) for s in streams]
        caps = policy.plan_each([s.request for s in streams], loads)
        limits = {s.request: min(c, s.remaining - 1) for s, c in zip(streams, caps, strict=True)}
        drafts = [s.draft for s in streams]
        active = [s for s in streams if limits[s.request] > 0]
        while active and policy.keep_drafting(drafts):
            active = [s for s in batch.draft(active) if len(s.draft) < limits[s.request]]
        for s, length in zip(streams, policy.allot(drafts), strict=True):
            del s.draft[length:]

    def observe(self, streams: Sequence[Stream], rounds: Sequence[Round]) -> None:
        """The policy all rounds."""
        del streams
        self.policy.observe(rounds)


def style_of(
    policy: Policy, synchronise: Synchronise = "ragged", vocab_size: int | None = None
) -> Style:
    """The style that runs `policy`, its sequences synchronised as named.

    ``vocab_size`` is the target's, for policies per request that need it.

    Raises
    ------
    DraftsimError
        For an unknown name, or a batch policy with any but ``ragged``.
    """
    styles = {"ragged": PerRequest, "minimum": TruncateToMinimum, "mean": StopAtMean}
    if synchronise not in styles:
        raise DraftsimError(f"synchronise is {synchronise!r}, expected one of {', '.join(styles)}")
    if not isinstance(policy, BatchPolicy):
        return styles[synchronise](own_copy(policy, vocab_size))
    if synchronise != "ragged":
        raise DraftsimError(
            f"synchronise {synchronise!r} is for policies per request; a batch policy decides for "
            "the whole batch itself: use 'ragged'"
        )
    return Jointly(policy)
