"""Which replica of a fleet takes a request.

A router is an object with one method; those that do not look at the load let every replica run
by itself, on a clock of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from traces.errors import DraftsimError


class Loaded(Protocol):
    """A replica, as far as a router sees it."""

    @property
    def requests(self) -> int:
        """Requests that wait or run there."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of these: of their prompts, and emitted so far."""
        ...


class Idle(NamedTuple):
    """A replica that shows no load: what a router sees that does not look at it."""

    requests: int = 0
    tokens: int = 0


class Router(ABC):
    """Chooses a replica for each request.  Subclass it and define `choose`.

    It keeps nothing from one request to the next, so that one router serves any run.
    """

    reads_load: ClassVar[bool] = True
    """True if a choice depends on the replicas.  Where not, they are simulated one by one."""

    @abstractmethod
    def choose(self, index: int, replicas: Sequence[Loaded], rng: np.random.Generator) -> int:
        """Return the replica (place in `replicas`) for the request that arrives as number
        `index`.
        """


@dataclass(frozen=True)
class RandomSplit(Router):
    """Any replica, each as likely."""

    reads_load: ClassVar[bool] = False

    def choose(self, index: int, replicas: Sequence[Loaded], rng: np.random.Generator) -> int:
        """Return a draw."""
        del index
        return int(rng.integers(len(replicas)))


@dataclass(frozen=True)
class RoundRobin(Router):
    """One after the other, in turn."""

    reads_load: ClassVar[bool] = False

    def choose(self, index: int, replicas: Sequence[Loaded], rng: np.random.Generator) -> int:
        """Return the next in turn."""
        del rng
        return index % len(replicas)


@dataclass(frozen=True)
class LeastRequests(Router):
    """The replica with the fewest requests that wait or run; of several such, any."""

    def choose(self, index: int, replicas: Sequence[Loaded], rng: np.random.Generator) -> int:
        """Return the shortest queue, as it is when the request arrives."""
        del index
        return _any_least([replica.requests for replica in replicas], rng)


@dataclass(frozen=True)
class LeastTokens(Router):
    """The replica whose requests hold the fewest tokens, prompts that wait included.

    Tokens yet to come do not count: nobody knows how long an output will be.
    """

    def choose(self, index: int, replicas: Sequence[Loaded], rng: np.random.Generator) -> int:
        """Return the fewest tokens, as they are when the request arrives."""
        del index
        return _any_least([replica.tokens for replica in replicas], rng)


ROUTERS: Mapping[str, type[Router]] = {
    "random": RandomSplit, "round-robin": RoundRobin, "least-requests": LeastRequests,
    "least-tokens": LeastTokens,
}  # fmt: skip
"""Routers by the names of the command line."""


def parse_router(name: str) -> Router:
    """Return the router of this name; raises DraftsimError for another one than `ROUTERS` holds."""
    if name not in ROUTERS:
        raise DraftsimError(f"router is {name!r}, expected one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def describe_router(router: Router) -> str:
    """Return the name of a router, or of the class of one's own."""
    names = (name for name, kind in ROUTERS.items() if type(router) is kind)
    return next(names, type(router).__name__)


def _any_least(loads: list[int], rng: np.random.Generator) -> int:
    least = min(loads)
    if loads.count(least) == 1:
        return loads.index(least)
    return int(rng.choice([i for i, load in enumerate(loads) if load == least]))
