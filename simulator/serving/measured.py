"""Served requests compared with what a real server measured of the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from policies.rules.base import VerifyRule
from simulator.serving.arrivals import ArrivalFile
from simulator.serving.recorded import compared
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable


def against_measured(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Any],
    scenarios: Sequence[Scenario], rule: VerifyRule | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return predicted and measured statistics of a file's requests, a row for each of a policy.

    Empty if there is no file of measured requests at its own pace.  All requests count, those of
    the warm-up too.
    """
    found = []
    for scenario in scenarios:
        file = scenario.arrivals
        if not isinstance(file, ArrivalFile) or not file.read.measured or file.scale != 1:
            continue
        once = replace(scenario, warmup=0.0, replications=1)
        for name, policy in policies.items():
            run = simulate(trace, latency, policy, once, name=name, rule=rule)
            served = run.requests.sort_values("index")
            at = served["index"].to_numpy()
            theirs = {metric: values[at] for metric, values in file.read.measured.items()}
            ours = {metric: served[metric].to_numpy(float) for metric in theirs}
            # One token has no time per output token.
            several = served["tokens"].to_numpy() > 1
            for part in (ours, theirs):
                part["tpot_s"] = part["tpot_s"][several]
            found += [
                {"policy": name, **row._asdict(), "error": row.error}
                for row in compared(ours, theirs)
            ]
    return found
