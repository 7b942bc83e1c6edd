"""A policy in the form in which many of its kind are replayed together.

`policies.core.speculate` asks a policy before every token.  A study replays thousands of
settings over one recording, and there the answers can be had together: where signals alone
end a draft, its length from every start of the recording is known at once (`Stop`); where a
few numbers of state decide, these numbers are arrays, one entry a run (`LaneState`).  A policy
that can be told so returns a `LanePlan` from a method of its own ::

    def laned(self, batch: int) -> LanePlan | None

which is read of the very class that defines it: a subclass may decide otherwise.  ``batch`` is
the number of sequences decoded together, always the same; None sends this setting through the
loop.  The rounds must be those of the loop, to the last bit of what is compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

UNBOUNDED = int(np.iinfo(np.int32).max)
"""A draft length that nothing reaches."""


class Starts(Protocol):
    """Every place of a recording where a round may begin, with the draft that would follow.

    The drafted tokens of a start are consecutive rows of the recording, so that a signal is an
    array over rows and a draft a slice of it.
    """

    @property
    def rows(self) -> Ints:
        """Row of the first drafted token, shape (starts,)."""
        ...

    @property
    def most(self) -> Ints:
        """Tokens at which a draft ends whatever the policy says, or leaves what was recorded."""
        ...

    @property
    def context(self) -> Ints:
        """Tokens in the target's cache, as of `policies.core.Load`, shape (starts,)."""
        ...

    @property
    def run_lengths(self) -> Ints:
        """Drafts that would be accepted, as of `policies.core.Load`; -1 where nobody knows."""
        ...

    def signal(self, name: str) -> Floats:
        """A draft signal of every row, shape (rows,)."""
        ...

    def watched(self, watch: Watch) -> Floats:
        """Its values, taken once however many settings ask."""
        ...


class Lengths(NamedTuple):
    """Drafts from every start, shape (starts,) each."""

    forwards: Ints
    """Tokens drafted."""
    sent: Ints | None = None
    """Drafted tokens that go to verification; None: all."""


class Stop(Protocol):
    """A rule that ends a draft by its signals alone; equal rules are asked once."""

    def __hash__(self) -> int: ...

    def lengths(self, starts: Starts) -> Lengths:
        """Where it ends the draft from every start."""
        ...


class Watch(Protocol):
    """A number of every row that is held against a threshold which changes from round to round."""

    def __hash__(self) -> int: ...

    def values(self, starts: Starts) -> Floats:
        """Shape (rows,)."""
        ...


@dataclass
class LaneState(ABC):
    """The numbers that a policy remembers from round to round; `observe` updates them.

    A policy gives them as scalars; `stacked` makes arrays of shape (lanes,) of many policies',
    on which the methods work elementwise.
    """

    @abstractmethod
    def caps(self) -> Ints:
        """Longest draft of the round to come."""

    def sent(self) -> Ints | None:
        """How much of a draft is verified at most; None: all of it."""
        return None

    def thresholds(self) -> Floats:
        """Return the values of the plan's `watch` below which a draft ends."""
        raise NotImplementedError(f"{type(self).__name__} watches nothing")

    @abstractmethod
    def observe(self, drafted: Ints, accepted: Ints) -> None:
        """Take in the tokens sent to verification and accepted, shape (lanes,) each."""

    @classmethod
    def stacked(cls, states: Sequence[Self], count: int) -> Self:
        """`count` lanes of each state, one after another."""
        even = cls.evened(states)
        columns = ([getattr(s, f.name) for s in even] for f in fields(cls))
        return cls(*(np.repeat(np.array(column), count, axis=0) for column in columns))

    @classmethod
    def evened(cls, states: Sequence[Any]) -> Sequence[Any]:
        """The states, all of whose fields are of one shape."""
        return states

    def keep(self, which: Bools) -> None:
        """Drop the lanes that are not among `which`, shape (lanes,)."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[which])


class LanePlan(NamedTuple):
    """How long a policy drafts; every part that is given ends a draft."""

    cap: int = UNBOUNDED
    """Its length."""
    stop: Stop | None = None
    """Its signals."""
    state: LaneState | None = None
    """The rounds observed before."""
    watch: Watch | None = None
    """The first token that falls below the state's threshold, which is drafted."""
    drops: bool = False
    """True if that token is not verified."""

    @property
    def is_length(self) -> bool:
        """True if nothing but the cap ends a draft."""
        return self.stop is None and self.state is None


def own_word(policy: Any, method: str, *args: Any) -> Any:
    """Return the result of a method that `policy`'s own class defines; else None.

    An inherited method would not know what a subclass changes.
    """
    own = vars(type(policy)).get(method)
    return None if own is None else own(policy, *args)


def plan_of(policy: Any, batch: int = 1) -> LanePlan | None:
    """The plan of `policy` where its own class tells one; None sends it through the loop."""
    plan: LanePlan | None = own_word(policy, "laned", batch)
    return plan


def grown(starts: Starts, keep: Callable[[int, Ints], Bools]) -> Ints:
    """Draft lengths, asked token by token of all starts that still draft.

    ``keep(n, which)`` says, as `policies.core.DraftPolicy.keep_drafting`, whether to draft on
    after n tokens, for the starts with the indices `which`: all that have drafted n, whether
    or not they may draft more.
    """
    lengths = np.zeros(len(starts.rows), dtype=np.int64)
    which, n = np.arange(len(lengths)), 0
    while len(which):
        which = which[keep(n, which) & (starts.most[which] > n)]
        n += 1
        lengths[which] = n
    return lengths
