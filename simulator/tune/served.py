"""Settings served in simulated time: a full engine at each batch, and tables mended by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Bools, Floats, Ints
from policies.batch.base import Policy
from policies.lengths.basic import Autoregressive, Fixed
from policies.registry import NO_SPECULATION
from simulator.serving.arrivals import ClosedLoop
from simulator.serving.outcome.report import Run, t_interval
from simulator.serving.run import simulate
from simulator.serving.scenario import FILLS, Scenario
from simulator.serving.scheduler import Limits
from simulator.targets import Targets
from simulator.tune.costs import longest_draft
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable

REPLICATIONS = 5
"""Independent runs of every policy at a load, on the same requests, if not said otherwise."""


def rivals(longest: int | None) -> dict[str, Policy]:
    """Return settings that people choose by hand, of at most `longest` tokens; None: any length."""
    lengths = [k for k in (1, 3, 5) if longest is None or k <= longest]
    return {NO_SPECULATION: Autoregressive(), **{f"K={k}": Fixed(k) for k in lengths}}


SEARCH_CONFIDENCE = 0.5
"""Confidence of the intervals by which a search calls a setting beaten.  It is lower than the 95%
of ``--check``, which serves what was found with other random numbers."""


class Outcome(NamedTuple):
    """The result of serving one policy at one load; arrays of shape (replications,)."""

    counted: Floats
    """Tokens per second of the requests that met the targets."""
    total: Floats
    """Tokens per second of all requests."""
    within: Floats
    """Share of the requests that met the targets."""

    def meets(self, slo: Targets | None) -> bool:
        """Return True if enough requests met the targets, or there are none."""
        return slo is None or float(self.within.mean()) >= slo.share

    def rates(self, slo: Targets | None) -> Floats:
        """Return tokens per second of the requests that met `slo`, or of all if it is None."""
        return self.total if slo is None else self.counted

    def mean(self, slo: Targets | None) -> tuple[float, float]:
        """Return the means of `rates` and of ``within``."""
        return float(self.rates(slo).mean()), float(self.within.mean())

    def search_rates(self, slo: Targets | None) -> Floats:
        """Return `rates`, and zeros for a setting that misses the targets."""
        return self.rates(slo) if self.meets(slo) else np.zeros_like(self.counted)


def within_reach(
    slo: Targets | None, outcomes: Sequence[Sequence[Outcome]]
) -> list[Targets | None]:
    """Return the targets that count at each load: none where no outcome meets `slo`."""
    return [slo if any(o.meets(slo) for o in own) else None for own in outcomes]


def searched_rates(
    outcomes: Sequence[Sequence[Outcome]], targets: Sequence[Targets | None]
) -> list[Floats]:
    """Return `Outcome.search_rates` at each load, of shape (outcomes, replications)."""
    pairs = zip(outcomes, targets, strict=True)
    return [np.array([o.search_rates(counted) for o in own]) for own, counted in pairs]


def closed_load(
    trace: Trace, batch: int, slo: Targets | None = None, seed: int = 0,
    latency: LatencyTable | None = None,
) -> Scenario:  # fmt: skip
    """Return the load of a full engine: `batch` requests at a time, each followed by the next.

    The engine has the other limits of the one that `latency` was measured in.
    """
    limits = Limits(batch) if latency is None else Limits.of_engine(latency, batch)
    return Scenario(
        ClosedLoop(batch), limits, seed=seed,
        requests=max(len(trace.requests), FILLS * batch), targets=slo or Targets(),
    )  # fmt: skip


def check_seed(seed: int) -> int:
    """Return the seed of a check of what was searched under `seed`, with other requests."""
    return int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0])


def served_rates(
    trace: Trace, latency: LatencyTable, policies: Sequence[Policy], scenario: Scenario,
    replications: int = REPLICATIONS,
) -> Floats:  # fmt: skip
    """Return tokens per second that count towards the targets, shape (policies, replications).

    All policies meet the same requests at the same times.
    """
    runs = [(trace, policy, scenario) for policy in policies]
    return np.array([served().counted for served in served_each(latency, runs, replications)])


def served_each(
    latency: LatencyTable,
    runs: Sequence[tuple[Trace, Policy, Scenario]],
    replications: int = REPLICATIONS,
) -> list[Callable[[], Outcome]]:
    """Return the `Outcome` of each policy at its own load, as parts of `results_of`."""

    def outcome(trace: Trace, policy: Policy, load: Scenario) -> Outcome:
        done = [simulate(trace, latency, policy, load, replication=i) for i in range(replications)]
        columns = [(counted_rate(run), run.throughput, share_within(run)) for run in done]
        return Outcome(*np.array(columns, dtype=float).T)

    return [partial(outcome, *run) for run in runs]


def counted_rate(run: Run) -> float:
    """Return tokens per second of the requests that met the scenario's targets."""
    return run.throughput * run.tokens_within_targets


def share_within(run: Run) -> float:
    """Return the share of the requests that met the scenario's targets; 1 if none was measured."""
    within = run.within(run.columns(measured=True))
    return float(within.mean()) if len(within) else 1.0


def beaten(rates: Floats, best: Floats) -> bool:
    """Return True if the t interval of the paired differences to `best` lies below 0."""
    # Equal runs differ by rounding alone.
    return bool(t_interval(rates - best, SEARCH_CONFIDENCE).high < -1e-9 * best.mean())


def unbeaten(rates: Floats) -> Bools:
    """Return the settings served (`served_rates`) that the best does not beat, (settings,)."""
    best = rates[int(rates.mean(axis=1).argmax())]
    return np.array([not beaten(own, best) for own in rates])


def compare_served(
    trace: Trace,
    latency: LatencyTable,
    policies: Policy | Sequence[Policy],
    scenarios: Sequence[Scenario],
    *,
    replications: int = REPLICATIONS,
    share: float = 0.0,
) -> pd.DataFrame:
    """Return a policy, or one for each load, against the best of `rivals`; one row per scenario.

    Replications are paired: all policies meet the same requests at the same times.
    Policies are compared by `counted_rate`.  ``margin`` is policy minus best rival, with the 95% t
    interval of the paired differences; ``not_worse`` says that the interval does not lie
    below 0.  The best rival is the one that came out best at that very load, which leans
    towards the rivals.

    Parameters
    ----------
    share:
        Share of the requests that must meet the scenario's targets: a policy counts for nothing
        where fewer do.
    """
    rows: list[dict[str, Any]] = []
    others = rivals(longest_draft(trace))
    each = policies if isinstance(policies, Sequence) else [policies] * len(scenarios)
    for scenario, policy in zip(scenarios, each, strict=True):
        named = {"tuned": policy, **others}
        runs = [(trace, own, scenario) for own in named.values()]
        outcomes = [served() for served in served_each(latency, runs, replications)]
        values = {
            name: outcome.counted * (outcome.within.mean() >= share)
            for name, outcome in zip(named, outcomes, strict=True)
        }
        best = max(others, key=lambda name: float(values[name].mean()))
        margin = t_interval(values["tuned"] - values[best])
        bound = margin.value if math.isnan(margin.high) else margin.high
        own = float(values["tuned"].mean())
        # Equal runs differ by rounding alone.
        slack = 1e-9 * abs(own)
        rows.append(
            {
                "batch": scenario.limits.max_batch, "rate": scenario.arrivals.rate,
                "tuned": own, "rival": best, "rival_value": float(values[best].mean()),
                **margin.columns("margin"), "not_worse": bool(bound >= -slack),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


NEGLIGIBLE = 5e-4
"""A loss this small is not worth a range of its own."""

Serve = Callable[[Ints], Floats]
"""Tokens per second of a table at every searched batch, shape (batches, replications)."""


@dataclass(frozen=True, eq=False)
class Held:
    """A table of options, shape (batches, contexts), and how it did when served.

    ``rates`` are its tokens per second, shape (batches, replications).  ``gains`` is its mean
    rate over that of the best option throughout, at every batch, ``best`` that option,
    ``worse`` whether it is slower beyond the interval, each of shape (batches,).
    """

    table: Ints
    rates: Floats
    gains: Floats
    best: Ints
    worse: Bools

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better: at how many batches it is worse, then by how much at worst."""
        return int(self.worse.sum()), -float(self.gains.min())


def held(table: Ints, fixed: Sequence[Floats], serve: Serve) -> Held:
    """Return `table` served at every batch against single options throughout.

    Parameters
    ----------
    fixed:
        For each batch the rates of every option alone, shape (options, replications), in
        the same replications as `serve` runs.
    """
    best = np.array([int(rates.mean(axis=1).argmax()) for rates in fixed])
    own = serve(table)
    rivals = [rates[k] for rates, k in zip(fixed, best, strict=True)]
    gains = np.array([o.mean() / max(r.mean(), 1e-300) for o, r in zip(own, rivals, strict=True)])
    worse = np.array([beaten(o, r) for o, r in zip(own, rivals, strict=True)])
    worse &= gains < 1 - NEGLIGIBLE
    return Held(table, own, gains, best, worse)


def mended(table: Ints, fixed: Sequence[Floats], serve: Serve) -> Held:
    """Return `table`, or one near it that single options beat at fewer batches, if any is found.

    If one option for all loads wins at a batch, it is put into that batch's row: first at one
    context, then at all contexts, then in all rows up to it, then in all rows.  (Served at that
    batch, such a table *is* that option.)  A change stays if the whole table improves; there are at
    most as many changes as cells.
    """
    now = held(table, fixed, serve)
    for _ in range(table.size):
        found = _improved(now, fixed, serve)
        if found is None:
            break
        now = found
    return now


def smoothed(now: Held, fixed: Sequence[Floats], serve: Serve) -> Held:
    """Return `now` without rises of the draft length along batches that are within noise.

    Options are ordered by draft length.  If a larger batch drafts more than the one before, the
    smaller batches are raised or the larger ones lowered, provided that the whole table is then
    slower at no batch beyond the search's interval.
    """
    for i in range(1, len(now.table)):
        if not (now.table[i] > now.table[i - 1]).any():
            continue
        raised, lowered = now.table.copy(), now.table.copy()
        raised[:i] = np.maximum(raised[:i], now.table[i])
        lowered[i:] = np.minimum(lowered[i:], now.table[i - 1])
        for table in (lowered, raised):
            found = held(table, fixed, serve)
            same = not any(map(beaten, found.rates, now.rates))
            if same and found.worse.sum() <= now.worse.sum():
                now = found
                break
    return now


def _improved(now: Held, fixed: Sequence[Floats], serve: Serve) -> Held | None:
    for i in sorted(np.flatnonzero(now.worse), key=lambda i: float(now.gains[i])):
        row = slice(i, i + 1)
        places = [(row, slice(j, j + 1)) for j in range(now.table.shape[1])]
        rows = [row, slice(0, i + 1), slice(None)]
        for place in [*places, *((chosen, slice(None)) for chosen in rows)]:
            table = now.table.copy()
            table[place] = now.best[i]
            found = held(table, fixed, serve)
            if found.rank < now.rank:
                return found
    return None
