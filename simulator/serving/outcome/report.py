"""The results: one run, and replications of several policies together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from simulator.bootstrap import Interval, half_width
from simulator.serving.cost import Coverage
from simulator.serving.outcome.metrics import CutOff, RunRecorder, joined_recorders, summary
from simulator.serving.scenario import Scenario

TOTALS = {
    "requests", "rejected", "preemptions", "interpolated", "extrapolated", "simulated_tokens",
    "elapsed_s", "simulated_s",
}  # fmt: skip
"""Fields of a row that replications add up; other numbers are averaged."""


def t_interval(values: Any, confidence: float = 0.95) -> Interval:
    """Return the mean and t interval of independent `values`; NaN bounds for fewer than two."""
    values = np.asarray(values, dtype=float)
    half = math.nan
    if len(values) >= 2:
        half = half_width(values, confidence) / math.sqrt(len(values))
    return Interval.around(float(values.mean()), half)


def merged_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rows of replications in one: numbers averaged, counts summed, flags or-ed.

    ``<metric>_lo`` and ``_hi`` bound throughput and the three mean latencies with 95% t
    intervals where there are two or more; ``over_time`` is that of the first.
    """
    if len(rows) == 1:
        return {**rows[0], "replications": 1}
    merged: dict[str, Any] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if key == "coverage":
            merged[key] = joined_coverage([entry for value in values for entry in value])
        elif key == "over_time":
            merged[key] = first
        elif isinstance(first, dict):
            merged[key] = {q: float(np.mean([v[q] for v in values])) for q in first}
        elif isinstance(first, bool):
            merged[key] = any(values)
        elif key in TOTALS:
            merged[key] = sum(values)
        elif isinstance(first, float):
            merged[key] = float(np.mean(values))
        elif key == "status":
            merged[key] = next((v for v in values if v != "complete"), "complete")
        else:
            merged[key] = first
    for key in ("throughput_tok_s", "ttft_s", "tpot_s", "e2e_s"):
        values = [row[key]["mean"] if isinstance(row[key], dict) else row[key] for row in rows]
        _, merged[f"{key}_lo"], merged[f"{key}_hi"] = t_interval(values)
    return {**merged, "replications": len(rows)}


def joined_coverage(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per model, phase and origin: passes added, spans widened."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        key = entry["model"], entry["phase"], entry["origin"]
        if key not in found:
            found[key] = dict(entry)
            continue
        old = found[key]
        old["passes"] += entry["passes"]
        for size in ("batch", "new_tokens", "context"):
            old[size] = [min(old[size][0], entry[size][0]), max(old[size][1], entry[size][1])]
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Run:
    """One replication of one policy."""

    policy: str
    scenario: Scenario
    verify: str
    fidelity: str
    recorder: RunRecorder
    coverage: list[Coverage]
    unpriced: list[str]
    simulated_s: float
    elapsed_s: float
    status: str
    """``complete``, or which bound ended the run."""
    cut_off: CutOff
    source: str = "draft-model"
    """The drafter."""
    replicas: int = 1
    """Number of the scenario's replicas in this run."""

    @property
    def requests(self) -> pd.DataFrame:
        """Finished requests, with ``ttft_s``, ``tpot_s`` (NaN for one token) and ``e2e_s``."""
        return pd.DataFrame(self.columns())

    def columns(self, measured: bool = False) -> dict[str, Any]:
        """Return the columns of `requests` as arrays, if `measured` without the warm-up."""
        own = {name: np.array(values) for name, values in self.recorder.requests.items()}
        if measured:
            kept = own["index"] >= self.recorder.skip
            own = {name: values[kept] for name, values in own.items()}
        later = np.where(own["tokens"] > 1, own["tokens"] - 1.0, np.nan)
        return own | {
            "ttft_s": own["first_s"] - own["arrival_s"],
            "tpot_s": (own["finish_s"] - own["first_s"]) / later,
            "e2e_s": own["finish_s"] - own["arrival_s"],
        }

    @property
    def tokens_within_targets(self) -> float:
        """Share of the measured requests' tokens whose request met the scenario's targets."""
        kept = self.columns(measured=True)
        total = int(kept["tokens"].sum())
        return float(kept["tokens"][self.within(kept)].sum() / total) if total else 1.0

    def within(self, requests: Mapping[str, Any] | pd.DataFrame) -> Any:
        """Return which of `requests` met the scenario's targets."""
        return self.scenario.targets.met(requests["ttft_s"], requests["tpot_s"])

    @property
    def missed(self) -> float:
        """Requests after the warm-up that miss the targets without having finished.

        They were refused, or cut off so late that they could not meet the targets any more.
        """
        r, cut = self.recorder, self.cut_off
        begun = cut.first_s >= 0
        ttft_s = np.where(begun, cut.first_s, self.simulated_s) - cut.arrival_s
        # All of the output will take no less than what there is of it.
        since_s = np.where(begun, self.simulated_s - cut.first_s, 0.0)
        tpot_s = since_s / np.maximum(cut.output_tokens - 1, 1)
        late = ~self.scenario.targets.met(ttft_s, tpot_s)
        refused = r.rejected * (1 - r.skip / max(r.expected, 1))
        return refused + float((late & (cut.number >= r.skip)).sum())

    @property
    def throughput(self) -> float:
        """Tokens per second over the measured interval."""
        start_s, end_s, tokens = self._measured()
        span = end_s - start_s
        return tokens / span if span > 0 else float("nan")

    def row(self) -> dict[str, Any]:
        """Return the run as one record; latencies as mean, p50, p95 and p99.

        * ``goodput_req_s``: finished requests per second over the interval of the throughput, times
          the share of the measured ones that met the targets.
        * ``within_targets``: share of the measured requests that met the targets.  Those that were
          refused did not, nor did those that ``max_time_s`` cut off when it was too late for them;
          others that it cut off do not count.
        * ``overloaded``: True if, when the last request arrived, more than a tenth of all requests
          waited for a first token, beyond the largest batch.
        * ``length_changes``: share of steps whose draft length differs from that of the step
          before, under a policy with one length for all requests.
        * ``coverage``: how many passes of each model and phase were measured, interpolated or
          extrapolated (`simulator.serving.cost.Coverage`).
        * ``over_time``: mean batch and mean KV blocks in use, in equal intervals that begin at
          ``time_s``.

        In a fleet, throughput, goodput and counts are the whole fleet's.  ``mean_batch``,
        ``utilisation``, ``mean_kv_blocks`` and ``over_time`` are means per replica.  ``imbalance``
        is the largest number of tokens that a replica emitted, over their mean.
        """
        r, every, kept = self.recorder, self.columns(), self.columns(measured=True)
        within = self.within(kept)
        judged = len(within) + self.missed
        scenario = self.scenario
        offered = scenario.rate
        each_s = self.simulated_s * self.replicas
        last_s = r.end_s if r.end_s > r.start_s else self.simulated_s
        begun = int((every["first_s"] <= last_s).sum())
        queued = r.arrived - r.rejected - begun - r.peak_batch
        return {
            "policy": self.policy, "verify": self.verify, "source": self.source,
            "replicas": scenario.replicas, "router": scenario.router_name,
            "batch": scenario.limits.max_batch, "rate": offered,
            "scale": getattr(scenario.arrivals, "scale", None),
            "concurrency": scenario.arrivals.concurrency, "mode": scenario.mode,
            "throughput_tok_s": self.throughput,
            **{
                name: summary(kept[name][~np.isnan(kept[name])])
                for name in ("ttft_s", "tpot_s", "e2e_s")
            },
            "itl_s": r.itl.summary,
            "goodput_req_s": self._goodput(every) if len(within) else math.nan,
            "within_targets": float(within.sum()) / judged if judged else float("nan"),
            "ttft_target_s": scenario.targets.ttft_s, "tpot_target_s": scenario.targets.tpot_s,
            "mean_batch": r.batch.integral / each_s if each_s else 0.0,
            "utilisation": r.busy_s / each_s if each_s else 0.0,
            "imbalance": self._imbalance(every),
            "mean_kv_blocks": r.kv_blocks.integral / each_s if each_s else 0.0,
            "acceptance_rate": r.accepted / r.drafted if r.drafted else float("nan"),
            "wasted_drafts": 1 - r.accepted / r.draft_forwards if r.draft_forwards else 0.0,
            "length_changes": r.length_changes / r.iterations if r.iterations else 0.0,
            "requests": len(every["index"]), "rejected": r.rejected, "warmup_requests": r.skip,
            "preemptions": int(every["preemptions"].sum()),
            "overloaded": offered is not None and queued > 0.1 * r.arrived,
            "interpolated": self._passes("interpolated"),
            "extrapolated": self._passes("extrapolated"), "unpriced": list(self.unpriced),
            "coverage": joined_coverage([_entry(c) for c in self.coverage]),
            "over_time": self._over_time(),
            "status": self.status, "fidelity": self.fidelity, "simulated_s": self.simulated_s,
            "simulated_tokens": r.tokens, "elapsed_s": self.elapsed_s,
        }  # fmt: skip

    def _goodput(self, requests: Mapping[str, Any]) -> float:
        """Return requests per second that finish within the targets, over throughput's interval."""
        start_s, end_s, _ = self._measured()
        finish_s = requests["finish_s"]
        ends = (start_s < finish_s) & (finish_s <= end_s) & self.within(requests)
        return float(ends.sum()) / (end_s - start_s) if end_s > start_s else math.nan

    def _measured(self) -> tuple[float, float, int]:
        """Start and end of the interval that throughput is measured over, and its tokens."""
        r = self.recorder
        arriving_s = r.end_s - r.start_s
        swamped = self.scenario.arrivals.rate is not None and 2 * arriving_s < self.simulated_s
        if arriving_s > 0 and not swamped:
            return r.start_s, r.end_s, r.end_tokens - r.start_tokens
        return 0.0, self.simulated_s, r.tokens

    def _passes(self, origin: str) -> int:
        return sum(c.passes for c in self.coverage if c.origin == origin)

    def _over_time(self) -> dict[str, list[float]]:
        times, batch = self.recorder.batch.means(self.simulated_s)
        _, blocks = self.recorder.kv_blocks.means(self.simulated_s)
        return {
            "time_s": times.tolist(), "batch": (batch / self.replicas).tolist(),
            "kv_blocks": (blocks / self.replicas).tolist(),
        }  # fmt: skip

    def _imbalance(self, requests: Mapping[str, Any]) -> float:
        total = int(requests["tokens"].sum())
        if not total:
            return float("nan")
        return (
            float(np.bincount(requests["replica"], requests["tokens"]).max())
            * self.replicas
            / total
        )


def joined_runs(runs: Sequence[Run]) -> Run:
    """Return runs of different replicas of one fleet as one run; `runs` is not empty."""
    if len(runs) == 1:
        return runs[0]
    first = runs[0]
    return replace(
        first, recorder=joined_recorders([r.recorder for r in runs]),
        coverage=[entry for r in runs for entry in r.coverage],
        replicas=sum(r.replicas for r in runs),
        simulated_s=max(r.simulated_s for r in runs), elapsed_s=sum(r.elapsed_s for r in runs),
        status=next((r.status for r in runs if r.status != "complete"), "complete"),
        cut_off=CutOff(*map(np.concatenate, zip(*(r.cut_off for r in runs), strict=True))),
    )  # fmt: skip


def _entry(coverage: Coverage) -> dict[str, Any]:
    named = coverage._asdict()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}
