"""The look of all figures: how they are saved, styled and shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from policies.arrays import Floats
from policies.registry import is_bound
from simulator.palette import COLOURS, DASHES, GREY, INK, MARKERS
from traces.store.writing import write_atomically


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, and its one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def legend(figure: Figure, columns: int = 1, title: str = "", of: Axes | None = None) -> None:
    """Put a legend next to the axes, or above them in several columns.

    It names every curve, or those of the axes `of`.
    """
    curves = () if of is None else of.get_legend_handles_labels()
    figure.legend(
        *curves, loc="outside upper left" if columns > 1 else "outside right upper",
        ncols=columns, frameon=False, fontsize=8, title=title or None, title_fontsize=8,
    )  # fmt: skip


def save(figure: Figure, path: str | Path, dpi: int = 200, title: str = "") -> Path:
    """Write a figure as PNG (or as its suffix says), make its folder, and return its path.

    ``title`` is written below it: pair and device.
    """
    return _written(labelled(figure, "", title), Path(path), dpi)


def save_all_kinds(figure: Figure, path: str | Path, label: str = "", title: str = "") -> Path:
    """Write a figure as PNG, and with the same name as SVG and PDF; return the PNG's path.

    ``title`` is as in `save`; ``label``, below it, is an assumption that the numbers depend on.
    """
    target = Path(path).with_suffix(".png")
    labelled(figure, label, title)
    # Placed and measured once: each kind of file would otherwise draw the whole figure twice more.
    figure.draw_without_rendering()
    figure.set_layout_engine(None)
    box = figure.get_tightbbox().padded(rcParams["savefig.pad_inches"])
    for kind in ("svg", "pdf"):
        _written(figure, target.with_suffix(f".{kind}"), 200, box)
    return _written(figure, target, 200, box)


def labelled(figure: Figure, label: str, title: str = "") -> Figure:
    """Write `title` and `label` below a figure: legends lie above, at the top of all that is drawn.

    A title above it would be drawn over them.
    """
    room = max(30, int(11 * figure.get_figwidth()))  # characters of the title in a line
    lines = wrap(title, room)
    if lines:
        figure.text(
            0.01, -0.01, "\n".join(lines), ha="left", va="top", fontsize=9, fontweight="bold",
            color=INK,
        )  # fmt: skip
    if label:
        below = 0.16 * len(lines) / figure.get_figheight()  # inches of a line
        figure.text(0.01, -0.01 - below, label, ha="left", va="top", fontsize=8, color=COLOURS[1])
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names hold dollar signs, and come from anybody's file
    return figure


def _written(
    figure: Figure, target: Path, dpi: int, box: Bbox | Literal["tight"] = "tight"
) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = target.suffix[1:] or "png"
    drawn = BytesIO()
    # Without dates, the same figure gives the same file.
    dates = {"svg": ["Date"], "pdf": ["CreationDate", "ModDate"]}.get(kind)
    with rc_context({"svg.hashsalt": "draftsim"}):  # identifiers in SVG are random otherwise
        figure.savefig(
            drawn, format=kind, dpi=dpi, bbox_inches=box, facecolor="white",
            metadata=dates and dict.fromkeys(dates),
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


BOUND: Mapping[str, Any] = {"color": GREY, "linestyle": (0, (1, 1.5)), "linewidth": 2.0}
"""Line of a bound, which no policy reaches."""


def series(i: int, points: int, policy: str = "") -> dict[str, Any]:
    """Return line and marker of the i-th curve, or of a bound if `policy` is one."""
    if is_bound(policy):
        return {**BOUND}
    return {
        "color": COLOURS[i % len(COLOURS)],
        # Where colours begin again, they do with another line.
        "linestyle": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 4,
        "markevery": max(points // 8, 1),
        "linewidth": 1.4,
    }


SHADES = LinearSegmentedColormap.from_list("speedup", ["#ECF4FA", "#004978"])
APART = 0.12
"""Least distance of two labels on an axis, as a share of the span of its points."""
LEAST_REACH = 0.05
"""A map whose best speedup is nearer to 1 than this is not shaded darker for it."""


def shading(*values: npt.ArrayLike) -> Normalize:
    """Return the scale from a speedup of 1 to the largest of `values`, for maps side by side."""
    best = max((float(np.nanmax(v, initial=1.0)) for v in map(np.asarray, values)), default=1.0)
    return Normalize(1.0, max(best, 1 + LEAST_REACH))


def draw_map(
    axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, values: npt.ArrayLike, scale: Normalize,
    *, log: tuple[bool, bool] = (False, False),
) -> Any:  # fmt: skip
    """Draw speedups, shape (y, x), as cells about their points; the image.

    The cells end half-way to the next point, in the logarithm where `log` says so of x or y.
    """
    shown = np.asarray(values, dtype=float)
    sides = [cell_edges(np.asarray(v, dtype=float), g) for v, g in zip((x, y), log, strict=True)]
    # What does not pay is left out of the mesh, so that the hatched ground shows.
    axes.add_patch(
        Rectangle(
            (0, 0), 1, 1, transform=axes.transAxes, zorder=0, linewidth=0, hatch="////",
            facecolor="white", edgecolor="#9A9A9A",
        )
    )  # fmt: skip
    image = axes.pcolormesh(
        *sides, np.ma.masked_where(~(shown >= 1), shown), cmap=SHADES, norm=scale, rasterized=True,
    )  # fmt: skip
    draw_edge(axes, x, y, shown, log=log)
    return image


def draw_edge(
    axes: Axes, x: npt.ArrayLike, y: npt.ArrayLike, values: npt.ArrayLike,
    *, log: tuple[bool, bool] = (False, False), bound: bool = False,
) -> None:  # fmt: skip
    """Draw the line between cells with and without a speedup: thick, or dashed for a bound."""
    faster = np.asarray(values, dtype=float) >= 1
    if faster.all() or not faster.any():
        return
    # Both ends of every cell take its value: the contour runs along the cells' sides.
    ends = []
    for v, g in zip((x, y), log, strict=True):
        side = cell_edges(np.asarray(v, dtype=float), g)
        slack = 1e-3 * np.diff(side)
        ends.append(np.stack([side[:-1] + slack, side[1:] - slack], axis=1).ravel())
    step = np.repeat(np.repeat(faster.astype(float), 2, axis=0), 2, axis=1)
    axes.contour(*ends, step, [0.5], colors=INK, linestyles="--" if bound else "-",
                 linewidths=0.9 if bound else 2.4)  # fmt: skip


def powers_of_two(axes: Axes, ticks: Sequence[int]) -> None:
    """Make the x axis logarithmic, with ticks at these numbers alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def mark_bar(bar: Colorbar) -> None:
    """Mark the colour bar of a map, from break-even to the best."""
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}×")
    bar.ax.tick_params(labelsize=8)


def log_ticks(axis: Axis, points: npt.ArrayLike, swept: bool = True) -> None:
    """Put few labels on a logarithmic axis, at the points themselves if they are few and `swept`.

    A point that is nearer than `APART` to the label before it has none.
    The small ticks between them are left out: they would be labelled larger than the others.
    """
    at = np.unique(np.asarray(points, dtype=float))
    if swept and len(at) <= 6:
        kept = [at[0]]
        for value in at[1:]:
            if np.log(value / kept[-1]) >= APART * np.log(at[-1] / at[0]):
                kept.append(value)
        axis.set_major_locator(FixedLocator(kept))
    else:
        span = at[-1] / at[0]
        subs = (1,) if span > 100 else (1, 2, 5) if span > 10 else (1, 1.5, 2, 3, 4, 5, 7)
        axis.set_major_locator(LogLocator(10, subs=subs, numticks=9))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
    axis.set_minor_locator(NullLocator())


def cell_edges(points: Floats, log: bool) -> Floats:
    """Return sides of the cells about `points`, one more than these."""
    at = np.log(points) if log else points
    if len(at) < 2:
        sides = np.array([at[0] - 0.5, at[0] + 0.5])
    else:
        half = np.diff(at) / 2
        sides = np.concatenate([[at[0] - half[0]], at[:-1] + half, [at[-1] + half[-1]]])
    return np.asarray(np.exp(sides) if log else sides)
