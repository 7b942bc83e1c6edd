"""The fastest policy of each load that was served, and the interval of its ratio over prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from policies.lengths.basic import Autoregressive
from policies.registry import is_bound
from policies.rules.base import VerifyRule
from simulator.chosen import PLAIN
from simulator.forks import results_of
from simulator.serving import Scenario, serve
from simulator.serving.station import Policy
from simulator.tune.gains import DRAWS, half_width, resampled
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

Row = Mapping[str, Any]
Span = tuple[float, float]

FEWEST, PER_PLACE = 200, 4
"""Fewest requests of a load served again on resampled prompts, and fewest for each place."""


class Leader(NamedTuple):
    """The fastest policy that drafts at one load."""

    load: float | None
    """Requests at a time, or requests per second; None for arrivals that span no time."""
    place: int
    """Number of the load's first row."""
    policy: str | None
    """None if nothing drafts."""
    ratio: float
    """Speed over no speculation."""


def leaders(rows: Sequence[Row]) -> list[Leader]:
    """Return the fastest policy of each load.

    In closed loops by output tokens/s, with open arrivals by mean end-to-end latency.
    """
    closed = is_closed(rows)
    found = []
    for load in dict.fromkeys(_load(row) for row in rows):
        at = [i for i, row in enumerate(rows) if _load(row) == load]
        drafting = [
            (_ratio(row, closed), row["policy"]) for row in map(rows.__getitem__, at)
            if row["policy"] != PLAIN and not is_bound(row["policy"])
        ]  # fmt: skip
        ratio, policy = max(drafting, key=lambda pair: pair[0], default=(0.0, None))
        found.append(Leader(load, at[0], policy, ratio))
    return found


def is_closed(rows: Sequence[Row]) -> bool:
    """Return True if every row is of a closed loop."""
    return all(row["concurrency"] is not None for row in rows)


def _load(row: Row) -> float | None:
    load = row["rate"] if row["concurrency"] is None else row["concurrency"]
    return None if load is None else float(load)


def _ratio(row: Row, closed: bool) -> float:
    """Return how many times as fast as no speculation; 0 where that is not known."""
    value = row["speedup"] if closed else 1 / (row.get("latency_ratio") or math.inf)
    return float(value) if math.isfinite(value) else 0.0


def interval_over_prompts(
    leader: Leader, trace: Trace, latency: LatencyTable, policies: Mapping[str, Policy],
    scenarios: Sequence[Scenario], rule: VerifyRule | None,
) -> Span | None:  # fmt: skip
    """Return the 95% interval of a leader's ratio, None for fewer than two prompts.

    The leader and no speculation are served again on bootstrap resamples of the prompts, and the
    spread of their ratios is the standard error (`simulator.tune.gains`).

    Parameters
    ----------
    policies, scenarios:
        Those of the rows: a scenario has a row for each policy, in order.
    """
    if leader.policy is None or len(trace.requests) < 2:
        return None
    load = scenarios[leader.place // len(policies)]
    closed = load.arrivals.concurrency is not None
    enough = max(FEWEST, len(trace.requests), PER_PLACE * (load.arrivals.concurrency or 0))
    load = replace(load, requests=min(load.requests or enough, enough), replications=1)
    both = {"": policies[leader.policy], PLAIN: Autoregressive()}
    halves = np.zeros(len(trace.requests), dtype=bool)
    drawn = resampled(trace, halves, False, DRAWS, load.seed).traces

    def ratio(prompts: Trace) -> float:
        own, plain = serve(prompts, latency, both, load, rule=rule).rows()
        if closed:
            return float(own["throughput_tok_s"] / plain["throughput_tok_s"])
        return float(plain["e2e_s"]["mean"] / own["e2e_s"]["mean"])

    ratios = np.array(results_of(
        [partial(ratio, one) for one in drawn], 2 * sum(one.tokens for one in drawn)
    ))  # fmt: skip
    if not np.isfinite(ratios).all():
        return None
    # About what was served, scaled from the mean of the resamples.
    reach = half_width(ratios) * leader.ratio / ratios.mean()
    return leader.ratio - reach, leader.ratio + reach
