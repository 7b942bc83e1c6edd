"""A tuned policy against fixed settings, served at the same loads in simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.basic import Autoregressive, Fixed
from simulator.serving.arrivals import ClosedLoop
from simulator.serving.merge import t_interval
from simulator.serving.report import ServeResult
from simulator.serving.run import Policy, serve
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Limits
from simulator.tune.costs import Slo
from traces.latency import LatencyTable
from traces.trace import Trace

Bools = npt.NDArray[np.bool_]

RIVALS: Mapping[str, Policy] = {
    "off": Autoregressive(), "K=1": Fixed(1), "K=3": Fixed(3), "K=5": Fixed(5)
}  # fmt: skip
"""What people set by hand."""


def closed_load(trace: Trace, batch: int, slo: Slo | None = None, seed: int = 0) -> Scenario:
    """As many requests at a time as `batch`, each followed by the next: a full engine."""
    targets = slo or Slo()
    return Scenario(
        ClosedLoop(batch), Limits(max_batch=batch), seed=seed,
        requests=max(len(trace.requests), 4 * batch),
        ttft_target_s=targets.ttft_s, tpot_target_s=targets.tpot_s,
    )  # fmt: skip


def unbeaten(
    trace: Trace, latency: LatencyTable, lengths: Sequence[int], batch: int,
    slo: Slo | None = None, *, replications: int = 5, seed: int = 0,
) -> Bools:  # fmt: skip
    """Draft lengths that no other beats when served at a batch, shape (lengths,).

    All meet the same requests at the same times; a length is beaten where the 95 % t interval
    of the paired differences to the best lies below 0.
    """
    policies = {str(k): Fixed(k) if k else Autoregressive() for k in lengths}
    scenario = replace(closed_load(trace, batch, slo, seed), replications=replications)
    runs = serve(trace, latency, policies, scenario).runs
    rows = [[run.row() for run in runs[name]] for name in policies]
    rates = np.array(
        [[r["throughput_tok_s"] * (r["within_targets"] if slo else 1) for r in own] for own in rows]
    )
    best = rates[int(rates.mean(axis=1).argmax())]
    highest = [t_interval(own - best)[2] for own in rates]
    return np.array([h >= -1e-9 * best.mean() for h in highest])


def compare_served(
    trace: Trace,
    latency: LatencyTable,
    policy: Policy,
    scenarios: Sequence[Scenario],
    *,
    replications: int = 5,
    rivals: Mapping[str, Policy] = RIVALS,
    metric: str = "throughput_tok_s",
    lookahead: int | None = None,
) -> pd.DataFrame:
    """`policy` against the best of `rivals` at every load; one row per scenario.

    Replications are paired: all policies meet the same requests at the same times.
    ``margin`` is policy minus best rival (the sign turned round for latencies, so that
    more is better), with the 95 % t interval of the paired differences; ``not_worse``
    says that the interval does not lie below 0.  The best rival is the one that came out best
    at that very load, which leans towards the rivals.

    Parameters
    ----------
    metric:
        A column of `simulator.serving.ServeResult.summary`.
    lookahead:
        Longest draft of `policy`, where it does not name one itself.
    """
    rows: list[dict[str, Any]] = []
    fewer_is_better = not metric.startswith(("throughput", "goodput", "within"))
    for scenario in scenarios:
        repeated = replace(scenario, replications=replications)
        longer = replace(repeated, limits=replace(scenario.limits, lookahead=lookahead))
        own_runs = serve(
            trace, latency, {"tuned": policy}, longer if lookahead is not None else repeated
        ).runs
        result = ServeResult(repeated, {**own_runs, **serve(trace, latency, rivals, repeated).runs})
        values = result.summary.set_index("policy")[metric].drop("tuned")
        best = str(values.idxmin() if fewer_is_better else values.idxmax())
        margin, lo, hi = result.difference("tuned", best, metric)
        if fewer_is_better:
            margin, lo, hi = -margin, -hi, -lo
        own = float(result.summary.set_index("policy")[metric]["tuned"])
        # Equal runs differ by rounding alone.
        slack = 1e-9 * abs(own)
        rows.append(
            {
                "batch": scenario.limits.max_batch, "rate": scenario.arrivals.rate,
                "tuned": own, "rival": best, "rival_value": float(values[best]),
                "margin": margin, "margin_lo": lo, "margin_hi": hi,
                "not_worse": bool((margin if math.isnan(hi) else hi) >= -slack),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
