"""The requests to be served, and the kind of engine that serves them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from simulator.serving.arrivals import ArrivalFile, Arrivals
from simulator.serving.routers import RoundRobin, Router, describe_router
from simulator.serving.scheduler import Limits
from simulator.targets import Targets
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

Mode = Literal["continuous", "static", "static-minimum", "static-mean", "pearl", "dsi"]
MODES: tuple[Mode, ...] = ("continuous", "static", "static-minimum", "static-mean", "pearl", "dsi")
ONE_STREAM = ("pearl", "dsi")
"""Modes that draft while the target verifies, one request at a time."""
MOST = {"requests": 1_000_000_000, "replications": 10_000, "replicas": 65_536}
"""Beyond these a run would not fit into any machine."""
ONE_CLOCK = 4096
"""Most replicas that share a clock: every request and every step goes through all of them."""

FILLS = 10
"""Requests of a closed loop for each client, at least, unless a number is given.  The
first two for each fill the engine and do not count."""


def parse_mode(text: str) -> tuple[Mode, float]:
    """Return a mode, and the interference of one that overlaps.

    Raises DraftsimError if the text is neither a mode nor ``MODE:interference=F``.

    >>> parse_mode("pearl:interference=0.5")
    ('pearl', 0.5)
    """
    name, colon, setting = text.partition(":")
    mode = next((mode for mode in MODES if mode == name), None)
    if mode is None:
        raise DraftsimError(f"mode is {name!r}, expected one of {', '.join(MODES)}")
    key, _, value = setting.partition("=")
    try:
        if colon and key != "interference":
            raise ValueError
        return mode, float(value) if colon else 0.0
    except ValueError:
        raise DraftsimError(f"--mode {text}: expected {mode}:interference=NUMBER") from None


def engine_limits(
    latency: LatencyTable, mode: str = "continuous", arrive: bool = True, *,
    max_batch: int | None = None, token_budget: int | None = None, kv_blocks: int | None = None,
    async_scheduling: bool = False,
) -> Limits:  # fmt: skip
    """Return the limits of an engine, by default those of the engine measured.

    ``arrive``: requests arrive by the clock; False: a fixed number always runs.

    Raises DraftsimError if a limit is given that has no effect there, or is impossible.
    """
    given = {"max_batch": max_batch, "token_budget": token_budget, "kv_blocks": kv_blocks}
    bounds = {"max_batch": arrive, "token_budget": mode == "continuous", "kv_blocks": True}
    unused = [
        f"--{name.replace('_', '-')}" for name, value in given.items()
        if value is not None and (mode in ONE_STREAM or not bounds[name])
    ]  # fmt: skip
    if unused:
        loads = "requests that arrive" if arrive else "a number of requests that always run"
        raise DraftsimError(f"mode {mode}, {loads}: without effect, leave out {', '.join(unused)}")
    return Limits.of_engine(latency, max_batch, token_budget, kv_blocks, async_scheduling)


@dataclass(frozen=True)
class Scenario:
    """The requests that arrive, and the engine or engines that serve them.

    Parameters
    ----------
    arrivals:
        When requests arrive.
    limits:
        An engine's configuration; `Limits.max_batch` is the size of static batches.
    requests:
        Number of requests to serve (an arrivals file may hold fewer); None: the whole file.
    mode:
        ``continuous`` batching; ``static`` batches with ragged acceptance, truncated to
        the batch ``-minimum``, or drafting that stops at the batch ``-mean``; ``pearl``
        and ``dsi`` overlap drafting and verification of one stream.
    replicas, router:
        Number of engines, and the router that chooses among them.
    interference:
        Slowdown in the overlapped modes.  0: drafter and target have devices of their own.  f > 0:
        they share one, and each runs (1 + f) times slower while the other is busy too.
    passes:
        See `simulator.serving.cost.EngineCost`.
    drafter_loaded:
        True if the engine runs with its drafter under a policy that never drafts, too: its steps
        then include what the drafter runs along.  By default such a policy has an engine without
        one.
    warmup:
        Share of the requests, the first to arrive, that statistics leave out (`RunRecorder`).  In a
        closed loop they leave out at least two requests for each client, because the first of all
        clients begin at once, but at most half of all for that.  0 leaves out none.
    max_time_s:
        Simulated seconds after which a run stops; its status says so.
    targets:
        Bounds that a request must meet to count for goodput.
    seed, replications:
        Arrivals and sequences depend on these alone, never on a policy.

    Raises
    ------
    DraftsimError
        For impossible values.
    """

    arrivals: Arrivals
    limits: Limits = field(default_factory=Limits)
    requests: int | None = 1000
    mode: Mode = "continuous"
    interference: float = 0.0
    passes: Literal["ragged", "padded"] = "ragged"
    drafter_loaded: bool = False
    warmup: float = 0.1
    max_time_s: float | None = None
    targets: Targets = field(default_factory=Targets)
    seed: int = 0
    replications: int = 1
    replicas: int = 1
    router: Router = field(default_factory=RoundRobin)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise DraftsimError(f"mode is {self.mode!r}, expected one of {', '.join(MODES)}")
        if self.limits.async_scheduling and self.mode != "continuous":
            raise DraftsimError(
                f"--mode {self.mode} plans no iteration ahead: drop --async-scheduling, or use "
                "--mode continuous"
            )
        if not 0 <= self.interference < math.inf:
            raise DraftsimError(f"interference is {self.interference}, expected >= 0")
        if self.interference and not self.one_stream:
            raise DraftsimError(f"interference is of --mode pearl and dsi, not of {self.mode}")
        if not 0 <= self.warmup < 1:
            raise DraftsimError(f"warmup is {self.warmup}, expected a share in [0, 1)")
        for name in ("requests", "max_time_s", "replications", "replicas"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DraftsimError(f"{name} is {value}, expected a positive number")
            if value is not None and value > MOST.get(name, math.inf):
                raise DraftsimError(f"{name} is {value}, expected at most {MOST[name]}")
        if self.seed < 0:
            raise DraftsimError(f"seed is {self.seed}, expected a whole number >= 0")

    def check_clock(self) -> None:
        """Raise DraftsimError if more than `ONE_CLOCK` replicas share a clock."""
        if self.replicas > ONE_CLOCK and not self.splits:
            why = (
                f"the router {describe_router(self.router)} compares them at every request"
                if self.router.reads_load else "the requests of a closed loop share one clock"
            )  # fmt: skip
            raise DraftsimError(
                f"replicas is {self.replicas}, and {why}: expected at most {ONE_CLOCK}; more need "
                "arrivals at a rate, and the router round-robin or random"
            )

    @property
    def one_stream(self) -> bool:
        """True if an engine serves one request at a time."""
        return self.mode in ONE_STREAM

    @property
    def largest_batch(self) -> int:
        """The largest number of sequences in a pass of the target."""
        return 1 if self.one_stream else self.limits.max_batch

    @property
    def count(self) -> int:
        """Requests that arrive in a run; 0 where only the arrivals decide."""
        if not isinstance(self.arrivals, ArrivalFile):
            return self.requests or 0
        there = len(self.arrivals.read.output)
        return min(self.requests or there, there)

    @property
    def rate(self) -> float | None:
        """Mean requests per second that arrive in a run; None in a closed loop."""
        return self.arrivals.rate_of(self.requests)

    @property
    def router_name(self) -> str | None:
        """The router's name; None if there is nothing to choose."""
        return describe_router(self.router) if self.replicas > 1 else None

    @property
    def splits(self) -> bool:
        """Return True if every request's replica is known before anything runs.

        Then replicas know nothing of each other, and each is simulated by itself.
        """
        return (
            self.replicas > 1 and not self.router.reads_load and self.arrivals.concurrency is None
        )
