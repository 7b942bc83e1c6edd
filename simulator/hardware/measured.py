"""Recordings of a device held against their own predictions."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from policies.registry import parse_policy
from simulator.pricing import price
from simulator.serving.groups import predict_groups
from simulator.validation import compare, predictions
from traces.errors import DraftsimError
from traces.files import read_latency
from traces.latency import LatencyTable
from traces.measured import read_measured
from traces.recordings import find_trace
from traces.replay import replay
from traces.trace import Trace


def check_recording(folder: Path) -> pd.DataFrame:
    """Predicted against measured seconds of a recording, one row per policy and batch.

    ``folder`` holds ``latency.parquet``, ``measured.parquet`` and a trace, or the name of the
    folder that does, as ``python -m profiler.suite unpack`` sorts them.  Columns as of
    `simulator.validation.compare`.

    Raises
    ------
    DraftsimError
        If a file is missing or damaged, or a measured policy cannot be replayed.
    """
    latency, trace = read_latency(folder / "latency.parquet"), find_trace(folder)
    runs = read_measured(folder / "measured.parquet").times
    parts = []
    for batch in sorted(set(runs["batch"].tolist())):
        part = runs[runs["batch"] == batch]
        names = list(dict.fromkeys(part["policy"]))
        used = trace.select(_decoded(trace, part, batch))
        predicted = (
            _single(used, latency, names) if batch == 1 else _together(used, latency, names, batch)
        )
        parts.append(compare(predicted, part))
    return pd.concat(parts, ignore_index=True)


def _decoded(trace: Trace, measured: pd.DataFrame, batch: int) -> list[int]:
    """Indices of the requests that were decoded: each group from its first request on."""
    place = {r.id: i for i, r in enumerate(trace.requests)}
    if unknown := set(measured["request"]) - set(place):
        raise DraftsimError(
            f"request {sorted(unknown)[0]!r} was measured but is not in the trace beside it: "
            "unpack both from the same run"
        )
    first = sorted(place[request] for request in set(measured["request"]))
    return [i for start in first for i in range(start, min(start + batch, len(trace.requests)))]


def _single(trace: Trace, latency: LatencyTable, names: list[str]) -> pd.DataFrame:
    logs = [
        replay(trace, parse_policy(name, max_gamma=trace.max_gamma), name=name) for name in names
    ]
    return predictions([price(log, latency) for log in logs])


def _together(trace: Trace, latency: LatencyTable, names: list[str], batch: int) -> pd.DataFrame:
    policies = {name: parse_policy(name, max_gamma=trace.max_gamma) for name in names}
    groups, _ = predict_groups(trace, latency, policies, [batch])
    return groups
