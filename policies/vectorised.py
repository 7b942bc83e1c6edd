"""Vectorised policies: the form in which many settings of a policy are replayed together.

`policies.core.speculate` asks a policy before every token.  A study replays thousands of
settings over one recording and takes the answers from arrays.  If signals alone end a draft, its
length from every start of the recording is computed at once (`Stop`).  If a few numbers of state
decide, they are arrays with one entry a run (`VectorisedState`).  Such a policy returns a
`VectorisedPlan` from a method ::

    def vectorised(self, batch: int) -> VectorisedPlan | None

which is read from the class that defines it alone: a subclass may decide otherwise.  ``batch`` is
the number of sequences decoded together, always the same; None sends this setting through the
loop.  The rounds must be those of the loop, to the last bit of what is compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np

from policies.arrays import Bools, Floats, Ints, next_true

UNBOUNDED = int(np.iinfo(np.int32).max)
"""A draft length that nothing reaches."""


class Starts(Protocol):
    """Every place of a recording where a round may begin, with the draft that would follow.

    The drafted tokens of a start are consecutive rows of the recording, so that a signal is an
    array over rows and a draft a slice of it.
    """

    rows: Ints
    """Row of the first drafted token, shape (starts,)."""
    most: Ints
    """Tokens at which a draft ends whatever the policy says, or leaves what was recorded."""
    context: Ints
    """Tokens in the target's cache, as in `policies.core.Load`, shape (starts,)."""
    run_lengths: Ints
    """Drafts that would be accepted, as in `policies.core.Load`; -1 if unknown."""

    def signal(self, name: str) -> Floats:
        """Return a draft signal of every row, shape (rows,)."""

    def watched(self, watch: Watch) -> Floats:
        """Return its values, taken once however many settings ask."""


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
        """Return where it ends the draft from every start."""


class Watch(Protocol):
    """A number of every row, compared with a threshold that changes from round to round."""

    def __hash__(self) -> int: ...

    def values(self, starts: Starts) -> Floats:
        """Return the values, shape (rows,)."""


@dataclass
class VectorisedState(ABC):
    """The numbers that a policy remembers from round to round; `observe` updates them.

    A policy gives scalars (`of`); `stacked` makes arrays (runs,) of them, on which methods work
    elementwise.
    """

    blanks: ClassVar[Mapping[str, float]] = {}
    """Fields that are a list in one run, and an array (runs, longest list) of many; and what fills
    the shorter lists."""

    @abstractmethod
    def caps(self) -> Ints:
        """Return the longest draft of the round to come."""

    def sent(self) -> Ints | None:
        """Return how much of a draft is verified at most; None: all of it."""
        return None

    def thresholds(self) -> Floats:
        """Return the values of the plan's `watch` below which a draft ends."""
        raise NotImplementedError(f"{type(self).__name__} watches nothing")

    @abstractmethod
    def observe(self, drafted: Ints, accepted: Ints) -> None:
        """Learn from the tokens sent to verification and accepted, shape (runs,) each."""

    @classmethod
    def of(cls, policy: Any, **more: Any) -> Self:
        """Return the state of one run of `policy`: its attributes by the fields' names, and `more`.

        A field ``name`` is the policy's ``_name``, or else its parameter ``name``.
        """
        names = (field.name for field in fields(cls) if field.name not in more)
        own = {n: getattr(policy, f"_{n}" if hasattr(policy, f"_{n}") else n) for n in names}
        return cls(**own, **more)

    @classmethod
    def stacked(cls, states: Sequence[Self], count: int) -> Self:
        """Return `count` runs of each state, one after another."""

        def column(name: str) -> list[Any]:
            values = [getattr(state, name) for state in states]
            if name not in cls.blanks:
                return values
            most = max(map(len, values))
            return [[*own, *[cls.blanks[name]] * (most - len(own))] for own in values]

        return cls(*(np.repeat(np.array(column(f.name)), count, axis=0) for f in fields(cls)))

    def keep(self, which: Bools) -> None:
        """Drop the runs that are not among `which`, shape (runs,)."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[which])


class VectorisedPlan(NamedTuple):
    """A plan of draft lengths; every part that is given ends a draft."""

    cap: int = UNBOUNDED
    """Its length."""
    stop: Stop | None = None
    """Its signals."""
    state: VectorisedState | None = None
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
    """Return the result of a method that `policy`'s own class defines; else None."""
    own = vars(type(policy)).get(method)
    return None if own is None else own(policy, *args)


def plan_of(policy: Any, batch: int = 1) -> VectorisedPlan | None:
    """Return the plan of `policy` where its own class tells one; None sends it through the loop."""
    plan: VectorisedPlan | None = own_word(policy, "vectorised", batch)
    return plan


def grown(starts: Starts, keep: Callable[[int, Ints], Bools]) -> Ints:
    """Return draft lengths, asked token by token of all starts that still draft.

    ``keep(n, which)``: whether the starts with indices `which`, which drafted n, draft on.
    """
    lengths = np.zeros(len(starts.rows), dtype=np.int64)
    which, n = np.arange(len(lengths)), 0
    while len(which):
        which = which[keep(n, which) & (starts.most[which] > n)]
        n += 1
        lengths[which] = n
    return lengths


Read = Callable[[str], Floats]
"""A function from a signal's name to its values for some tokens, an array of any shape."""


def tells_many(estimator: Any) -> bool:
    """Return True if an estimator has ``chances(read, offset)`` (`policies.estimators`)."""
    return estimator is None or hasattr(estimator, "chances")


def reader(starts: Starts, rows: Ints) -> Read:
    # A draft that leaves what was recorded is told by its length, not by what it would read.
    return lambda name: starts.signal(name).take(rows, mode="clip")


def until_first(starts: Starts, failing: Bools, *, drops: bool = False) -> Lengths:
    """Return lengths if a draft ends with its first token of `failing`, shape (rows,).

    ``drops``: a failing token that ends a draft is not verified.
    """
    ahead = next_true(failing)[starts.rows] - starts.rows
    forwards = np.minimum(ahead + 1, starts.most)
    return Lengths(forwards, np.minimum(forwards, ahead) if drops else None)


@dataclass(frozen=True, eq=False)
class OwnStop:
    """Ends where a function says that no other setting shares."""

    lengths: Callable[[Starts], Lengths]


@dataclass(frozen=True)
class Below:
    """Ends with a token whose `signal` is below `threshold`."""

    signal: str
    threshold: float
    drops: bool = False

    def lengths(self, starts: Starts) -> Lengths:
        return until_first(starts, starts.signal(self.signal) < self.threshold, drops=self.drops)


@dataclass(frozen=True)
class EntropyAbove:
    """Ends with a token whose sqrt(scale H) is above `threshold`."""

    scale: float
    threshold: float

    def lengths(self, starts: Starts) -> Lengths:
        return until_first(starts, np.sqrt(self.scale * starts.signal("entropy")) > self.threshold)


@dataclass(frozen=True)
class Signal:
    """A signal as it is, to be watched."""

    name: Literal["prob", "top_prob", "raw_prob"]

    def values(self, starts: Starts) -> Floats:
        return starts.signal(self.name)


@dataclass(frozen=True)
class EntropyBound:
    """1 - sqrt(scale H), to be watched."""

    scale: float

    def values(self, starts: Starts) -> Floats:
        found: Floats = 1.0 - np.sqrt(self.scale * starts.signal("entropy"))
        return found
