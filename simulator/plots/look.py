"""The look that all figures share, and their files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from simulator.palette import COLOURS, DASHES, GREY, INK, MARKERS
from traces.store.writing import write_atomically

VECTORS = ("svg", "pdf")
"""Kinds of file that `save_all_kinds` writes next to a PNG."""
_UNDATED: dict[str, dict[str, None]] = {
    "svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None},
}  # fmt: skip
"""Metadata left out, so that the same figure gives the same file."""


def save(
    figure: Figure, path: str | Path, dpi: int = 200, label: str = "", title: str = ""
) -> Path:
    """Write a figure as PNG (or as its suffix says), make its folder, and return its path.

    Parameters
    ----------
    label:
        Line below the figure: an assumption that its numbers depend on.
    title:
        Line above it: pair and device.
    """
    return _written(_labelled(figure, label, title), Path(path), dpi)


def save_all_kinds(figure: Figure, path: str | Path, label: str = "", title: str = "") -> Path:
    """Write a figure as PNG, and with the same name as SVG and PDF; return the PNG's path.

    ``label`` and ``title`` are as in `save`.
    """
    target = Path(path).with_suffix(".png")
    _labelled(figure, label, title)
    for kind in VECTORS:
        _written(figure, target.with_suffix(f".{kind}"), 200)
    return _written(figure, target, 200)


def _labelled(figure: Figure, label: str, title: str) -> Figure:
    if label:
        figure.text(0.5, -0.01, label, ha="center", va="top", fontsize=8, color=COLOURS[1])
    if title:
        room = max(30, int(14 * figure.get_figwidth()))  # characters of this size in a line
        figure.text(
            0.01, 1.01, "\n".join(wrap(title, room)), ha="left", va="bottom", fontsize=10,
            fontweight="bold", color=INK,
        )  # fmt: skip
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names hold dollar signs, and come from anybody's file
    return figure


def _written(figure: Figure, target: Path, dpi: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = target.suffix[1:] or "png"
    drawn = BytesIO()
    with rc_context({"svg.hashsalt": "draftsim"}):  # identifiers in SVG are random otherwise
        figure.savefig(
            drawn, format=kind, dpi=dpi, bbox_inches="tight", facecolor="white",
            metadata=_UNDATED.get(kind),
        )  # fmt: skip
    write_atomically(target, drawn.getvalue())
    return target


def style(axes: Axes, grid: Literal["x", "y", "both"] = "both") -> None:
    """Draw two spines, small ticks and a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(axis=grid, color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)


def series(i: int, points: int) -> dict[str, Any]:
    """Return line and marker of the i-th curve, which has `points` points."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        # Where colours begin again, they do with another line.
        "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": max(points // 8, 1),
        "linewidth": 1.4,
    }
