"""The work of several replicas, as the run of one server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.serving.outcome.metrics import REQUEST_COLUMNS, Recorder, Window
from simulator.serving.outcome.report import Run
from simulator.serving.outcome.statistics import Histogram, Series

COUNTS = (
    "arrived", "rejected", "in_system", "carried", "peak_batch", "iterations", "length_changes",
    "tokens", "drafted", "accepted", "draft_forwards",
)  # fmt: skip
"""Numbers of a record that replicas add up; of the most that ran at a time, the sum bounds it."""


def joined_runs(runs: Sequence[Run]) -> Run:
    """Runs of different replicas of one fleet as one run; `runs` is not empty."""
    if len(runs) == 1:
        return runs[0]
    first = runs[0]
    return replace(
        first, recorder=joined_recorders([r.recorder for r in runs]),
        coverage=[entry for r in runs for entry in r.coverage],
        replicas=sum(r.replicas for r in runs),
        simulated_s=max(r.simulated_s for r in runs), elapsed_s=sum(r.elapsed_s for r in runs),
        status=next((r.status for r in runs if r.status != "complete"), "complete"),
        residual_s=sum(r.residual_s for r in runs),
    )  # fmt: skip


def joined_recorders(recorders: Sequence[Recorder]) -> Recorder:
    """The records of replicas that saw the same window, as one; requests in order of finishing."""
    first = recorders[0]
    joined = Recorder(
        first.skip, first.expected, requests=_requests([r.requests for r in recorders]),
        itl=Histogram.joined([r.itl for r in recorders]),
        batch=Series.joined([r.batch for r in recorders]),
        kv_blocks=Series.joined([r.kv_blocks for r in recorders]),
        window=Window(
            first.window.start_s, first.window.end_s,
            sum(r.window.start_tokens for r in recorders),
            sum(r.window.end_tokens for r in recorders),
        ),
        area_s=sum(r.area_s for r in recorders), busy_s=sum(r.busy_s for r in recorders),
    )  # fmt: skip
    for name in COUNTS:
        setattr(joined, name, sum(getattr(r, name) for r in recorders))
    return joined


def _requests(parts: Sequence[dict[str, array[Any]]]) -> dict[str, array[Any]]:
    columns = {name: np.concatenate([np.array(p[name]) for p in parts]) for name in REQUEST_COLUMNS}
    order = np.argsort(columns["finish_s"], kind="stable")
    return {
        name: array(code, columns[name][order].tobytes()) for name, code in REQUEST_COLUMNS.items()
    }
