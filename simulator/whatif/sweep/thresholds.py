"""Where each policy stops paying, as one table of numbers over the axes of a sweep."""

from __future__ import annotations

import numpy as np
import pandas as pd

from simulator.whatif.breakeven import break_even

AXES = ("c", "alpha", "batch", "context")
THRESHOLDS = (
    "along", "policy", "side", "alpha", "source", "c", "latency", "gpu", "batch", "context",
    "break_even", "break_even_lo", "break_even_hi", "edge", "says", "share_below_1", "adapting",
    "adapting_most",
)  # fmt: skip
"""Columns of `thresholds`: one row per axis searched, policy and point of the other axes.

``along`` is the axis, NaN in its own column; ``side`` says whether the policy pays ``up to``
the break-even or ``from`` it on.  ``break_even`` is read between the points of the grid, with
its bootstrap interval over prompts.  Where it lies beyond the points there are it is NaN or
infinite, and ``edge`` says on which side, such as ``> 0.5``, or ``nowhere``; ``says`` is the
whole in words.
``share_below_1`` (share of prompts slower than plain decoding) and ``adapting`` (the oracle's
speedup less the best fixed length's) are means over the points of the axis,
``adapting_most`` the largest.
"""


def thresholds(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the break-even of every policy that drafts, along every axis of two values or more.

    The largest c and batch that pay, the smallest alpha, and of contexts whichever bound
    there is: longer ones may pay less, or pay where shorter ones do not.  Columns
    `THRESHOLDS`; no rows where the sweep has no such axis.
    """
    drafts = frame.groupby("policy", observed=True)["drafted"].transform("sum") > 0
    parts = []
    for along in AXES:
        key = "alpha_asked" if along == "alpha" else along
        rows = frame[drafts & frame[key].notna()]
        if rows[key].nunique() > 1:
            parts.append(_along(rows, along))
    if not parts:
        return pd.DataFrame(columns=list(THRESHOLDS))
    return pd.concat(parts, ignore_index=True)[list(THRESHOLDS)]


def _along(rows: pd.DataFrame, along: str) -> pd.DataFrame:
    found = break_even(rows, along)
    rising = np.full(len(found), along == "alpha")
    if along == "context":
        longer = break_even(rows, along, side="smallest")
        rising = (np.isinf(found["break_even"]) & np.isfinite(longer["break_even"])).to_numpy()
        found.loc[rising] = longer.loc[rising]
    found["along"] = along
    found["side"] = np.where(rising, "from", "up to")
    for name in ("policy", "latency", "gpu", "source"):
        found[name] = found[name].astype(str)
    if along == "alpha":
        found["alpha"] = np.nan
    else:
        found["alpha"] = found["alpha_asked"].where(found["alpha_asked"].notna(), found["alpha"])
    found[along] = np.nan
    values = found[["break_even", "break_even_lo", "break_even_hi", "first", "last"]]
    words = [
        _words(*(float(v) for v in row), rising=bool(up), along=along)
        for row, up in zip(values.to_numpy(float), rising, strict=True)
    ]
    found["edge"], found["says"] = zip(*words, strict=True)
    return found


def _words(
    value: float, low: float, high: float, first: float, last: float, *, rising: bool, along: str
) -> tuple[str, str]:  # fmt: skip
    """Return the side of the points that a break-even lies on, empty if between, and all words."""

    def edge(at: float) -> str:
        if np.isfinite(at):
            return ""
        if np.isnan(at) and not rising and (along in ("batch", "context") or first <= 0):
            return "nowhere"  # what is smaller still need not exist, or need not pay
        above = np.isnan(at) if rising else np.isinf(at)
        return f"> {last:g}" if above else f"< {first:g}"

    said = edge(value) or f"{value:.3g}"
    # Where the break-even is known and what may pay is not, there was no bootstrap.
    if np.isnan(low if rising else high) and not np.isnan(value):
        return edge(value), said
    bounds = [edge(v) or f"{v:.3g}" for v in (low, high)]
    return edge(value), said if set(bounds) == {said} else f"{said} [{bounds[0]}, {bounds[1]}]"


def some_points(rows: pd.DataFrame, most: int = 26) -> pd.DataFrame:
    """About `most` rows along every axis: all policies at points spread evenly over the others."""
    kept = []
    point = ["alpha", "c", "latency", "gpu", "batch", "context"]
    for _, part in rows.groupby("along", sort=False):
        number = part.groupby(point, sort=False, dropna=False).ngroup().to_numpy()
        points = int(number.max(initial=-1)) + 1
        count = max(most // part["policy"].nunique(), 1)
        count = min(count, points)
        chosen = ((np.arange(count) + 0.5) * points / count - 0.5).astype(int)
        some = part[np.isin(number, chosen)]
        order = np.argsort(number[np.isin(number, chosen)], kind="stable")
        kept.append(some.iloc[order])
    return pd.concat(kept, ignore_index=True) if kept else rows
