"""Predicted seconds of static batches of a recording's own requests, in order.

`profiler.checks.batch_runs` measures the same: consecutive requests decoded in groups, each until
its slowest has ended, timed from the end of the group's prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Literal

import numpy as np
import pandas as pd

from simulator.serving.arrivals import Arrivals, Job
from simulator.serving.run import Policy, simulate
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Limits
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable


class InOrder(Arrivals):
    """Every recorded request once, in the order of the trace, all there from the start."""

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Return zero for every request."""
        del rng
        return repeat(0.0)

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        """Yield one job per recorded request."""
        del rng
        for i, info in enumerate(trace.requests[:requests]):
            yield Job(0.0, i, max(info.prompt_length, 1), info.tokens)


def predict_groups(
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, Policy],
    batches: Sequence[int],
    *,
    passes: Literal["ragged", "padded"] = "padded",
) -> tuple[pd.DataFrame, dict[tuple[str, int], pd.DataFrame]]:
    """Decode seconds of every group, and what each request went through.

    Returns
    -------
    groups, requests:
        ``groups`` has a row per policy, batch and group with the columns policy, verify,
        batch, request (id of the group's first), predicted_s and rounds (iterations).
        ``requests``, by (policy, batch), has a row per request of the trace with rounds,
        drafted, accepted, draft_forwards and extrapolated passes in ``attrs``.

    Raises
    ------
    DraftsimError
        If mode and policy do not fit, or the latency table lacks a model that must run.
    """
    rows = []
    details = {}
    count = len(trace.requests)
    for batch in batches:
        scenario = Scenario(
            InOrder(), Limits(max_batch=batch, token_budget=1 << 30), count, "static",
            passes=passes, warmup=0.0,
        )  # fmt: skip
        for name, policy in policies.items():
            run = simulate(trace, latency, policy, scenario, name=name)
            frame = run.requests.sort_values("index", ignore_index=True)
            frame.attrs["extrapolated"] = run.row()["extrapolated"]
            details[name, batch] = frame
            for start in range(0, count, batch):
                group = frame.iloc[start : start + batch]
                seconds = float(group["finish_s"].max() - group["first_s"].min())
                first = trace.requests[start].id
                rounds = int(group["rounds"].max())
                rows.append((name, run.verify, batch, first, seconds, rounds))
    columns = ["policy", "verify", "batch", "request", "predicted_s", "rounds"]
    return pd.DataFrame(rows, columns=columns), details
