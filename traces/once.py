"""Results that are kept as long as what they were made from."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")


def once_per(make: Callable[Concatenate[K, P], T]) -> Callable[Concatenate[K, P], T]:
    """Return `make` with its results kept as long as its first argument, which they must not hold.

    That argument never changes, as a trace or a latency table; the others are positional and
    hashable.
    """
    made: WeakKeyDictionary[K, dict[Any, T]] = WeakKeyDictionary()

    @wraps(make, updated=())
    def kept(of: K, /, *more: P.args, **named: P.kwargs) -> T:
        known = made.get(of)
        if known is None:
            known = made[of] = {}
        if more not in known:
            known[more] = make(of, *more, **named)
        return known[more]

    return kept
