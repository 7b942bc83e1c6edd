"""The figure of a capacity plan: replicas needed over the rate of requests, a line a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from simulator.capacity.stages import FINE, below
from simulator.palette import COLOURS, DASHES, GREY, MARKERS
from simulator.plots.look import style
from traces.errors import DraftsimError

Floats = npt.NDArray[np.float64]
Pairs = Sequence[Sequence[float]]
BEYOND = 1.25
"""How far the figure reaches beyond the rate that was asked for."""


class Crossing(NamedTuple):
    """A rate at which two policies need equally many replicas, and each fewer on one side."""

    rate: float
    replicas: float


def limits(pairs: Pairs) -> Floats:
    """(most,) the rates up to which 1, 2, ... replicas meet the SLO.

    What lies between the numbers that were simulated is interpolated: the rate per replica is
    taken to change evenly with the logarithm of their number.
    """
    counts, rates = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    every = np.arange(1, int(counts[-1]) + 1)
    each = np.interp(np.log(every), np.log(counts), rates / counts)
    return np.asarray(np.maximum.accumulate(every * each))


def needed(row: Mapping[str, Any]) -> Floats:
    """`limits` of a row's curve, which give the row's own replicas at the rate asked for.

    What is interpolated between the numbers that were simulated is cut to agree with them.  A
    limit is known to `FINE`: one at that rate is drawn beyond it, so that the line meets the
    marker.
    """
    steps, rate, count = limits(row["curve"]), row["rate"], row["replicas"]
    if count is not None:
        steps[: count - 1] = np.minimum(steps[: count - 1], below(rate))
        steps[count - 1 :] = np.maximum(steps[count - 1 :], rate * (1 + FINE / 2))
    return steps


def crossings(one: Pairs, other: Pairs, tolerance: float = FINE) -> list[Crossing]:
    """Return the points where the lines of two policies cross by more than `tolerance`."""
    a, b = limits(one), limits(other)
    most = min(len(a), len(b))
    with np.errstate(divide="ignore", invalid="ignore"):  # no rate at few replicas
        gaps = np.nan_to_num(a[:most] / b[:most] - 1, posinf=1e9)
    told = np.flatnonzero(np.abs(gaps) > tolerance)
    found = []
    for left, right in pairwise(told.tolist()):
        if gaps[left] * gaps[right] < 0:
            share = gaps[left] / (gaps[left] - gaps[right])
            count = left + 1 + share * (right - left)
            found.append(Crossing(float(np.interp(count, np.arange(1, most + 1), a)), float(count)))
    return found


def plot_replicas(rows: Sequence[Mapping[str, Any]], baseline: str = "autoregressive") -> Figure:
    """Replicas needed over the rate of requests; rows of `simulator.capacity.plan` with curves.

    Markers stand at the rate asked for, with the interval over replications; rings where the
    line of a policy crosses that of the `baseline`.
    """
    drawn = [(i, row) for i, row in enumerate(rows) if row["curve"]]
    if not drawn:
        raise DraftsimError("no row has a curve: plan with curve=True, or relax the targets")
    rate = rows[0]["rate"]
    end = BEYOND * rate
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    tops = [1.0]
    # Lines that coincide would hide each other: each is drawn a little off its own number.
    spread: Floats = np.linspace(-0.06, 0.06, len(drawn)) * (len(drawn) - 1)
    for (i, row), shift in zip(drawn, spread, strict=True):
        steps = needed(row)
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        x = np.concatenate(([0.0], steps[steps < end]))
        y = np.arange(1, len(x) + 1)
        if len(x) <= len(steps):  # this many meet the SLO beyond the figure
            x, y = np.append(x, end), np.append(y, y[-1])
        else:
            y = np.append(y[:-1], y[-2])
        axes.step(x, y + shift, where="post", linewidth=1.5, **look, label=row["policy"])
        tops.append(float(y[-1]))
        if row["replicas"] is not None:
            count, low, high = (row[f"replicas{which}"] for which in ("", "_lo", "_hi"))
            bar = [[count - (low or count)], [(high or count) - count]]
            axes.errorbar(
                [rate * (1 + 0.06 * shift)], [count + shift], bar,
                color=look["color"], marker=MARKERS[i % len(MARKERS)], markersize=5, capsize=2,
                linewidth=1,
            )  # fmt: skip
    said = _mark_crossings(axes, drawn, spread, baseline, end)
    axes.axvline(rate, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xlim(0, end)
    axes.set_ylim(0, max(tops) + 0.8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas that meet the SLO")
    bars = any(row["replicas_lo"] is not None for _, row in drawn)
    axes.set_xlabel(
        f"requests per second (markers: at {rate:.4g}/s{', bars: 95%' if bars else ''})\n{said}"
    )
    style(axes)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def _mark_crossings(
    axes: Any, drawn: Sequence[tuple[int, Mapping[str, Any]]], shifts: Floats, baseline: str,
    end: float,
) -> str:  # fmt: skip
    plain = next((row["curve"] for _, row in drawn if row["policy"] == baseline), None)
    if plain is None:
        return f"{baseline} meets the SLO at no rate"
    marked = 0
    for (i, row), shift in zip(drawn, shifts, strict=True):
        look = {"color": COLOURS[i % len(COLOURS)]}
        for crossing in crossings(row["curve"], plain) if row["policy"] != baseline else ():
            if crossing.rate < end:
                # On the policy's own step, where the eye looks for it.
                step = float(needed(row).searchsorted(crossing.rate)) + 1 + shift
                axes.plot(crossing.rate, step, marker="o", markersize=9, fillstyle="none", **look)
                axes.annotate(
                    f"{crossing.rate:.3g}/s", (crossing.rate, step), xytext=(4, 8), fontsize=7,
                    textcoords="offset points", **look,
                )  # fmt: skip
                marked += 1
    return f"rings: crosses {baseline}" if marked else f"no line crosses that of {baseline}"
