"""Figures with a row for every policy: speedups, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from policies.registry import is_bound
from simulator.palette import COLOURS, GREY, INK
from simulator.plots.look import style
from traces.errors import DraftsimError
from traces.machine import BUSY

PANELS = 5
"""Categories side by side; more go into further rows."""


def plot_validation(rows: pd.DataFrame) -> Figure:
    """Draw predicted and measured seconds per arm, with the error; rows of `validation.compare`.

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
    """Draw the speedup of every policy with its interval; rows of `summary.summarize`.

    Fastest first, but for lower bounds, which rank nothing. The oracle, a bound that no policy
    reaches, is above the others in grey, and approximate rows are below them, hollow.
    """
    rows = summary[summary["policy"] != "autoregressive"]
    if "lower bound" not in set(rows["fidelity"]):
        rows = rows.sort_values("speedup", ascending=False, kind="stable")
    kinds = _kinds(rows)
    rows, kinds = rows.iloc[np.argsort(kinds, kind="stable")], np.sort(kinds)
    figure = Figure(figsize=(6.8, 0.32 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(rows))[::-1]
    _by_kind(axes, rows, y, kinds)
    for i in np.flatnonzero(np.diff(kinds)):
        axes.axhline(y[i] - 0.5, color=GREY, linewidth=0.6)
    for value, high, at in zip(rows["speedup"], rows["speedup_hi"], y, strict=True):
        if np.isfinite(value):
            axes.annotate(
                f"{value:.2f}", (np.nanmax([value, high]), at), (5, 0), color=INK, fontsize=7,
                textcoords="offset points", va="center",
            )  # fmt: skip
    axes.set_yticks(y, _policy_labels(rows))
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.margins(x=0.09)
    axes.set_xlabel("speedup over no speculation (×, 95% interval over prompts)")
    style(axes, "x")
    if len({*kinds}) > 1:
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


KINDS = (
    ("bound: knows every outcome", GREY, "D", GREY),
    ("policies", COLOURS[0], "o", COLOURS[0]),
    ("approximate", COLOURS[1], "s", "white"),
)
"""Kinds of row in the order that they are drawn in: label, colour, marker and its filling."""


def _kinds(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return for each row the index of its kind in `KINDS`."""
    oracle = rows["policy"].map(is_bound).to_numpy(dtype=bool)
    about = rows["fidelity"] == "approximate"
    return np.where(oracle, 0, np.where(about, 2, 1)).astype(np.int64)


def _by_kind(
    axes: Axes, rows: pd.DataFrame, y: npt.NDArray[Any], kinds: npt.NDArray[np.int64]
) -> None:
    for kind, (label, colour, marker, face) in enumerate(KINDS):
        own = kinds == kind
        if own.any():
            _intervals(axes, rows[own], y[own], colour, marker, face=face, label=label)


def plot_categories(by_category: pd.DataFrame, policies: Sequence[str] | None = None) -> Figure:
    """Draw the speedup by prompt category, one panel each; rows of `summarize_by_category`."""
    rows = by_category[by_category["policy"] != "autoregressive"]
    if policies is not None:
        rows = rows[rows["policy"].isin(list(policies))]
    if rows.empty:
        raise DraftsimError("no row to plot: name policies that the table holds")
    # As in `plot_speedup`: bounds above, approximate rows below.
    kinds = _kinds(rows)
    rows, kinds = rows.iloc[np.argsort(kinds, kind="stable")], np.sort(kinds)
    labels = _policy_labels(rows)
    categories = list(dict.fromkeys(rows["category"]))
    names = list(dict.fromkeys(labels))
    of_name = dict(zip(labels, kinds, strict=True))
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
        here = (rows["category"] == category).to_numpy()
        at = {label: float(place) for label, place in zip(names, y, strict=True)}
        own = np.array([at[label] for label, kept in zip(labels, here, strict=True) if kept])
        _by_kind(axes, rows[here], own, kinds[here])
        axes.axvline(1, color=INK, linewidth=0.8)
        for i in np.flatnonzero(np.diff([of_name[name] for name in names])):
            axes.axhline(y[i] - 0.5, color=GREY, linewidth=0.6)
        axes.set_title(str(category), fontsize=9)
        axes.set_yticks(y, names)
        style(axes, "x")
    figure.supxlabel("speedup over no speculation (×, 95% interval over prompts)", fontsize=9)
    if len({*kinds}) > 1:
        figure.legend(
            *grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False,
            fontsize=8,
        )  # fmt: skip
    return figure


def _intervals(
    axes: Axes, rows: pd.DataFrame, y: npt.NDArray[Any], colour: str, marker: str, face: str,
    label: str,
) -> None:  # fmt: skip
    value = rows["speedup"].to_numpy(float)
    lo = np.nan_to_num(value - rows["speedup_lo"].to_numpy(float)).clip(0)
    hi = np.nan_to_num(rows["speedup_hi"].to_numpy(float) - value).clip(0)
    axes.errorbar(
        value, y, xerr=[lo, hi], fmt=marker, color=colour, capsize=2.5, markersize=5,
        markerfacecolor=face, label=label,
    )  # fmt: skip


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
