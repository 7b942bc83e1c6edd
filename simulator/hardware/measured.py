"""Recordings of a device held against their own predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from policies.registry import parse_policy
from simulator.pricing import price
from simulator.validation import compare, predictions, verdict
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.vectorised import replay_many
from traces.sources.found import find_drafted
from traces.store.files import read_latency
from traces.store.header import MOST, is_number, is_whole
from traces.store.measured import read_measured
from traces.store.text import read_object

MEDIAN_BOUND = 0.02
"""Largest median |error| of predictions made from latencies measured on the same device."""
WORST_BOUND = 0.05
"""Largest |error| of any policy."""


def check_recording(folder: Path) -> pd.DataFrame:
    """Return predicted against measured seconds of a recording, one row per policy and batch.

    ``folder`` holds ``latency.parquet``, ``measured.parquet`` and a trace, or the name of the
    folder that does, as ``python -m profiler.suite unpack`` sorts them.  Columns as in
    `simulator.validation.compare`.

    Raises
    ------
    DraftsimError
        If a file is missing or damaged, or a measured policy cannot be replayed.
    """
    trace, latency = find_drafted(str(folder))
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


def anchor_drift(folder: Path) -> dict[int, float]:
    """Return, by batch, how much slower passes were during the full runs than in the latency table.

    Of the passes that stage ``forced`` times again (its anchors), the median of measured over
    tabled, minus one; batches without anchors are left out.

    Raises
    ------
    DraftsimError
        If ``provenance.json`` is there and damaged.
    """
    path = folder / "provenance.json"
    if not path.is_file():
        return {}
    latency = read_latency(folder / "latency.parquet")
    found: dict[int, list[float]] = {}
    document = read_object(path, "unpack the recording again")
    try:
        units = document.get("forced", {}).get("units", {})
        for unit in units.values():
            anchors = unit.get("anchors", [])
            if not isinstance(anchors, list):
                raise TypeError("anchors are no list")
            for at in anchors:
                sizes = all(is_whole(at[name]) for name in ("batch", "width", "context"))
                if not (sizes and is_number(at["median_s"]) and 0 < at["median_s"] <= MOST):
                    raise ValueError(f"an anchor is {at}")
                tabled = latency.seconds(
                    at["model"], "forward", batch=at["batch"], new_tokens=at["width"],
                    context=at["context"],
                )  # fmt: skip
                found.setdefault(at["batch"], []).append(at["median_s"] / float(tabled) - 1)
    except (ValueError, KeyError, TypeError, AttributeError, DraftsimError) as error:
        raise DraftsimError(f"{path}: damaged ({error}): unpack the recording again") from None
    return {batch: float(np.median(ratios)) for batch, ratios in found.items()}


@dataclass(frozen=True)
class Bounds:
    """The bounds that the comparison of one recording, or of several, has to keep to."""

    rows: int
    """Arms compared: policies at batches."""
    median_error: float
    worst_error: float
    """Signed, of the arm that is furthest off."""
    worst_policy: str
    ranked_pairs: int
    misranked: int
    """Counts over the pairs of runs that differ by more than twice their spread."""
    sign_arms: int
    wrong_sign: int
    """Counts over the runs measured clearly faster or slower than plain decoding."""
    undrifted_error: float
    """Median |error| had passes been as fast as in the latency table."""

    @property
    def met(self) -> dict[str, bool]:
        """Return for each bound whether it is kept."""
        return {
            "median": self.median_error <= MEDIAN_BOUND,
            "worst": abs(self.worst_error) <= WORST_BOUND,
            "ranking": self.misranked == 0,
            "sign": self.wrong_sign == 0,
        }


def bounds(recordings: Sequence[pd.DataFrame]) -> Bounds:
    """Errors, ranking and sign over the rows of `check_recording` of some recordings.

    Policies are ranked within a recording and batch alone.  A column ``drift`` (`anchor_drift`)
    enters ``undrifted_error``, where it is known.

    Raises
    ------
    DraftsimError
        If there are no rows.
    """
    said = [verdict(rows) for rows in recordings]
    rows = pd.concat(recordings, ignore_index=True) if said else pd.DataFrame()
    if rows.empty:
        raise DraftsimError("no compared runs: name a recording with measured runs")
    worst = rows.iloc[int(rows["error"].abs().argmax())]
    drift = rows["drift"].fillna(0.0) if "drift" in rows else 0.0
    return Bounds(
        len(rows), float(rows["error"].abs().median()), float(worst["error"]),
        str(worst["policy"]), sum(v.ranked_pairs for v in said),
        sum(len(v.misranked) for v in said), sum(v.sign_arms for v in said),
        sum(len(v.wrong_sign) for v in said),
        float(((1 + rows["error"]) * (1 + drift) - 1).abs().median()),
    )  # fmt: skip


def _decoded(trace: Trace, measured: pd.DataFrame, batch: int) -> list[int]:
    """Return indices of the requests that were decoded: each group from its first request on."""
    place = {r.id: i for i, r in enumerate(trace.requests)}
    if unknown := set(measured["request"]) - set(place):
        raise DraftsimError(
            f"request {sorted(unknown)[0]!r} was measured but is not in the trace of this folder: "
            "unpack both from the same run"
        )
    first = sorted(place[request] for request in set(measured["request"]))
    return [i for start in first for i in range(start, min(start + batch, len(trace.requests)))]


def _single(trace: Trace, latency: LatencyTable, names: list[str]) -> pd.DataFrame:
    policies = [(name, parse_policy(name, max_gamma=trace.max_gamma)) for name in names]
    return predictions([price(log, latency) for log in replay_many(trace, policies)])


def _together(trace: Trace, latency: LatencyTable, names: list[str], batch: int) -> pd.DataFrame:
    # Brings all of serving, which a data sheet alone does not need.
    from simulator.serving.groups import predict_groups

    policies = {name: parse_policy(name, max_gamma=trace.max_gamma) for name in names}
    groups, _ = predict_groups(trace, latency, policies, [batch])
    return groups
