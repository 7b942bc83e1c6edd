"""Figures of sweeps and ladders, in the style of `simulator.plots`.

A map shows the logarithm of the speedup in colours that diverge at 1, darker the further
on either side; the line where it is 1 is drawn solid, and dashed where the bounds of its
interval are 1, so that greyscale loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator.plots import COLOURS, DASHES, GREY, INK, MARKERS, _style
from simulator.whatif.breakeven import Surface, break_even, regret, surface
from simulator.whatif.ladder import PARTS
from traces.errors import DraftsimError

LABELS = {
    "c": "cost ratio c = T_draft / T_target",
    "alpha": "acceptance α",
    "batch": "batch (sequences)",
    "context": "context (tokens)",
    "gamma": "draft length γ (tokens)",
}
LOGARITHMIC = frozenset({"c", "batch", "context"})


def plot_maps(
    frame: pd.DataFrame, x: str = "c", y: str = "alpha", policies: Sequence[str] | None = None
) -> Figure:
    """Speedup of each policy over two axes, with the line of break-even.

    ``frame`` holds one value of every other axis; where y or x is gamma, a map is drawn
    per family of policies.
    """
    by = "family" if "gamma" in (x, y) else "policy"
    there = list(dict.fromkeys(frame[by].astype(str)))
    if "gamma" in (x, y):
        counts = frame[frame["gamma"].notna()].groupby("family", observed=True)["gamma"].nunique()
        there = [n for n in there if counts.get(n, 0) > 1]
    names = [n for n in there if policies is None or n in policies]
    if not names:
        raise DraftsimError(f"no {by} to map: the sweep has {', '.join(there) or 'none'}")
    surfaces = [surface(frame[frame[by] == n], x, y) for n in names]
    if any(s.values.shape[0] < 2 or s.values.shape[1] < 2 for s in surfaces):
        raise DraftsimError(f"a map needs two values or more of both {x} and {y}")
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(1.1 + 2.9 * columns, 0.8 + 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    reach = _reach(surfaces)
    image: Any = None
    for i, (name, found) in enumerate(zip(names, surfaces, strict=True)):
        axes = grid[i // columns][i % columns]
        image = _map(axes, found, reach)
        axes.set_title(name, fontsize=9, color=INK)
        _scale(axes, x, y)
        axes.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(names))
    for blank in grid.ravel()[len(names) :]:
        blank.set_visible(False)
    figure.supxlabel(LABELS[x], fontsize=9)
    figure.supylabel(LABELS[y], fontsize=9)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02)
    bar.set_label("speedup over plain decoding (×)", fontsize=8)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{2**value:.3g}")
    bar.ax.tick_params(labelsize=8)
    return figure


def plot_break_even(
    frame: pd.DataFrame, x: str = "alpha", along: str = "c",
    policies: Sequence[str] | None = None,
) -> Figure:  # fmt: skip
    """The largest c (or smallest alpha, ...) that pays, over x: a line per policy.

    The band is where the bounds of the speedup's interval cross 1.
    """
    found = break_even(frame, along)
    key = "alpha_asked" if x == "alpha" else x
    names = [n for n in dict.fromkeys(found["policy"].astype(str))
             if policies is None or n in policies]  # fmt: skip
    if not names:
        raise DraftsimError("no policy to draw: name policies that the sweep holds")
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        part = found[found["policy"] == name].sort_values(key)
        at = part[key].to_numpy(float)
        mid, low, high = (
            part[c].replace([np.inf, -np.inf], np.nan).to_numpy(float)
            for c in ("break_even", "break_even_lo", "break_even_hi")
        )
        colour = COLOURS[i % len(COLOURS)]
        raw = part["break_even"].to_numpy(float)
        label = name
        if not np.isfinite(mid).any():
            label += " (pays everywhere)" if np.isinf(raw).all() else " (no line)"
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            at, mid, color=colour, linestyle=DASHES[i % len(DASHES)], linewidth=1.4, label=label,
            marker=MARKERS[i % len(MARKERS)], markersize=4, markevery=max(len(at) // 8, 1),
        )  # fmt: skip
    if along in LOGARITHMIC:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if x in LOGARITHMIC:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(LABELS[x])
    word = "smallest" if along == "alpha" else "largest"
    axes.set_ylabel(f"{word} {LABELS[along]}\nthat pays")
    _style(axes, "both")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def plot_adapting(frame: pd.DataFrame, x: str = "c", y: str = "alpha") -> Figure:
    """What adapting could bring: oracle and best fixed length over two axes.

    Left the best fixed length itself, right the oracle's speedup less its speedup.
    """
    rows = regret(frame)
    rows = rows[rows["family"] == "oracle"]
    if rows.empty:
        raise DraftsimError("the sweep holds no oracle: add --policy oracle")
    if rows["best_fixed"].isna().any():
        raise DraftsimError("the sweep holds no fixed length: add --policy 'fixed:gamma={1..12}'")
    rows = rows.drop_duplicates([c for c in rows.columns if c in (x, y, "alpha_asked")])
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, column, label in (
        (left, "best_gamma", "best fixed γ (0: do not speculate)"),
        (right, "adapting", "oracle − best fixed (×)"),
    ):
        found = surface(rows.assign(speedup=rows[column]), x, y)
        image = axes.pcolormesh(
            found.x, found.y, found.values, cmap="cividis", shading="nearest", rasterized=True
        )
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=8)
        _scale(axes, x, y)
        axes.set_xlabel(LABELS[x])
    left.set_ylabel(LABELS[y])
    return figure


def plot_ladder(rungs: pd.DataFrame) -> Figure:
    """Time per token of every rung as shares of plain decoding's; rows of `ladder.ladder`."""
    figure = Figure(figsize=(8.2, 0.3 * len(rungs) + 1.4), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(rungs))[::-1]
    labels = {
        "useful_draft": "drafts accepted", "wasted_draft": "drafts rejected",
        "verify": "target", "signal": "signals", "host": "host",
    }  # fmt: skip
    shades = (COLOURS[2], COLOURS[1], "#C9D6E3", COLOURS[4], GREY)
    left: npt.NDArray[np.float64] = np.zeros(len(rungs))
    for part, shade in zip(PARTS, shades, strict=True):
        width = rungs[f"time_{part}"].to_numpy(float)
        if not width.any():
            continue
        axes.barh(y, width, 0.72, left=left, color=shade, label=labels[part], edgecolor="white",
                  linewidth=0.6, hatch="////" if part == "wasted_draft" else None)  # fmt: skip
        left += width
    speedup, low, high, share = (
        rungs[c].to_numpy(float) for c in ("speedup", "speedup_lo", "speedup_hi", "share")
    )
    for i, rung in enumerate(rungs["rung"]):
        text = f"{speedup[i]:.2f}×"
        if rung != "autoregressive" and np.isfinite(low[i]):
            text += f" [{low[i]:.2f}, {high[i]:.2f}]"
        if np.isfinite(share[i]):
            text += f"  {100 * share[i]:.0f} %"
        axes.text(float(left[i]) + 0.01, float(y[i]), text, va="center", fontsize=7.5, color=INK)
    names = [
        f"{p} ({r})" if r == "best-fixed" else str(p)
        for p, r in zip(rungs["policy"], rungs["rung"], strict=True)
    ]
    axes.set_yticks(y, names)
    for tick, rung in zip(axes.get_yticklabels(), rungs["rung"], strict=True):
        tick.set_fontweight("normal" if rung == "policy" else "bold")
    axes.set_xlim(0, 1.32 * max(1.0, float(left.max())))
    axes.set_xlabel("time per token, plain decoding = 1;  speedup [95 % interval]  "
                    "share of the oracle's gain")  # fmt: skip
    _style(axes, "x")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure


def plot_tilt(rows: pd.DataFrame) -> Figure:
    """Error of tilting against how far, beside i.i.d.'s; rows of `fidelity.compare_groups`."""
    part = rows[rows["metric"] == "speedup"]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    shift = part["shift"].to_numpy(float)
    for i, (column, label) in enumerate((("error", "tilted"), ("iid_error", "i.i.d."))):
        error = 100 * part[column].to_numpy(float)
        median = float(np.median(np.abs(error)))
        axes.plot(shift, error, MARKERS[i], color=COLOURS[i], markersize=4.5,
                  markerfacecolor=COLOURS[i] if i == 0 else "white",
                  label=f"{label} (median |error| {median:.1f} %)")  # fmt: skip
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("shift of logit(α), from the recording tilted to the one compared with")
    axes.set_ylabel("error of the speedup (%)")
    axes.legend(frameon=False, fontsize=8)
    _style(axes, "both")
    return figure


def _reach(surfaces: Sequence[Surface]) -> float:
    """The largest |log2 speedup|: colours mean the same on either side of 1."""
    return max(0.1, *(float(np.abs(np.log2(s.values)).max()) for s in surfaces))


def _map(axes: Axes, found: Surface, reach: float) -> Any:
    image = axes.pcolormesh(
        found.x, found.y, np.log2(found.values), cmap="PuOr", vmin=-reach, vmax=reach,
        shading="nearest", rasterized=True,
    )  # fmt: skip
    lines = ((found.values, "-", 1.4), (found.low, "--", 0.8), (found.high, "--", 0.8))
    for values, style, width in lines:
        if np.isfinite(values).all() and values.min() < 1 < values.max():
            axes.contour(found.x, found.y, values, [1.0], colors=INK, linestyles=style,
                         linewidths=width)  # fmt: skip
    return image


def _scale(axes: Axes, x: str, y: str) -> None:
    for name, axis, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        if name in LOGARITHMIC:
            scale("log", base=2 if name == "batch" else 10)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
