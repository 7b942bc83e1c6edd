"""Figures of the results, in one restrained style.

Every function returns a matplotlib `Figure` and touches no global state; `save` writes
it.  Colours are Okabe and Ito's, told apart by the colour-blind; line style and marker
tell series apart in greyscale.  Intervals are 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from simulator.formulas.general import empirical_survival
from simulator.palette import COLOURS, DASHES, GREY, INK, MARKERS
from simulator.pricing import autoregressive, price
from simulator.ratios import OwnRatios, carried_sums, ratio_sums, speedup_at
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.machine import BUSY
from traces.replay.rounds import RoundLog

PANELS = 5
"""Categories side by side; more go into further rows."""


def save(figure: Figure, path: str | Path, dpi: int = 200, label: str = "") -> Path:
    """Write the figure as PNG (or what the suffix says), making its folder; its path.

    ``label`` is written below it: what the figures in it rest on.
    """
    target = Path(path)
    if label:
        figure.text(0.5, -0.01, label, ha="center", va="top", fontsize=8, color=COLOURS[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names hold dollar signs, and come from anybody's file
    figure.savefig(target, dpi=dpi, bbox_inches="tight", facecolor="white")
    return target


def plot_validation(rows: pd.DataFrame) -> Figure:
    """Predicted and measured seconds per arm, with the error; rows of `validation.compare`.

    Arms that were disturbed say so, with the share of their time without a processor.
    """
    labels = [
        f"{text} ({machine} {share:.0%})" if machine == BUSY else text
        for text, machine, share in zip(
            _arm_labels(rows), rows["machine"], rows["disturbed"], strict=True
        )
    ]
    figure = Figure(figsize=(8.2, 0.34 * len(rows) + 1.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    y = np.arange(len(rows))[::-1]
    measured, predicted = rows["measured_s"].to_numpy(float), rows["predicted_s"].to_numpy(float)
    spread = rows["spread"].to_numpy(float)
    left.hlines(y, predicted, measured, color=GREY, linewidth=1)
    left.errorbar(
        measured, y, xerr=measured * spread, fmt="o", color=COLOURS[0], capsize=3,
        label="measured (± half IQR of repeats)",
    )  # fmt: skip
    left.plot(predicted, y, "D", color=COLOURS[1], markerfacecolor="white", label="predicted")
    left.set_xlabel("decode time over all prompts (s)")
    left.set_yticks(y, labels)
    left.set_xlim(left=0)
    right.errorbar(
        100 * rows["error"].to_numpy(float), y, xerr=100 * spread, fmt="D", capsize=3,
        color=COLOURS[1], markerfacecolor="white",
    )  # fmt: skip
    right.axvline(0, color=INK, linewidth=0.8)
    reach = max(1.0, 1.15 * float(100 * (rows["error"].abs() + rows["spread"]).max()))
    right.set_xlim(-reach, reach)
    right.set_xlabel("prediction error (%)")
    for axes in (left, right):
        style(axes, "x")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False
    )
    return figure


def plot_speedup(summary: pd.DataFrame) -> Figure:
    """Speedup of every policy with its interval; rows of `summary.summarize`.

    Fastest first, but for lower bounds, which rank nothing.
    """
    rows = summary[summary["policy"] != "autoregressive"]
    if "lower bound" not in set(rows["fidelity"]):
        rows = rows.sort_values("speedup", ascending=False, kind="stable")
    figure = Figure(figsize=(6.4, 0.32 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(rows))[::-1]
    _intervals(axes, rows, y, COLOURS[0], "o")
    axes.set_yticks(y, _policy_labels(rows))
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("speedup over plain decoding (×, 95 % interval over prompts)")
    style(axes, "x")
    return figure


def plot_categories(by_category: pd.DataFrame, policies: Sequence[str] | None = None) -> Figure:
    """Speedup by prompt category, one panel each; rows of `summarize_by_category`."""
    rows = by_category[by_category["policy"] != "autoregressive"]
    if policies is not None:
        rows = rows[rows["policy"].isin(list(policies))]
    if rows.empty:
        raise DraftsimError("no row to plot: name policies that the table holds")
    categories = list(dict.fromkeys(rows["category"]))
    names = list(dict.fromkeys(_policy_labels(rows)))
    across = min(len(categories), PANELS)
    down = -(-len(categories) // across)
    figure = Figure(
        figsize=(1.9 + 1.75 * across, (0.3 * len(names) + 0.6) * down + 0.6), layout="constrained"
    )
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
    y = np.arange(len(names))[::-1]
    for axes in grid[len(categories) :]:
        axes.set_visible(False)
    for axes in grid[max(len(categories) - across, 0) : len(categories)]:
        axes.tick_params(labelbottom=True)
    for axes, category in zip(grid, categories, strict=False):
        part = rows[rows["category"] == category]
        _intervals(axes, part, y, COLOURS[0], "o")
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_title(str(category), fontsize=9)
        axes.set_yticks(y, names)
        style(axes, "x")
    figure.supxlabel("speedup over plain decoding (×, 95 % interval over prompts)", fontsize=9)
    return figure


def plot_cost_ratio(
    logs: Sequence[RoundLog], ratios: npt.ArrayLike | None = None, verify: float = 1.0, *,
    latency: LatencyTable | None = None, own: OwnRatios | None = None,
) -> Figure:  # fmt: skip
    """Speedup against c = T_draft / T_target for each log.

    With the pair's `latency` and its `own` ratios, rounds cost what they cost there with
    drafting scaled to c (`simulator.ratios.carried_sums`), so that the curves go through the
    table's speedups at the pair's c, which is marked.  Without, a round costs c per draft pass
    and one target pass, or `verify` of them where it verifies drafts.
    """
    if (latency is None) != (own is None):
        raise DraftsimError("latency and own ratios belong together: give both, or neither")
    c = np.geomspace(0.005, 1, 200) if ratios is None else np.asarray(ratios, dtype=float)
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    sums = []
    if latency is not None and own is not None:
        plain = price(autoregressive(logs[0]), latency)
        sums = [carried_sums(price(log, latency), plain, own) for log in logs]
        if ratios is None and own.ratio > 0:
            c = np.unique([*c, own.ratio])
    else:
        sums = [ratio_sums(log) for log in logs]
    at = verify if own is None else own.verify
    for i in np.argsort([-float(speedup_at(s, c[0] if own is None else own.ratio, at)[0])
                         for s in sums]):  # fmt: skip
        label = logs[i].policy
        if own is not None:
            label += f"  {float(speedup_at(sums[i], own.ratio, at)[0]):.3f}"
        axes.plot(c, speedup_at(sums[i], c, at), label=label, **_series(int(i), len(c)))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axhline(1, color=INK, linewidth=0.8)
    if own is not None:
        axes.axvline(own.ratio, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"this pair: c = {own.ratio:.2g}", (own.ratio, 1), (4, -4), color=INK, fontsize=8,
            xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cost ratio c = T_draft / T_target")
    axes.set_ylabel("speedup over plain decoding (×)")
    style(axes, "both")
    figure.legend(
        loc="outside right upper", frameon=False, fontsize=8,
        title=None if own is None else "speedup at this pair's c", title_fontsize=8,
    )  # fmt: skip
    return figure


def plot_survival(trace: Trace, gamma: int = 16, resamples: int = 500, seed: int = 0) -> Figure:
    """Chance that k drafts in a row are accepted: recorded (with interval) and i.i.d.

    The i.i.d. curve alpha**k has the recording's mean alpha: what lies between the curves
    is what a formula with a single alpha misses.
    """
    curves, weights = [], []
    for start, stop in zip(trace.request_starts[:-1], trace.request_starts[1:], strict=True):
        if stop - start > gamma:
            curves.append(empirical_survival(trace.run_lengths[start : stop - gamma], gamma))
            weights.append(float(stop - start - gamma))
    if not curves:
        raise DraftsimError(f"no output is longer than {gamma} tokens: plot a smaller gamma")
    table, weight = np.array(curves), np.array(weights)
    drawn = (
        np.random.default_rng(seed).multinomial(
            len(weight), np.full(len(weight), 1 / len(weight)), resamples
        )
        * weight
    )
    low, high = np.percentile(drawn @ table / drawn.sum(axis=1, keepdims=True), [2.5, 97.5], axis=0)
    match = trace.columns["match"][trace.on_path]
    alpha = float((match[match != UNKNOWN] == MATCH).mean())
    k = np.arange(1, gamma + 1)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(k, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(k, weight @ table / weight.sum(), "o-", color=COLOURS[0], markersize=4,
              label="recorded (95 % interval over prompts)")  # fmt: skip
    axes.plot(k, alpha**k, "s--", color=COLOURS[1], markersize=4, markerfacecolor="white",
              label=f"i.i.d. with the same α = {alpha:.2f}")  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_xlim(0.5, gamma + 0.5)
    axes.set_xlabel("draft length k (tokens)")
    axes.set_ylabel("share of positions whose next k\ndrafts are all accepted")
    axes.legend(frameon=False, fontsize=8)
    style(axes, "both")
    return figure


def plot_robustness(speedups: pd.DataFrame, reference: str = "fixed") -> Figure:
    """Speedup against initial gamma, relative to `reference`'s mean.

    ``speedups`` is what `robustness.speedup_by_gamma` returns.
    """
    mean = float(speedups.loc[speedups["policy"] == reference, "speedup"].mean())
    if not mean > 0:
        raise DraftsimError(f"the reference policy {reference!r} is not in the table")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, part) in enumerate(speedups.groupby("policy", sort=False)):
        value = part["speedup"].to_numpy(float) / mean
        label = f"{name}  {value.mean():.2f} ± {value.std(ddof=1):.2f}"
        axes.plot(part["gamma"], value, label=label, **{**_series(i, 1), "markevery": 1})
    axes.axhline(1, color=INK, linewidth=0.8)
    ticks = sorted({int(g) for g in speedups["gamma"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks([g for g in ticks if g in (1, 2, 3, 4, 6, 8, 12, 16, 24)])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("initial draft length γ (tokens)")
    axes.set_ylabel(f"speedup relative to\nthe mean of {reference} (×)")
    style(axes, "both")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, title="mean ± sd over γ",
                  title_fontsize=8)  # fmt: skip
    return figure


def _intervals(
    axes: Axes, rows: pd.DataFrame, y: npt.NDArray[Any], colour: str, marker: str
) -> None:
    value = rows["speedup"].to_numpy(float)
    lo = np.nan_to_num(value - rows["speedup_lo"].to_numpy(float)).clip(0)
    hi = np.nan_to_num(rows["speedup_hi"].to_numpy(float) - value).clip(0)
    axes.errorbar(value, y, xerr=[lo, hi], fmt=marker, color=colour, capsize=2.5, markersize=5)


def _series(i: int, points: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": max(points // 8, 1),
        "linewidth": 1.4,
    }


def _policy_labels(rows: pd.DataFrame) -> list[str]:
    """Policy names, with the rule where several rules share the table."""
    several = rows["verify"].nunique() > 1
    pairs = zip(rows["policy"], rows["verify"], strict=True)
    return [f"{p} ({v})" if several else str(p) for p, v in pairs]


def _arm_labels(rows: pd.DataFrame) -> list[str]:
    labels = _policy_labels(rows)
    for column, text in (("batch", "batch {}"), ("forced", "forced={}")):
        if rows[column].nunique() > 1:
            labels = [
                f"{label}, {text.format(v)}" for label, v in zip(labels, rows[column], strict=True)
            ]
    return labels


def style(axes: Axes, grid: Literal["x", "y", "both"] = "both") -> None:
    """The look that all figures share: two spines, small ticks, a pale grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(axis=grid, color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
