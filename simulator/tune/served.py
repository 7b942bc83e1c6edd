"""A tuned policy against fixed settings, served at the same loads in simulated time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from policies.basic import Autoregressive, Fixed
from simulator.serving.report import ServeResult
from simulator.serving.run import Policy, serve
from simulator.serving.scenario import Scenario
from traces.latency import LatencyTable
from traces.trace import Trace

RIVALS: Mapping[str, Policy] = {
    "off": Autoregressive(), "K=1": Fixed(1), "K=3": Fixed(3), "K=5": Fixed(5)
}  # fmt: skip
"""What people set by hand."""


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
