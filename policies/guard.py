"""Drafted tokens and target scores that refuse what a policy or rule did not declare.

Reading a signal has a price, which is charged by what a policy declares (`DraftPolicy.reads`),
and a recording is checked for what is declared.  So what was not declared cannot be read:
neither of a recording nor of real models.  A policy's answer that is no length of
its draft is refused, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from policies.errors import DraftsimError
from policies.wrapper import unwrapped

T = TypeVar("T")

SIGNALS = (
    "token_id", "prob", "entropy", "logit_margin", "prob_margin", "top_prob", "raw_prob",
    "top10_prob",
)  # fmt: skip
"""Names that a policy or rule may declare in its ``reads``: see `policies.core.DraftToken`."""

SCORES = (
    "match", "token", "top1", "top2", "logsumexp", "entropy", "draft_logit", "draft_rank",
)  # fmt: skip
"""Names that a rule may declare in its ``needs``: see `policies.rules.base.TargetScore`."""


def names_of(declared_in: str) -> tuple[str, ...]:
    """Return the names that the attribute ``reads`` or ``needs`` may hold."""
    return SIGNALS if declared_in == "reads" else SCORES


class PolicyError(DraftsimError, ValueError):
    """A policy or rule breaks its contract; ``how`` says which part and how, ``who`` which one."""

    def __init__(self, how: str, who: str | None = None) -> None:
        # Both are kept as arguments: a simulated process raises an error again from them.
        super().__init__(how, who)
        self.how, self.who = how, who

    def __str__(self) -> str:
        return self.how if self.who is None else f"{self.who} {self.how}"

    def by(self, who: object) -> PolicyError:
        """Return the same error, naming the policy or rule; one that already names one stays."""
        if self.who is not None:
            return self
        return PolicyError(self.how, type(unwrapped(who)).__name__)


def undeclared(name: str, declared_in: str) -> PolicyError:
    """Return the error of reading `name`; ``declared_in`` is the attribute that lacks it."""
    what = "signal" if declared_in == "reads" else "score"
    return PolicyError(f"reads the {what} {name!r} without declaring it: add it to `{declared_in}`")


def length_from(method: str, answer: Any, longest: int | None) -> int:
    """Return the `answer` of a policy's `method`, a number of tokens up to `longest`.

    Raises PolicyError for anything else.
    """
    # bool is an int, but as a count it is a comparison that slipped through.
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer):
        raise PolicyError(f"{method} returned {answer!r}, expected an int")
    if answer < 0 or (longest is not None and answer > longest):
        most = "or more" if longest is None else f"to {longest}"
        raise PolicyError(f"{method} returned {answer}, expected 0 {most}")
    return int(answer)


def lengths_from(method: str, answers: Sequence[Any], longest: Sequence[int | None]) -> list[int]:
    """Return the `answers` of a policy's `method`, one per sequence, each as in `length_from`."""
    if len(answers) != len(longest):
        raise PolicyError(f"{method} returned {len(answers)} lengths, expected {len(longest)}")
    return [length_from(method, one, most) for one, most in zip(answers, longest, strict=True)]


class Guarded:
    """A drafted token of which only the signals in `declared` can be read.

    With ``declared_in="needs"`` it is a target score.
    """

    __slots__ = ("_declared", "_declared_in", "_token")

    def __init__(self, token: Any, declared: Collection[str], declared_in: str = "reads") -> None:
        self._token, self._declared, self._declared_in = token, declared, declared_in

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__:  # of a copy that has none yet
            raise AttributeError(name)
        if name not in self._declared and name in names_of(self._declared_in):
            raise undeclared(name, self._declared_in)
        return getattr(self._token, name)


def guarded(kind: type[T], declared: Collection[str], declared_in: str = "reads") -> type[T]:
    """Return `kind`, a class with slots, without the signals that are not `declared`.

    With ``declared_in="needs"`` it is a class of target scores.  What is declared is read as fast
    as in `kind` itself, so a replay's inner loop is not slowed down; a value given for anything
    else is dropped.
    """
    made: type[T] = _guarded(kind, frozenset(declared), declared_in)  # type: ignore[arg-type]
    return made


@cache
def _guarded(kind: type[Any], declared: frozenset[str], declared_in: str) -> type[Any]:
    names = (name for name in names_of(declared_in) if name not in declared)
    refused = {name: _refusal(name, declared_in) for name in names}
    return (
        type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **refused})
        if refused
        else kind
    )


def _refusal(name: str, declared_in: str) -> property:
    def read(self: Any) -> Any:
        raise undeclared(name, declared_in)

    def drop(self: Any, value: Any) -> None:
        pass

    return property(read, drop)
