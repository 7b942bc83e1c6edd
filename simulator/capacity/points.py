"""One question to the simulation: a number of replicas, a rate and a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from policies.rules.base import VerifyRule
from simulator.serving.outcome.merge import t_interval
from simulator.serving.parts import Bench as ServeBench
from simulator.serving.routers import describe_router
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.station import Policy
from simulator.serving.sweep import over_rates
from simulator.targets import Targets
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

SAMPLED = 2
"""Replicas simulated of a fleet whose replicas know nothing of each other: all are alike."""
LONG = 10
"""Times that the slowest requests should fit into the time over which requests arrive."""


class Point(NamedTuple):
    """One replication of a number of replicas at a rate under a policy."""

    policy: str
    replicas: int
    rate: float
    requests: int | None
    """Requests of the whole fleet; None: those of the arrivals file."""
    replication: int = 0


@dataclass(frozen=True, eq=False)
class Bench:
    """Everything that a point needs; `base` holds the arrivals, the engine and the router."""

    trace: Trace
    latency: LatencyTable
    policies: Mapping[str, Policy]
    base: Scenario
    targets: Targets
    rule: VerifyRule | None = None

    def scenario(self, point: Point) -> Scenario:
        """Return what is served at `point`."""
        at = replace(
            self.base, replicas=point.replicas, requests=point.requests, replications=1,
            ttft_target_s=self.targets.ttft_s, tpot_target_s=self.targets.tpot_s,
        )  # fmt: skip
        return over_rates(at, [point.rate])[0]

    def run(self, point: Point) -> dict[str, Any]:
        """Return the results of `point`, in plain numbers."""
        scenario = self.scenario(point)
        only = range(min(point.replicas, SAMPLED)) if scenario.splits else None
        run = simulate(
            self.trace, self.latency, self.policies[point.policy], scenario, name=point.policy,
            rule=self.rule, replication=point.replication, only=only,
        )  # fmt: skip
        row, recorder = run.row(), run.recorder
        kept = run.columns(measured=True)
        within = run.within(kept)
        late = kept["index"] >= (recorder.skip + recorder.expected) / 2
        refused = len(within) / (len(within) + recorder.rejected) if len(within) else 0.0
        window = recorder.window
        return {
            **point._asdict(),
            "within": float(within.mean()) * refused if len(within) else 0.0,
            "within_late": float(within[late].mean()) * refused if late.any() else 0.0,
            "span_s": window.end_s - window.start_s,
            "throughput_tok_s": row["throughput_tok_s"] * point.replicas / run.replicas,
            **{name: row[name] for name in ("ttft_s", "tpot_s", "e2e_s")},
            **{
                name: row[name]
                for name in (
                    "overloaded", "utilisation", "mean_batch", "verify", "source", "rejected",
                    "fidelity", "extrapolated", "unpriced", "simulated_tokens",
                )
            },
        }  # fmt: skip

    @property
    def router(self) -> str:
        """The router's name."""
        return describe_router(self.base.router)

    def key(self) -> str | None:
        """Return a digest of everything that a point's result depends on."""
        scenario = replace(
            self.base, ttft_target_s=self.targets.ttft_s, tpot_target_s=self.targets.tpot_s
        )
        return ServeBench(self.trace, self.latency, self.policies, [scenario], self.rule).key()


@dataclass
class Verdict:
    """Replications of one point."""

    outcomes: Sequence[Mapping[str, Any]]
    targets: Targets
    _interval: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._interval = t_interval([o["within"] for o in self.outcomes])

    @property
    def within(self) -> float:
        """Share of requests within the targets, in the mean of the replications."""
        return self._interval[0]

    @property
    def low(self) -> float:
        """Lower end of its 95% interval; of one replication NaN."""
        return self._interval[1]

    @property
    def high(self) -> float:
        """Upper end of it."""
        return self._interval[2]

    @property
    def kept(self) -> bool:
        """Return True if enough of them are, and the replicas keep up with the load."""
        overloaded = sum(o["overloaded"] for o in self.outcomes)
        return self.within >= self.targets.share and 2 * overloaded < len(self.outcomes)

    @property
    def too_short(self) -> str:
        """Return why the horizon is too short to judge; empty if it is not."""
        slowest, span = self.mean("e2e_s", "p95"), self.mean("span_s")
        if not span >= LONG * slowest:
            return (
                f"requests arrive over {span:.3g} s, and the slowest twentieth take {slowest:.3g} s"
            )
        late = t_interval([o["within_late"] for o in self.outcomes])
        bound = late[2] if math.isfinite(late[2]) else late[0]
        if self.kept and bound < self.targets.share:
            return f"of the later half {late[0]:.1%} keep the targets: the queue still grows"
        return ""

    def mean(self, name: str, quantile: str | None = None) -> float:
        """Return a number of the outcomes in the mean."""
        found = [o[name] if quantile is None else o[name][quantile] for o in self.outcomes]
        return float(np.mean([math.nan if v is None else v for v in found]))
