"""The loop of speculative decoding for several sequences at once.

`Together` drives the policy or the policies of a batch.  Per iteration, an engine lets it draft
(`Together.draft`, which asks back for tokens), verifies what members' drafts then hold, asks how
much is kept (`Together.keep`), moves on, and tells what came of it (`Together.observe`).  It drives
batches of real models, the serving simulation and the proposer of an engine.  For one sequence by
itself it makes the rounds of `policies.core.speculate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from policies.batch.base import BatchPolicy, Policy, caps_of
from policies.core import DraftPolicy, Load, Round, caught_up, drafting, own_copy
from policies.errors import DraftsimError
from policies.guard import PolicyError, lengths_from

Synchronise = Literal["ragged", "minimum", "mean"]


class Member:
    """A sequence of a batch, as far as the loop goes.

    ``name`` is for policies that keep state per sequence.  ``draft`` and ``seen`` are the tokens
    drafted in this iteration, and as the policy is shown them; once drafting has ended, ``draft``
    holds those to be verified.  ``forwards`` and ``catch_up`` are as in `policies.core.Round`,
    ``policy`` its own policy, and ``seat`` its place among those that learn.
    """

    takes_verified = False
    """True for a drafter that takes in all that was verified (`policies.core.Decoder`)."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.draft: list[Any] = []
        self.seen: list[Any] = []
        self.drafting: Iterator[list[Any]] = iter(())
        """Asks for the tokens of this iteration's draft (`policies.core.drafting`)."""
        self.forwards, self.catch_up, self.seat = 0, 1, -1
        self.policy: Any = None

    @property
    def remaining(self) -> int:
        """Output tokens that it may still emit."""
        raise NotImplementedError

    def settled(self, position: int, accepted: int, emitted: int) -> Round:
        """Return the round that has ended, and begin the next one."""
        drafted, forwards, read = len(self.draft), self.forwards, self.catch_up
        self.catch_up = caught_up(read, forwards, accepted, self.takes_verified)
        return Round(position, drafted, accepted, emitted, forwards, read)


def _always(draft: object) -> bool:
    return True


M = TypeVar("M", bound=Member)
DraftMore = Callable[[Sequence[M]], Sequence[Any]]
"""Drafts one token more for each of these members; None without a proposal."""


@dataclass(eq=False)
class Together(ABC):
    """Drives the policy or policies of a batch.

    ``policy`` is the run's own copy.  ``guarded``: tokens refuse signals that a policy does not
    declare; else each is shown through a guard.  ``longest``: the engine's bound on a draft.
    """

    policy: Any
    guarded: bool = False
    longest: int | None = None
    submits: ClassVar[str] = "submit"
    """Method of the policy that says how much of a draft is verified."""

    def __post_init__(self) -> None:
        self.changes = 0
        """Iterations that drafted another length than the one before, where one holds for all."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The draft signals that are read."""
        return tuple(self.policy.reads)

    def join(self, member: Member) -> None:  # noqa: B027
        """Note that a sequence begins to decode."""

    def leave(self, member: Member) -> None:  # noqa: B027
        """Note that a sequence has ended."""

    def draft(self, members: Sequence[M], load: Callable[[M], Load], more: DraftMore[M]) -> None:
        """Draft for every member of this iteration, and leave in it what is to be verified.

        Raises PolicyError if a policy reads a signal that it does not declare, or returns a length
        outside its draft.
        """
        try:
            for member, cap in zip(members, self._begin(members, load), strict=True):
                bounds = (cap, member.remaining - 1, self.longest)
                room = min(bound for bound in bounds if bound is not None)
                draft: list[Any] = []
                member.draft = draft
                member.seen = seen = draft if self.guarded else []
                member.drafting = drafting(self._willing(member), room, draft, seen, self.reads)
            active: Sequence[M] = members
            while active := [m for m in active if next(m.drafting, None) is not None]:
                if not self._agreed(members, active):
                    break
                for member, token in zip(active, more(active), strict=True):
                    if token is not None:
                        member.draft.append(token)
            drafted, answers = [len(m.draft) for m in members], self._submitted(members)
            lengths = lengths_from(self.submits, answers, drafted)
            for member, forwards, length in zip(members, drafted, lengths, strict=True):
                member.forwards = forwards
                del member.draft[length:]
        except PolicyError as error:
            raise error.by(self.policy) from None

    def keep(self, accepted: Sequence[int], ends: Sequence[bool]) -> list[int]:
        """Return how many accepted tokens each member keeps; ``ends`` is True if that ends it."""
        return list(accepted)

    def observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None:
        """Learn from an iteration, one round per member.  Raises as `draft` does."""
        try:
            self._observe(members, rounds)
        except PolicyError as error:
            raise error.by(self.policy) from None

    @abstractmethod
    def _begin(self, members: Sequence[M], load: Callable[[M], Load]) -> Sequence[int | None]:
        """Begin an iteration; return the cap of each draft, None without one."""

    def _willing(self, member: Member) -> Callable[[list[Any]], bool]:
        """Return what decides before each token if the member by itself drafts on."""
        return _always

    def _agreed(self, members: Sequence[Member], active: Sequence[Member]) -> bool:
        """Return True if `active`, the members that may draft on, all do."""
        return True

    @abstractmethod
    def _submitted(self, members: Sequence[Member]) -> Sequence[int]:
        """Return how much of each draft is verified."""

    @abstractmethod
    def _observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None: ...


class PerRequest(Together):
    """A policy of a single stream, copied per sequence; acceptance is ragged.

    A policy that learns across requests has one copy per place in the batch, shared by the
    sequences that take that place in turn: sequences decoded side by side cannot learn from each
    other's unfinished rounds.
    """

    policy: DraftPolicy

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seats: list[DraftPolicy] = []
        self._taken: list[bool] = []

    def join(self, member: Member) -> None:
        """Give the sequence its own copy of the policy, or that of the first free place."""
        if not self.policy.learns_across_requests:
            member.policy = self.policy.fresh()
            return
        if all(self._taken):
            self._seats.append(self.policy.for_run())
            self._taken.append(False)
        member.seat = self._taken.index(False)
        self._taken[member.seat] = True
        member.policy = self._seats[member.seat].fresh()

    def leave(self, member: Member) -> None:
        """Give up the sequence's place."""
        if member.seat >= 0:
            self._taken[member.seat] = False

    def _begin(self, members: Sequence[M], load: Callable[[M], Load]) -> Sequence[int | None]:
        if type(self.policy).begin_round is not DraftPolicy.begin_round:
            for member in members:
                member.policy.begin_round(load(member))
        return [None] * len(members)

    def _willing(self, member: Member) -> Callable[[list[Any]], bool]:
        keep_drafting: Callable[[list[Any]], bool] = member.policy.keep_drafting
        return keep_drafting

    def _submitted(self, members: Sequence[Member]) -> Sequence[int]:
        return [m.policy.submit(m.seen) for m in members]

    def _observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None:
        for member, outcome in zip(members, rounds, strict=True):
            member.policy.observe(outcome, member.seen[: outcome.drafted])


class TruncateToMinimum(PerRequest):
    """Every sequence keeps as many tokens as the one with fewest accepted that does not end."""

    def keep(self, accepted: Sequence[int], ends: Sequence[bool]) -> list[int]:
        """Return the smallest acceptance of those that go on, for all."""
        going_on = [a for a, ended in zip(accepted, ends, strict=True) if not ended]
        shared = min(going_on, default=max(accepted))
        return [min(a, shared) for a in accepted]


class StopAtMean(PerRequest):
    """All sequences draft alike, until fewer than half of them wish to go on.

    A batch policy that stops on a mean over the batch needs no such style: run it `Jointly`.
    """

    def _willing(self, member: Member) -> Callable[[list[Any]], bool]:
        return _always

    def _agreed(self, members: Sequence[Member], active: Sequence[Member]) -> bool:
        votes = sum(bool(m.policy.keep_drafting(m.seen)) for m in active)
        return 2 * votes >= len(active)


class Jointly(Together):
    """A batch policy that decides for all sequences of an iteration together."""

    policy: BatchPolicy
    submits = "allot"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began, self._bound = False, self.policy.longest_draft()

    def _begin(self, members: Sequence[M], load: Callable[[M], Load]) -> Sequence[int | None]:
        before = self.policy.planned
        names, loads = [m.name for m in members], [load(m) for m in members]
        caps = caps_of(self.policy, self._bound, names, loads)
        self.changes += self._began and self.policy.planned != before
        self._began = True
        return caps

    def _agreed(self, members: Sequence[Member], active: Sequence[Member]) -> bool:
        return self.policy.keep_drafting([m.seen for m in members])

    def _submitted(self, members: Sequence[Member]) -> Sequence[int]:
        return self.policy.allot([m.seen for m in members])

    def _observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None:
        self.policy.observe(rounds)


STYLES: dict[str, type[PerRequest]] = {
    "ragged": PerRequest, "minimum": TruncateToMinimum, "mean": StopAtMean,
}  # fmt: skip


def together_of(
    policy: Policy,
    synchronise: Synchronise = "ragged",
    vocab_size: int | None = None,
    *,
    guarded: bool = False,
    longest: int | None = None,
) -> Together:
    """Return what drives copies of `policy`, a prototype, over a batch.

    ``synchronise`` is ``ragged`` (each sequence keeps what it had accepted), ``minimum`` (all keep
    as many as the worst) or ``mean`` (all draft alike, until most would stop).  ``vocab_size`` is
    the target's, for policies that need it.

    Raises DraftsimError for an unknown name, or a batch policy with any but ``ragged``. Raises
    ValueError if the policy needs a vocabulary size, and neither it nor the caller has one.
    """
    if synchronise not in STYLES:
        raise DraftsimError(f"synchronise is {synchronise!r}, expected one of {', '.join(STYLES)}")
    if not isinstance(policy, BatchPolicy):
        return STYLES[synchronise](own_copy(policy, vocab_size), guarded, longest)
    if synchronise != "ragged":
        raise DraftsimError(
            f"synchronise {synchronise!r} is for policies per request; a batch policy decides for "
            "the whole batch itself: use 'ragged'"
        )
    return Jointly(policy.fresh(), guarded, longest)
