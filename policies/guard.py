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


class UndeclaredSignal(DraftsimError):
    """A policy or rule read a signal, or a rule a score, that it does not declare.

    ``declared_in`` names the attribute that lacks it: ``reads`` or ``needs``.
    """

    def __init__(self, signal: str, reader: str | None = None, declared_in: str = "reads") -> None:
        # All are kept as arguments: a simulated process raises an error again from them.
        super().__init__(signal, reader, declared_in)
        self.signal, self.reader, self.declared_in = signal, reader, declared_in

    def __str__(self) -> str:
        what = "signal" if self.declared_in == "reads" else "score"
        return (
            f"{self.reader or 'a policy'} reads the {what} {self.signal!r} without declaring it: "
            f"add it to `{self.declared_in}`"
        )

    def by(self, reader: object) -> UndeclaredSignal:
        """Return the same error, naming who read; one that already names a reader stays."""
        if self.reader is not None:
            return self
        return UndeclaredSignal(self.signal, type(unwrapped(reader)).__name__, self.declared_in)


class PolicyError(DraftsimError, ValueError):
    """A policy breaks the contract; ``how`` says which part and how."""

    def __init__(self, how: str, policy: str | None = None) -> None:
        super().__init__(how, policy)
        self.how, self.policy = how, policy

    def __str__(self) -> str:
        return self.how if self.policy is None else f"{self.policy} {self.how}"

    def by(self, policy: object) -> PolicyError:
        """Return the same error, naming the policy; one that already names a policy stays."""
        if self.policy is not None:
            return self
        return PolicyError(self.how, type(unwrapped(policy)).__name__)


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
    """A drafted token of which only the signals in `reads` can be read."""

    __slots__ = ("_reads", "_token")

    def __init__(self, token: Any, reads: Collection[str]) -> None:
        self._token, self._reads = token, reads

    def __getattr__(self, name: str) -> Any:
        if name in SIGNALS and name not in self._reads:
            raise UndeclaredSignal(name)
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
    every = SIGNALS if declared_in == "reads" else SCORES
    refused = {name: _refusal(name, declared_in) for name in every if name not in declared}
    return (
        type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **refused})
        if refused
        else kind
    )


def _refusal(name: str, declared_in: str) -> property:
    def read(self: Any) -> Any:
        raise UndeclaredSignal(name, declared_in=declared_in)

    def drop(self: Any, value: Any) -> None:
        pass

    return property(read, drop)
