"""Figures of serving: what batching and load do to each policy.

The style is that of `simulator.plots`, whose `save` writes these too.  Rows are those of
`simulator.serving.sweep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from simulator.plots import COLOURS, DASHES, GREY, INK, MARKERS
from simulator.serving.sweep import break_even_load
from traces.errors import DraftsimError

Rows = Sequence[Mapping[str, Any]]


def plot_latency_throughput(rows: Rows, latency: str = "tpot_s") -> Figure:
    """Latency against throughput, one curve a policy, one point a batch size (CM-ASD, Fig. 2).

    `latency` is ``ttft_s``, ``tpot_s``, ``itl_s`` or ``e2e_s``; its mean is drawn.
    """
    frame = _frame(rows)
    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, (policy, part) in enumerate(_by_policy(frame)):
        line = part.sort_values("batch")
        x, y = line["throughput_tok_s"], 1e3 * line[f"{latency}_mean"]
        axes.plot(x, y, **_look(i), label=policy)
        for batch, at_x, at_y in zip(line["batch"], x, y, strict=True):
            # The first curve carries the labels: batch sizes line up along the others.
            if i == 0:
                axes.annotate(
                    str(int(batch)), (at_x, at_y), xytext=(0, 6), textcoords="offset points",
                    fontsize=7, color=INK, ha="center",
                )  # fmt: skip
    first = frame["policy"].iloc[0]
    axes.set_xlabel(f"throughput (tokens/s; numbers: batch size of {first})")
    axes.set_ylabel(f"{_NAMES[latency]} (ms)")
    axes.set_xscale("log")
    _plain_logarithm(axes.xaxis)
    axes.set_ylim(bottom=0)
    _finish(figure, axes)
    return figure


def plot_latency_load(rows: Rows, latency: str = "e2e_s", baseline: str | None = None) -> Figure:
    """Mean latency against offered load, with the load at which each policy stops paying.

    `baseline` names the policy to break even with; by default the first.
    """
    frame = _frame(rows)
    if frame["rate"].isna().any():
        raise DraftsimError("latency against load needs rows with a rate: sweep over rates")
    baseline = baseline or str(frame["policy"].iloc[0])
    plain = frame[frame["policy"] == baseline].sort_values("rate")
    if plain.empty:
        raise DraftsimError(f"no row of the baseline {baseline!r}")
    figure = Figure(figsize=(6.0, 3.8), layout="constrained")
    axes = figure.subplots()
    metric = f"{latency}_mean"
    for i, (policy, part) in enumerate(_by_policy(frame)):
        line = part.sort_values("rate")
        look = _look(i)
        axes.plot(line["rate"], line[metric], **look, label=policy)
        if policy == baseline:
            continue
        shared = line.merge(plain, on="rate", suffixes=("", "_plain"))
        load = break_even_load(shared["rate"], shared[metric], shared[f"{metric}_plain"])
        if np.isfinite(load):
            axes.axvline(load, color=look["color"], linestyle=(0, (1, 2)), linewidth=1)
            axes.annotate(
                f"{load:.2g}/s",
                (load, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -9 - 10 * i),
                textcoords="offset points",
                fontsize=7,
                color=look["color"],
            )
    axes.set_xlabel(f"offered load (requests/s; dotted: break-even with {baseline})")
    axes.set_ylabel(f"{_NAMES[latency]} (s)")
    axes.set_yscale("log")
    _plain_logarithm(axes.yaxis)
    axes.set_xlim(left=0)
    _finish(figure, axes)
    return figure


def plot_speedup_grid(
    speedup: npt.ArrayLike, batches: Sequence[int], contexts: Sequence[int], policy: str = ""
) -> Figure:
    """Speedup over plain decoding by batch size and context; shape (batches, contexts)."""
    values = np.asarray(speedup, dtype=float)
    if values.shape != (len(batches), len(contexts)):
        raise DraftsimError(
            f"speedup has shape {values.shape}, expected ({len(batches)}, {len(contexts)})"
        )
    figure = Figure(
        figsize=(1.8 + 0.75 * len(contexts), 1.3 + 0.42 * len(batches)), layout="constrained"
    )
    axes = figure.subplots()
    # Half and double are equally far from break-even.
    logs = np.log2(np.where(values > 0, values, np.nan))
    reach = max(float(np.nanmax(np.abs(logs), initial=0.0)), 0.1)
    image = axes.imshow(logs, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", origin="lower")
    for i, j in np.ndindex(*values.shape):
        dark = abs(logs[i, j]) > 0.6 * reach
        axes.text(
            j, i, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=8,
            color="white" if dark else INK,
        )  # fmt: skip
    axes.set_xticks(range(len(contexts)), [str(c) for c in contexts])
    axes.set_yticks(range(len(batches)), [str(b) for b in batches])
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("batch size")
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.9)
    bar.outline.set_visible(False)
    bar.set_label(f"speedup of {policy}" if policy else "speedup", fontsize=9)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{2**value:.2g}")
    bar.ax.tick_params(labelsize=8)
    return figure


_NAMES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "inter-token latency",
    "e2e_s": "end-to-end latency",
}


def _frame(rows: Rows) -> pd.DataFrame:
    if not rows:
        raise DraftsimError("there are no rows to draw: sweep first")
    return pd.json_normalize([dict(row) for row in rows], sep="_")


def _by_policy(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(p, frame[frame["policy"] == p]) for p in dict.fromkeys(frame["policy"].tolist())]


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)], "markersize": 4, "linewidth": 1.3,
    }  # fmt: skip


def _plain_logarithm(axis: Axis) -> None:
    """Ticks at round numbers, written as numbers instead of powers."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _finish(figure: Figure, axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8)
