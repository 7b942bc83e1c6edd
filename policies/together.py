"""The loop of speculative decoding for several sequences at once.

`Together` drives the policy or the policies of a batch.  Per iteration, an engine lets it draft
(`Together.draft`, which asks back for tokens), verifies what members' drafts then hold, asks how
much is kept (`Together.keep`), moves on, and tells what came of it (`Together.observe`).  It drives
batches of real models, the serving simulation and the proposer of an engine.  For one sequence by
itself it makes the rounds of `policies.core.speculate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy, Load, Round, caught_up, own_copy
from policies.errors import DraftsimError
from policies.guard import Guarded, UndeclaredSignal

Policy = DraftPolicy | BatchPolicy
Synchronise = Literal["ragged", "minimum", "mean"]


class Member:
    """A sequence of a batch, as far as the loop goes.

    Attributes
    ----------
    name:
        What policies that tell sequences apart know it by.
    draft:
        The tokens drafted in this iteration; once drafting has ended, those to be verified.
    forwards, catch_up:
        Of `policies.core.Round`: draft passes of this iteration, and tokens that the first of the
        next draft has to process.
    policy, seat:
        Its policy where it has one of its own, and its place among those that learn.
    """

    takes_verified = False
    """True for a drafter that takes in all that was verified (`policies.core.Decoder`)."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.draft: list[Any] = []
        self.forwards, self.catch_up, self.seat = 0, 1, -1
        self.policy: Any = None

    @property
    def remaining(self) -> int:
        """Output tokens that it may still emit."""
        raise NotImplementedError

    def settled(self, position: int, accepted: int, emitted: int) -> Round:
        """Return the round that ended so; the next one begins."""
        forwards, behind = self.forwards, self.catch_up
        outcome = Round(position, len(self.draft), accepted, emitted, forwards, behind)
        self.catch_up = caught_up(behind, forwards, accepted, self.takes_verified)
        return outcome


M = TypeVar("M", bound=Member)
Draft = Callable[[Sequence[M]], Sequence[Any]]
"""Drafts one token more for each of these members; None without a proposal."""


class Together(ABC):
    """Drives the policy or policies of a batch.

    Parameters
    ----------
    policy:
        The run's own copy.
    guarded:
        True if the tokens refuse signals that a policy does not declare; else each is shown through
        a guard.
    longest:
        Tokens that a draft may have at most, where the engine bounds it.
    """

    def __init__(self, policy: Any, guarded: bool = False, longest: int | None = None) -> None:
        self.policy, self.guarded, self.longest = policy, guarded, longest
        self.changes = 0
        """Iterations that drafted another length than the one before, where one holds for all."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The draft signals that are read."""
        return tuple(self.policy.reads)

    def join(self, member: Member) -> None:  # noqa: B027
        """A sequence begins to decode."""

    def leave(self, member: Member) -> None:  # noqa: B027
        """A sequence has ended."""

    def draft(self, members: Sequence[M], load: Callable[[M], Load], more: Draft[M]) -> None:
        """Draft for every member of this iteration, and leave in it what is to be verified.

        Raises
        ------
        UndeclaredSignal
            If a policy reads a signal that it does not declare.
        """
        try:
            caps = self._begin(members, load)
            limits: dict[int, int] = {}
            for member, cap in zip(members, caps, strict=True):
                member.draft, member.forwards = [], 0
                bounds = (cap, member.remaining - 1, self.longest)
                limits[id(member)] = min(bound for bound in bounds if bound is not None)
            # What the policies are shown.
            seen: dict[int, list[Any]] = {id(m): m.draft if self.guarded else [] for m in members}
            active = [m for m in members if limits[id(m)] > 0]
            while active and (active := self._willing(members, active, seen)):
                going_on = []
                for member, token in zip(active, more(active), strict=True):
                    if token is None:
                        continue
                    member.draft.append(token)
                    if not self.guarded:
                        seen[id(member)].append(Guarded(token, self.reads))
                    if len(member.draft) < limits[id(member)] and not token.ends:
                        going_on.append(member)
                active = going_on
            shown = [seen[id(m)] for m in members]
            for member, length in zip(members, self._submitted(members, shown), strict=True):
                member.forwards = len(member.draft)
                del member.draft[length:]
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None

    def keep(self, accepted: Sequence[int], ends: Sequence[bool]) -> list[int]:
        """Return how many of its accepted tokens each member keeps; ``ends``: that ends it."""
        del ends
        return list(accepted)

    def observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None:
        """Learn from an iteration, one round per member.  Raises as `draft` does."""
        try:
            self._observe(members, rounds)
        except UndeclaredSignal as error:
            raise error.by(self.policy) from None

    @abstractmethod
    def _begin(self, members: Sequence[M], load: Callable[[M], Load]) -> Sequence[int | None]:
        """Begin an iteration; return the cap of each draft, None without one."""

    @abstractmethod
    def _willing(
        self, members: Sequence[Member], active: Sequence[M], seen: dict[int, list[Any]]
    ) -> list[M]:
        """Return those of `active` that draft on."""

    @abstractmethod
    def _submitted(self, members: Sequence[Member], seen: Sequence[list[Any]]) -> Sequence[int]:
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

    def __init__(
        self, policy: DraftPolicy, guarded: bool = False, longest: int | None = None
    ) -> None:
        super().__init__(policy, guarded, longest)
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

    def _willing(
        self, members: Sequence[Member], active: Sequence[M], seen: dict[int, list[Any]]
    ) -> list[M]:
        return [m for m in active if m.policy.keep_drafting(seen[id(m)])]

    def _submitted(self, members: Sequence[Member], seen: Sequence[list[Any]]) -> Sequence[int]:
        return [m.policy.submit(shown) for m, shown in zip(members, seen, strict=True)]

    def _observe(self, members: Sequence[Member], rounds: Sequence[Round]) -> None:
        for member, outcome in zip(members, rounds, strict=True):
            shown = member.draft[: outcome.drafted]
            if not self.guarded:
                shown = [Guarded(token, self.reads) for token in shown]
            member.policy.observe(outcome, shown)


class TruncateToMinimum(PerRequest):
    """Every sequence keeps as many tokens as the worst of the batch had accepted.

    A sequence that ends within the round holds nobody back.
    """

    def keep(self, accepted: Sequence[int], ends: Sequence[bool]) -> list[int]:
        """Return the smallest acceptance of those that go on, for all."""
        going_on = [a for a, ended in zip(accepted, ends, strict=True) if not ended]
        shared = min(going_on, default=max(accepted))
        return [min(a, shared) for a in accepted]


class StopAtMean(PerRequest):
    """All sequences draft alike, until fewer than half of them wish to go on.

    A batch policy that stops on a mean over the batch needs no such style: run it `Jointly`.
    """

    def _willing(
        self, members: Sequence[Member], active: Sequence[M], seen: dict[int, list[Any]]
    ) -> list[M]:
        votes = sum(m.policy.keep_drafting(seen[id(m)]) for m in active)
        return list(active) if 2 * votes >= len(active) else []


class Jointly(Together):
    """A batch policy that decides for all sequences of an iteration together."""

    policy: BatchPolicy

    def __init__(
        self, policy: BatchPolicy, guarded: bool = False, longest: int | None = None
    ) -> None:
        super().__init__(policy, guarded, longest)
        self._began = False

    def _begin(self, members: Sequence[M], load: Callable[[M], Load]) -> Sequence[int | None]:
        before = self.policy.planned
        caps = self.policy.plan_each([m.name for m in members], [load(m) for m in members])
        self.changes += self._began and self.policy.planned != before
        self._began = True
        return caps

    def _willing(
        self, members: Sequence[Member], active: Sequence[M], seen: dict[int, list[Any]]
    ) -> list[M]:
        drafts = [seen[id(m)] for m in members]
        return list(active) if self.policy.keep_drafting(drafts) else []

    def _submitted(self, members: Sequence[Member], seen: Sequence[list[Any]]) -> Sequence[int]:
        return self.policy.allot(seen)

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

    Raises
    ------
    DraftsimError
        For an unknown name, or a batch policy with any but ``ragged``.
    ValueError
        If the policy needs a vocabulary size, and neither it nor the caller has one.
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
