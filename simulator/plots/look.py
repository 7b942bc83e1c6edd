"""The look that all figures share, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from simulator.palette import COLOURS, DASHES, GREY, INK, MARKERS


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


def style(axes: Axes, grid: Literal["x", "y", "both"] = "both") -> None:
    """Two spines, small ticks, a pale grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(axis=grid, color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)


def series(i: int, points: int) -> dict[str, Any]:
    """Line and marker of the i-th curve, of so many points."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        # Where colours begin again, they do with another line.
        "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": max(points // 8, 1),
        "linewidth": 1.4,
    }
