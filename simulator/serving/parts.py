"""The parts of a serving study, cut so that processes or machines can share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from policies.from_file import identity
from policies.rules.base import VerifyRule
from simulator.serving.outcome.report import Run
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.station import Policy
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

MANY = 20_000
"""Requests from which on replicas that know nothing of each other are run apart."""
A_PART = 100_000
"""Requests of a part, about: every part goes through the arrivals of all."""


class Part(NamedTuple):
    """One replication of one scenario under one policy, or some replicas of it."""

    scenario: int
    policy: str
    replication: int = 0
    only: tuple[int, ...] | None = None
    """Replicas; None: the whole fleet."""
    drawn: bool = False
    """True if the timeline is of this one."""


@dataclass(frozen=True, eq=False)
class Bench:
    """Everything that the parts of a study of serving need."""

    trace: Trace
    latency: LatencyTable
    policies: Mapping[str, Policy]
    scenarios: Sequence[Scenario]
    rule: VerifyRule | None = None
    advance: Callable[[int], None] | None = None
    """Called with the number of requests that have just left; cannot follow to another process."""
    timeline: Timeline | None = None

    def run(self, part: Part) -> Run:
        """Return what `simulator.serving.run.simulate` returns, and raise what it raises."""
        return simulate(
            self.trace, self.latency, self.policies[part.policy], self.scenarios[part.scenario],
            name=part.policy, rule=self.rule, replication=part.replication, only=part.only,
            timeline=self.timeline if part.drawn else None, advance=self.advance or _ignored,
        )  # fmt: skip

    def parts(self, scenario: int, policy: str, drawn: bool = False) -> list[Part]:
        """Return the parts of every replication of a scenario under a policy, in order.

        They depend on the scenario alone, never on who runs them.
        """
        chosen = self.scenarios[scenario]
        shares = shares_of(chosen)
        return [
            Part(scenario, policy, replication, only, drawn and replication == 0)
            for replication in range(chosen.replications) for only in shares
        ]  # fmt: skip

    def key(self) -> str | None:
        """A digest of everything that the results depend on; None if that cannot be taken."""
        import joblib

        content: list[Any] = [
            dict(self.trace.columns), [asdict(r) for r in self.trace.requests],
            dict(self.trace.meta), self.trace.max_gamma, self.latency.cells.to_dict("list"),
            dict(self.latency.meta), identity(self.policies), self.rule,
            # A file of arrivals holds its rows once anybody asked for the rate.
            [(s.arrivals.rate, s) for s in self.scenarios],
        ]  # fmt: skip
        try:
            return str(joblib.hash(content))
        except Exception:  # a policy of one's own may hold anything
            return None


def shares_of(scenario: Scenario) -> list[tuple[int, ...] | None]:
    """Replicas to run together; [None] where the fleet stays whole."""
    requests = scenario.requests or 0
    if (rows := getattr(scenario.arrivals, "rows", None)) is not None:
        requests = min(requests or len(rows[0]), len(rows[0]))
    if not scenario.splits or requests < MANY:
        return [None]
    count = min(max(math.ceil(requests / A_PART), 4), scenario.replicas)
    ends = [i * scenario.replicas // count for i in range(count + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(ends)]


def _ignored(count: int) -> None:
    del count
