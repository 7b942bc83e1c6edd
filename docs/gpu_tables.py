"""Tables of what the calibration suite measured on a GPU, next to its predictions."""

from __future__ import annotations

import pandas as pd

from docs.reading import table
from policies.registry import PLAIN
from simulator.validation import check_recording
from traces.store.files import read_latency
from traces.store.recordings import BUNDLED

HEAD = (
    "pair", "passes", "target, ms", "draft, ms", "c", "requests", "fixed:gamma=2", "gammatune",
    "median error", "worst",
)  # fmt: skip
ERRORS = (
    "recording", "runs", "with another number of rounds", "seconds, median error", "worst",
    "speedups, median error", "worst",
)  # fmt: skip
SHOWN = ("fixed:gamma=2", "gammatune")
CONTEXT = 128
"""Tokens in the cache before the passes shown."""


BRIEF = ("pair", "passes", "c", *SHOWN, "median error")


def measured_gpu(device: str, brief: bool = False) -> str:
    """Return per pair, mode and batch the passes over one token, and speedups of full runs,
    predicted | measured.

    Errors are those of the speedups of all policies that ran.  With ``brief``, single requests of
    the pairs whose verdicts were dictated, in fewer columns.

    Raises
    ------
    KeyError
        If no recording of this device has measured runs.
    """
    lines = []
    for file in sorted(BUNDLED.glob(f"{device}-*/measured.parquet")):
        rows = check_recording(file.parent)
        for batch, own in rows.groupby("batch"):
            lines.append((*_passes(file.parent.name, int(str(batch))), *_speedups(own)))
    if not lines:
        raise KeyError(device)
    if not brief:
        return table(HEAD, lines)
    rows = pd.DataFrame(lines, columns=list(HEAD)).query("requests == '1'")
    published = rows[~rows["pair"].str.startswith("trained")].sort_values(["pair", "c"])
    return table(BRIEF, published[list(BRIEF)].to_numpy().tolist())


def measured_gpu_errors(device: str) -> str:
    """Return per recording of a device with measured runs the errors of seconds and of speedups."""
    lines = []
    for file in sorted(BUNDLED.glob(f"{device}-*/measured.parquet")):
        rows = check_recording(file.parent)
        speedups = rows[rows["policy"] != PLAIN]["speedup_error"]
        cells = (_median_and_worst(errors) for errors in (rows["error"], speedups))
        differ = int(rows["rounds_differ"].gt(0).sum())
        lines.append((file.parent.name, len(rows), differ, *(c for pair in cells for c in pair)))
    return table(ERRORS, lines)


def _median_and_worst(errors: pd.Series) -> tuple[str, str]:
    return f"{errors.abs().median():.1%}", f"{errors.loc[errors.abs().idxmax()]:+.1%}"


def _passes(name: str, batch: int) -> tuple[str, ...]:
    latency = read_latency(BUNDLED / name / "latency.parquet")
    target, draft = (
        float(latency.seconds(model, "forward", batch=batch, new_tokens=1, context=CONTEXT))
        for model in ("target", "draft")
    )
    pair, mode = str(latency.meta["pair"]), str(latency.meta["mode"])
    return (
        pair, mode, f"{1e3 * target:.2f}", f"{1e3 * draft:.2f}", f"{draft / target:.2f}",
        str(batch),
    )  # fmt: skip


def _speedups(rows: pd.DataFrame) -> tuple[str, ...]:
    by = rows.set_index("policy")
    plain = by.loc[PLAIN]
    pairs = [
        " | ".join(f"{plain[c] / by.loc[policy, c]:.2f}" for c in ("predicted_s", "measured_s"))
        for policy in SHOWN
    ]
    errors = by["speedup_error"].drop(PLAIN)
    return (*pairs, *_median_and_worst(errors))
