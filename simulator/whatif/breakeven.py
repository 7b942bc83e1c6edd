"""Where speculation stops giving a speedup, and what adapting the draft length is worth.

`thresholds` tells where each policy stops, over all axes.  Everything here reads the
table of a sweep (`simulator.whatif.sweep`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from policies.arrays import Floats
from policies.registry import NO_SPECULATION
from simulator.whatif.cells import ANY, POINT
from traces.digits import three_digits
from traces.errors import DraftsimError

AXES = ("c", "alpha", "batch", "context")
"""Axes along which a policy can stop giving a speedup."""
VARYING = ("alpha", "c", "latency", "gpu", "batch", "context")
"""Columns that can differ between points."""
BOUNDS = ("speedup", "speedup_lo", "speedup_hi")


class Surface(NamedTuple):
    """Values over two axes; `values` has shape (y, x), the bounds likewise."""

    x: Floats
    y: Floats
    values: Floats
    low: Floats
    high: Floats


def surface(rows: pd.DataFrame, x: str, y: str) -> Surface:
    """Return the speedup of `rows` over the columns x and y, which must name one row a point.

    Raises DraftsimError if rows are missing or several share a point: select a policy and one value
    of every other axis first.
    """
    columns = [_axis(rows, x), _axis(rows, y)]
    names = [f"{x} ", f" {y}"]  # told apart even where x is y
    keyed = rows.assign(**dict(zip(names, columns, strict=True)))
    if keyed.duplicated(names).any():
        raise DraftsimError(
            f"several rows share a point of ({x}, {y}): select one policy and one value of the "
            "other axes"
        )
    grids = [keyed.pivot(index=names[1], columns=names[0], values=v) for v in BOUNDS]
    first = grids[0]
    if first.isna().to_numpy().any():
        raise DraftsimError(f"the grid over ({x}, {y}) has holes: select full axes")
    values, low, high = (g.to_numpy(float) for g in grids)
    return Surface(first.columns.to_numpy(float), first.index.to_numpy(float), values, low, high)


def _axis(rows: pd.DataFrame, name: str) -> Floats:
    """Return the column, alpha as it was asked for: the one replayed is near it, not on a grid."""
    if name == "alpha" and rows["alpha_asked"].notna().all():
        name = "alpha_asked"
    return rows[name].to_numpy(float)


Scale = Literal["linear", "log", "cost"]


def crossing(
    x: npt.ArrayLike, speedup: npt.ArrayLike, falling: bool, scale: Scale = "linear"
) -> float:
    """Return where a speedup crosses 1 along rising `x`, read between the points.

    `scale`: the speedup is ``linear`` in x, or in ``log`` x, or its inverse, the cost of a
    token, is linear in x (``cost``), as it is exactly in the cost ratio c.

    `falling`: the largest x with a speedup above 1; infinity if it is above 1 up to the last, NaN
    if nowhere.  Otherwise: the smallest x from which it stays above 1; minus infinity if from the
    first on, NaN if not even at the last.
    """
    at, value = np.asarray(x, dtype=np.float64), np.asarray(speedup, dtype=np.float64)
    if len(at) != len(value) or not len(at):
        raise DraftsimError(f"{len(at)} points and {len(value)} speedups: expected as many, >= 1")
    # Where a policy rests it is as fast as plain decoding, which is no speedup.
    faster = value > 1 + 1e-12
    # The crossing is between the last point of its nearer side and the next one.
    near = np.flatnonzero(faster == falling)
    if not len(near):
        return np.nan if falling else -np.inf
    i = int(near[-1])
    j = i + 1
    if j == len(at):
        return np.inf if falling else np.nan
    if scale == "cost":
        value = 1 / value
    share = (1 - value[i]) / (value[j] - value[i])
    if scale == "log":
        return float(at[i] * (at[j] / at[i]) ** share)
    return float(at[i] + share * (at[j] - at[i]))


def break_even(
    frame: pd.DataFrame, along: str = "c", *, side: Literal["largest", "smallest"] | None = None
) -> pd.DataFrame:
    """Return per policy and point of the other axes, the value of `along` at which speedup is 1.

    Columns: the policy and the axes that vary, then ``break_even`` with ``_lo`` and
    ``_hi`` where the interval's bounds cross 1 (bootstrap over prompts; a draw
    breaks even below some c just where its speedup there is below 1, so that the bounds of
    the one are those of the other), ``first`` and ``last`` of the points there are, and the
    means over these of ``share_below_1`` and ``adapting``, with ``adapting_most``, its largest.
    The ``largest`` value with a speedup above 1 is the default for c, batch and context, the
    ``smallest`` for alpha; see `crossing` for infinities and NaN.
    """
    if along not in AXES:
        raise DraftsimError(f"cannot break even along {along!r}: {', '.join(AXES)}")
    falling = (side or ("smallest" if along == "alpha" else "largest")) == "largest"
    key = "alpha_asked" if along == "alpha" else along
    rows = frame[frame[key].notna()]
    if rows.empty:
        raise DraftsimError(f"the sweep has no axis {along!r}: give it one")
    group = [n for n in ("policy", *POINT) if n != key and (n != "alpha" or along != "alpha")]
    found = []
    for values, part in rows.groupby(group, sort=False, observed=True, dropna=False):
        ordered = part.sort_values(key)
        x = ordered[key].to_numpy(float)
        scale: Scale = "cost" if along == "c" else "linear"
        if along in ("batch", "context") and (x > 0).all():
            scale = "log"
        mid, low, high = (crossing(x, ordered[b], falling, scale) for b in BOUNDS)
        # A sure speedup ends sooner; a possible one, later.
        bounds = (low, high) if falling else (high, low)
        adapting = ordered["adapting"]
        more = (x[0], x[-1], ordered["share_below_1"].mean(), adapting.mean(), adapting.max())
        found.append((*values, mid, *bounds, *more))
    names = [
        *group, "break_even", "break_even_lo", "break_even_hi", "first", "last", "share_below_1",
        "adapting", "adapting_most",
    ]  # fmt: skip
    return pd.DataFrame(found, columns=names)


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per point of the grid: the fastest policy there that can be deployed.

    The oracle, which knows outcomes beforehand, cannot.  Columns: those that name the point, then
    ``policy`` with ``speedup``, ``speedup_lo`` and ``speedup_hi``; where nothing is faster than no
    speculation the policy is `NO_SPECULATION` and the speedup 1.
    """
    rows = frame[frame["family"].astype(str) != "oracle"]
    found = []
    for names, part in rows.groupby(list(POINT), sort=False, observed=True, dropna=False):
        best = part.iloc[int(part["speedup"].to_numpy(float).argmax())]
        faster = best["speedup"] > 1 + 1e-12
        bounds = [best[name] if faster else 1.0 for name in BOUNDS]
        found.append((*names, str(best["policy"]) if faster else NO_SPECULATION, *bounds))
    return pd.DataFrame(found, columns=[*POINT, "policy", *BOUNDS])


def overview(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per policy over the whole grid, by falling mean speedup.

    Where the grid has several devices, or latencies carried over to another one, there is a
    row per device and policy, with ``gpu``, ``scaled`` and the largest ``scale_error`` and
    ``fit_error``, and the means of ``carried_lo`` and ``carried_hi``.
    ``points``; ``speedup_above_1``, ``interval_above_1`` and ``interval_below_1``: shares of the
    points whose speedup, or whole interval, is above 1 or below it (of the points that have an
    interval; NaN if none has); ``share_below_1``: mean share
    of prompts slower than plain decoding; mean regrets against the best fixed length and the
    oracle, and mean ``adapting``; ``outside``: the largest share of passes read outside the
    measured cells; ``tilt_error``: the largest error to expect from tilting that is known, and
    ``tilt_tried``, whether all of the tilts are as small as those it was measured at.
    `thresholds` tells where a policy stops being faster.
    """
    found = []
    devices = set(frame["gpu"].astype(str)) - {ANY}
    by = ["gpu", "policy"] if len(devices) > 1 or frame["scaled"].any() else ["policy"]
    for names, part in frame.groupby(by, sort=False, observed=True):
        keys: dict[str, Any] = {key: str(name) for key, name in zip(by, names, strict=True)}
        if len(by) > 1:
            keys["scaled"] = bool(part["scaled"].any())
            keys |= {n: part[n].max() for n in ("scale_error", "fit_error")}
            keys |= {n: part[n].mean() for n in ("carried_lo", "carried_hi")}
        found.append(
            {
                **keys, "points": len(part), "mean_speedup": part["speedup"].mean(),
                "speedup_above_1": (part["speedup"] > 1).mean(),
                "interval_above_1": (part["speedup_lo"].dropna() > 1).mean(),
                "interval_below_1": (part["speedup_hi"].dropna() < 1).mean(),
                "share_below_1": part["share_below_1"].mean(),
                "regret_fixed": part["regret_fixed"].mean(),
                "regret_oracle": part["regret_oracle"].mean(),
                "adapting": part["adapting"].mean(), "outside": part["outside"].max(),
                "tilt_error": part["tilt_error"].max(),
                "tilt_tried": bool(part["tilt_tried"].all()),
            }
        )  # fmt: skip
    table = pd.DataFrame(found)
    order = [*by[:-1], "mean_speedup"]
    return table.sort_values(
        order, ascending=[True] * (len(order) - 1) + [False], kind="stable", ignore_index=True
    )


THRESHOLDS = (
    "along", "policy", "side", "alpha", "source", "c", "latency", "gpu", "batch", "context",
    "break_even", "break_even_lo", "break_even_hi", "edge", "says", "share_below_1", "adapting",
    "adapting_most",
)  # fmt: skip
"""Columns of `thresholds`: one row per axis searched, policy and point of the other axes.

* ``along``: the axis, whose own column is NaN.
* ``side``: the policy gives a speedup ``up to`` the break-even, or ``from`` it on.
* ``break_even``: interpolated between points of the grid, with its bootstrap interval over prompts.
  NaN or infinite beyond the grid; ``edge`` then says on which side, such as ``> 0.5``, or
  ``nowhere``.  ``says`` is all of it in words.
* ``share_below_1``, ``adapting``: means over the axis of the share of prompts slower than without
  speculation, and of the oracle's speedup less the best fixed length's.  ``adapting_most``: the
  largest ``adapting``.
"""


def thresholds(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the break-even of every policy that drafts, along every axis of two values or more.

    It is the largest c and batch with a speedup, the smallest alpha, and either end of contexts,
    because longer contexts can have smaller or larger speedups.  Columns `THRESHOLDS`; no rows if
    the sweep has no such axis.
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

    said = edge(value) or three_digits(value)
    # Where the break-even is known and what may pay is not, there was no bootstrap.
    if np.isnan(low if rising else high) and not np.isnan(value):
        return edge(value), said
    bounds = [edge(v) or three_digits(v) for v in (low, high)]
    return edge(value), said if set(bounds) == {said} else f"{said} [{bounds[0]}, {bounds[1]}]"


def some_points(rows: pd.DataFrame, most: int = 26) -> pd.DataFrame:
    """Return about `most` rows along each axis: all policies at points spread over the others."""
    kept = []
    for _, part in rows.groupby("along", sort=False):
        number = part.groupby(list(VARYING), sort=False, dropna=False).ngroup().to_numpy()
        points = int(number.max(initial=-1)) + 1
        count = min(max(most // part["policy"].nunique(), 1), points)
        chosen = ((np.arange(count) + 0.5) * points / count - 0.5).astype(int)
        order = np.argsort(number, kind="stable")
        kept.append(part.iloc[order[np.isin(number[order], chosen)]])
    return pd.concat(kept, ignore_index=True) if kept else rows
