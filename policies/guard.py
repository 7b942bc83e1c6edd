"""Drafted tokens that refuse the signals a policy did not declare.

Reading a signal has a price, which is charged by what a policy declares (`DraftPolicy.reads`).
So what was not declared cannot be read: neither of a recording nor of real models.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, TypeVar

from policies.errors import DraftsimError

T = TypeVar("T")

SIGNALS = ("token_id", "prob", "entropy", "logit_margin", "prob_margin")


class UndeclaredSignal(DraftsimError):
    """A policy or rule read a signal that it does not declare."""

    def __init__(self, signal: str, reader: str | None = None) -> None:
        # Both are kept as arguments: a simulated process raises an error anew from them.
        super().__init__(signal, reader)
        self.signal, self.reader = signal, reader

    def __str__(self) -> str:
        return (
            f"{self.reader or 'a policy'} reads the signal {self.signal!r} without declaring it: "
            "add it to `reads`"
        )

    def by(self, reader: object) -> UndeclaredSignal:
        """The same error, naming who read; one that already names somebody stays."""
        if self.reader is not None:
            return self
        # A wrapper's own name would tell nobody anything.
        while hasattr(inner := getattr(reader, "policy", None), "reads"):
            reader = inner
        return UndeclaredSignal(self.signal, type(reader).__name__)


class Guarded:
    """A drafted token of which only the signals in `reads` can be read."""

    __slots__ = ("_reads", "_token")

    def __init__(self, token: Any, reads: Collection[str]) -> None:
        self._token, self._reads = token, reads

    def __getattr__(self, name: str) -> Any:
        if name in SIGNALS and name not in self._reads:
            raise UndeclaredSignal(name)
        return getattr(self._token, name)


def guarded(kind: type[T], reads: Collection[str]) -> type[T]:
    """`kind`, a class of drafted tokens with slots, without the signals outside `reads`.

    What `reads` names is read as fast as of `kind` itself, so that a replay's inner loop pays
    nothing; a value given for another signal is dropped.
    """
    made: type[T] = _guarded(kind, frozenset(reads))  # type: ignore[arg-type]
    return made


@cache
def _guarded(kind: type[Any], reads: frozenset[str]) -> type[Any]:
    refused = {name: _refusal(name) for name in SIGNALS if name not in reads}
    return (
        type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **refused})
        if refused
        else kind
    )


def _refusal(name: str) -> property:
    def read(self: Any) -> Any:
        raise UndeclaredSignal(name)

    def drop(self: Any, value: Any) -> None:
        pass

    return property(read, drop)
