"""Served requests against what a real server measured of the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commands.common.printed import print_table

if TYPE_CHECKING:
    from policies.rules.base import VerifyRule
    from simulator.serving import Scenario
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}


def against_measured(
    trace: Trace, latency: LatencyTable, policies: Mapping[str, Any],
    scenarios: Sequence[Scenario], rule: VerifyRule | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return predicted and measured statistics of a file's requests, a row for each of a policy.

    Empty if there is no file of measured requests at its own pace.  All requests count, those of
    the warm-up too.
    """
    from simulator.serving import ArrivalFile, simulate
    from simulator.serving.recorded import compared

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


def print_measured(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print predicted and measured statistics of each metric, and the error of the prediction."""
    several = len({row["policy"] for row in rows}) > 1
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        values = {
            "predicted": _seconds(row["predicted"]), "measured": _seconds(row["measured"]),
            "error": f"{row['error']:+.1%}",
        }  # fmt: skip
        for kind, text in values.items():
            key = row["policy"], row["metric"], kind
            named = {"policy": row["policy"]} if several else {}
            named["the file's requests"] = f"{NAMES[row['metric']]}, {kind}"
            lines.setdefault(key, named)[row["statistic"]] = text
    print_table(list(lines.values()))


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
