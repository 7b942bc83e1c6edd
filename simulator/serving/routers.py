"""Routers: which replica of a fleet takes a request.

A router is an object with one method; those that do not look at the load let every replica run
by itself, on a clock of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from traces.errors import DraftsimError


class ReplicaLoad(NamedTuple):
    """A replica, as far as a router sees it: idle for routers that do not read its load."""

    requests: int = 0
    """Requests that wait or run on this replica."""
    tokens: int = 0
    """Tokens of these requests: their prompts, and what they have emitted."""


class Router(ABC):
    """A choice of a replica for each request.  Subclass it and define `choose`.

    A router has no state, so that one router serves any run.
    """

    reads_load: ClassVar[bool] = True
    """True if a choice depends on the replicas' load; else they are simulated one by one."""

    @abstractmethod
    def choose(self, index: int, replicas: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
        """Return the place in `replicas` of the replica that takes request number `index`."""


@dataclass(frozen=True)
class RandomSplit(Router):
    """A random replica, all equally likely."""

    reads_load: ClassVar[bool] = False

    def choose(self, index: int, replicas: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
        """Return a random replica."""
        del index
        return int(rng.integers(len(replicas)))


@dataclass(frozen=True)
class RoundRobin(Router):
    """The next replica in turn."""

    reads_load: ClassVar[bool] = False

    def choose(self, index: int, replicas: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
        """Return the next in turn."""
        del rng
        return index % len(replicas)


@dataclass(frozen=True)
class LeastRequests(Router):
    """The replica with the fewest waiting and running requests; ties are broken at random."""

    def choose(self, index: int, replicas: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
        """Return the replica with the fewest requests when this one arrives."""
        del index
        return _any_least([replica.requests for replica in replicas], rng)


@dataclass(frozen=True)
class LeastTokens(Router):
    """The replica whose requests hold the fewest tokens, waiting prompts included.

    Future tokens do not count, because the length of an output is not known.
    """

    def choose(self, index: int, replicas: Sequence[ReplicaLoad], rng: np.random.Generator) -> int:
        """Return the replica with the fewest tokens when this request arrives."""
        del index
        return _any_least([replica.tokens for replica in replicas], rng)


ROUTERS: Mapping[str, type[Router]] = {
    "random": RandomSplit, "round-robin": RoundRobin, "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
}  # fmt: skip
"""Routers by the names of the command line."""


def parse_router(name: str) -> Router:
    """Return the router of this name; DraftsimError if `ROUTERS` does not hold it."""
    if name not in ROUTERS:
        raise DraftsimError(f"router is {name!r}, expected one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def describe_router(router: Router) -> str:
    """Return the name of a router, or the class name of a user's own."""
    names = (name for name, kind in ROUTERS.items() if type(router) is kind)
    return next(names, type(router).__name__)


def _any_least(loads: list[int], rng: np.random.Generator) -> int:
    least = min(loads)
    if loads.count(least) == 1:
        return loads.index(least)
    return int(rng.choice([i for i, load in enumerate(loads) if load == least]))
