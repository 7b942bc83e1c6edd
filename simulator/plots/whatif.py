"""Figures of sweeps and ladders, in the style of `simulator.plots`.

Maps look as `simulator.plots.look` has them: darker is faster, hatched slower than no speculation,
the thick line break-even, and the dashed ones where the bounds of the interval are 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from policies.from_file import split_name
from policies.registry import is_bound
from policies.spec import split_items
from simulator.palette import COLOURS, GREY, INK, PolicyPlaces
from simulator.plots import look
from simulator.whatif.breakeven import Surface, break_even, surface
from simulator.whatif.ladder import PARTS
from traces.errors import DraftsimError

NOTHING = (
    "nothing to map: give two values or more of c and alpha, or with --latency of batch and gamma, "
    "or of batch and context"
)
"""Said where `figures` is empty."""
MOST_TICKS = 13
"""Draft lengths up to which each has a tick of its own."""
LABELS = {
    "c": "cost ratio c = T_draft / T_target",
    "alpha": "acceptance α",
    "batch": "batch (sequences)",
    "context": "context (tokens)",
    "gamma": "draft length γ (tokens)",
    "k": "draft length K (tokens)",
}
OTHERS: Mapping[str, Any] = {
    "color": "#B8B8B8", "linewidth": 0.7, "marker": ".", "markersize": 4,
}  # fmt: skip
"""Line of a policy that is drawn without its name."""
ARROW = r"$\uparrow$"
"""Marker of a break-even beyond the largest c."""
MOST_LINES = 7
"""As many lines as colours, dashes and markers can tell apart, besides the thin grey ones."""


def figures(frame: pd.DataFrame) -> dict[str, Figure]:
    """Return every figure that the axes of a sweep's table allow, by file name."""
    drawn: list[tuple[str, Figure]] = []
    places = PolicyPlaces()
    rates = frame["alpha_asked"].notna().all()
    first = frame[frame["batch"] == frame["batch"].iloc[0]]
    by_ratio = first[first["latency"] == "ratio"]
    of_batch = _only(frame, "batch", "batch")
    if rates and by_ratio["alpha_asked"].nunique() > 1 and by_ratio["c"].nunique() > 1:
        if np.isfinite(break_even(by_ratio, "c")["break_even"].to_numpy(float)).any():
            drawn.append(("break_even_c", plot_break_even(by_ratio, of_batch.rstrip(), places)))
        drawn.append(("map_c_alpha", plot_maps(by_ratio, of=of_batch)))
        if by_ratio["adapting"].notna().all():
            drawn.append(("adapting", plot_adapting(by_ratio, of_batch.rstrip())))
    priced = frame[frame["latency"] != "ratio"]
    tables = tables_of(frame)
    for suffix, (name, gpu) in tables.items():
        part = priced[(priced["latency"] == name) & (priced["gpu"] == gpu)]
        of_rate = _only(part, "alpha_asked", "α")
        part = part[part["alpha"] == part["alpha"].iloc[0]]
        where = f" on {gpu}" if isinstance(gpu, str) and gpu not in name else ""
        of = (f"{name}{where}\n" if len(tables) > 1 else "") + of_rate
        if part["batch"].nunique() > 1 and part["context"].nunique() > 1:
            # The cache of some batches may fit at the shorter contexts alone.
            held = part.groupby("batch")["context"].transform("nunique")
            full = part[held == part["context"].nunique()]
            if full["batch"].nunique() > 1:
                left = sorted({*part["batch"]} - {*full["batch"]})
                without = f"without batch {', '.join(map(str, left))}, too large at some contexts\n"
                maps = plot_maps(full, "context", "batch", of=of + without * bool(left))
                drawn.append((f"map_context_batch{suffix}", maps))
        contexts = part["context"].fillna(-1)
        at = part[contexts == contexts.iloc[0]]
        if at["batch"].nunique() > 1 and len(_by_length(at)):
            of += _only(part, "context", "context")
            drawn.append((f"map_batch_gamma{suffix}", plot_maps(at, "batch", "gamma", of=of)))
    one = priced[priced["alpha"] == priced["alpha"].min()] if len(priced) else priced
    if len(one) and one["batch"].nunique() > 1 and one["context"].fillna(-1).nunique() == 1:
        lowest = _only(priced.sort_values("alpha"), "alpha_asked", "α").rstrip()
        drawn.append(("speedup_batch", plot_batches(one, lowest, places)))
    return dict(drawn)


def _only(frame: pd.DataFrame, column: str, called: str) -> str:
    """Return the first value of an axis with several, which a figure shows alone: for its title."""
    values = frame[column].dropna().unique()
    return f"{called} = {values[0]:g}\n" if len(values) > 1 else ""


def tables_of(frame: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return the latency table and GPU of each figure that shows one of several, by the end of its
    name; the end is empty if there is one table.
    """
    priced = frame[frame["latency"] != "ratio"]
    found = list(dict.fromkeys(zip(priced["latency"], priced["gpu"], strict=True)))
    return {f"_{i + 1}" if len(found) > 1 else "": one for i, one in enumerate(found)}


def plot_maps(frame: pd.DataFrame, x: str = "c", y: str = "alpha", of: str = "") -> Figure:
    """Draw the speedup of each policy over two axes, with the line of break-even.

    ``frame`` holds one value of every other axis; where y or x is gamma, a map is drawn
    of all policies that differ in it alone.  ``of`` begins the title of every map.
    """
    if "gamma" in (x, y):
        frame = _by_length(frame)
    names = list(dict.fromkeys(frame["policy"].astype(str)))
    if not names:
        raise DraftsimError("no policy to map")
    surfaces = [surface(frame[frame["policy"] == n], x, y) for n in names]
    if any(s.values.shape[0] < 2 or s.values.shape[1] < 2 for s in surfaces):
        raise DraftsimError(f"a map needs two values or more of both {x} and {y}")
    return _maps([(f"{of}{n}", found) for n, found in zip(names, surfaces, strict=True)], x, y)


def _by_length(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of policies with several gammas, which their names then leave out."""

    def named(policy: str) -> str:
        name, given = split_name(policy)
        others = [item for item in split_items(given) if not item.startswith("gamma=")]
        return ":".join([name, *([",".join(others)] if others else [])])

    rows = frame.assign(policy=frame["policy"].astype(str).map(named))
    return rows[rows.groupby("policy")["gamma"].transform("nunique") > 1]


def plot_break_even(
    frame: pd.DataFrame, of: str = "", places: PolicyPlaces | None = None
) -> Figure:
    """Draw the largest c with a speedup over alpha: a line per policy.

    The band is where the bounds of the speedup's interval cross 1.  If there are many policies,
    those with the largest c are named and the others thin.  A policy with a speedup at every c has
    an arrow at the largest.  ``of`` is the legend's title.  ``places`` are those of figures drawn
    before, whose colours are kept.
    """
    found, key = break_even(frame, "c"), "alpha_asked"
    names = list(dict.fromkeys(found["policy"].astype(str)))
    figure, axes = look.canvas(6.4, 4.4)
    chosen = names if len(names) <= MOST_LINES else _furthest(found, names)
    top, span = float(found["last"].max()), float(np.ptp(found[key]))

    def beyond(part: pd.DataFrame, colour: str, place: int) -> None:
        # Next to each other, so that all are seen.
        at = part.loc[np.isinf(part["break_even"]), key] + 0.011 * span * place
        axes.scatter(at, np.full(len(at), top), marker=ARROW, s=60, color=colour, zorder=3)

    for name in (n for n in names if n not in chosen):
        part = found[found["policy"] == name].sort_values(key)
        axes.plot(part[key], _finite(part["break_even"]), **OTHERS)
        beyond(part, OTHERS["color"], 0)
    places_of = (places or PolicyPlaces()).of(chosen)
    for i, name in enumerate(chosen):
        part = found[found["policy"] == name].sort_values(key)
        at = part[key].to_numpy(float)
        mid = _finite(part["break_even"])
        low, high = (part[f"break_even{end}"].clip(upper=top) for end in ("_lo", "_hi"))
        raw = part["break_even"].to_numpy(float)
        label = name
        if np.isinf(raw).all():
            label += " (a speedup everywhere)"
        elif np.isnan(raw).all():
            label += " (no line)"
        # A point without a neighbour is seen by its marker alone, of a bound as well.
        line_of: dict[str, Any] = {"marker": "D", "markersize": 4}
        line_of |= look.series(places_of.get(name, 0), len(at), name)
        axes.fill_between(
            at, low, high, where=np.isfinite(mid), color=line_of["color"], alpha=0.12, linewidth=0
        )
        axes.plot(at, mid, label=label, **line_of)
        beyond(part, line_of["color"], i - len(chosen) // 2)
    reached = np.isinf(found["break_even"]).any()
    if reached:
        said = f"a speedup at every c, up to {top:g}"
        axes.scatter([], [], marker=ARROW, s=60, color=INK, label=said)
    if others := len(names) - len(chosen):
        axes.plot([], [], label=f"{others} others", **OTHERS)
    shown = [top] * int(reached) + [
        v for line in axes.get_lines() for v in np.asarray(line.get_ydata(), float)
    ]
    own = np.asarray(shown, dtype=float)
    own = own[np.isfinite(own)]
    if len(own) and (own > 0).all():
        axes.set_yscale("log")
        look.log_ticks(axes.yaxis, own, swept=False)
    axes.set_xlim(found[key].min() - 0.05 * span, found[key].max() + 0.05 * span)
    axes.set_xlabel(LABELS["alpha"])
    axes.set_ylabel(f"largest {LABELS['c']}\nwith a speedup")
    look.style(axes, "both")
    look.legend(figure, 2, of)
    return figure


def plot_adapting(frame: pd.DataFrame, of: str = "") -> Figure:
    """Plot what adapting could bring: oracle and best fixed length over c and alpha.

    Left the best fixed length itself, right the oracle's speedup less its speedup; ``of`` above.
    """
    rows = frame
    for column, what in (("oracle", "oracle"), ("best_fixed", "fixed length")):
        if rows[column].isna().any():
            raise DraftsimError(f"the recording allows no {what} to compare with")
    rows = rows.drop_duplicates([c for c in rows.columns if c in ("c", "alpha", "alpha_asked")])
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(of, fontsize=9, color=INK)
    for axes, column, label in (
        (left, "best_gamma", "best fixed γ (0: do not speculate)"),
        (right, "adapting", "oracle − best fixed (×)"),
    ):
        found = surface(rows.assign(speedup=rows[column]), "c", "alpha")
        log = _scale(axes, "c", "alpha", found)
        sides = [look.cell_edges(v, g) for v, g in zip((found.x, found.y), log, strict=True)]
        image = axes.pcolormesh(*sides, found.values, cmap=look.SHADES, rasterized=True)
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=8)
        axes.set_xlabel(LABELS["c"])
    left.set_ylabel(LABELS["alpha"])
    return figure


def plot_batches(frame: pd.DataFrame, of: str = "", places: PolicyPlaces | None = None) -> Figure:
    """Draw the speedup against the batch, a panel for each latency table on each GPU.

    The fixed lengths are one line, at each batch the fastest of them; bands are the intervals over
    prompts.  Of many policies the fastest on average are drawn, and the legend counts the others.
    ``of`` is the legend's title, and ``places`` are those of figures drawn before, whose colours
    are kept.  Raises DraftsimError if fewer than two batches or no latency table were swept.
    """
    places = places or PolicyPlaces()
    rows = frame[frame["latency"] != "ratio"]
    rows = rows.assign(gpu=rows["gpu"].astype(str))
    names = list(dict.fromkeys(zip(rows["latency"], rows["gpu"], strict=True)))
    if not names or rows["batch"].nunique() < 2:
        raise DraftsimError("speedup against the batch needs --latency and two or more batches")
    figure = Figure(figsize=(3.0 * len(names) + 1.6, 3.2), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    fixed = rows["family"] == "fixed"
    every = list(dict.fromkeys(rows.loc[~fixed, "policy"]))
    means = rows.groupby("policy", observed=True)["speedup"].mean()
    chosen = sorted(every, key=lambda name: -float(means[name]))[: MOST_LINES - 1]
    others = [name for name in every if name in chosen]
    for axes, (name, gpu) in zip(panels, names, strict=True):
        own = rows[(rows["latency"] == name) & (rows["gpu"] == gpu)]
        by_speed = own[own["family"] == "fixed"].sort_values("speedup")
        best = by_speed.drop_duplicates("batch", keep="last")
        swept = by_speed["policy"].unique()
        fixed_name = str(swept[0]) if len(swept) == 1 else "best fixed length"
        lines = [(fixed_name, best)] if len(best) else []
        lines += [(policy, own[own["policy"] == policy]) for policy in others]
        at = places.of(label for label, _ in lines)
        for label, found in lines:
            line = found.sort_values("batch")
            line_of = look.series(at.get(label, 0), len(line), label)
            called = f"{label}\n(knows every outcome)" if is_bound(label) else label
            axes.plot(line["batch"], line["speedup"], label=called, **line_of)
            axes.fill_between(
                line["batch"], line["speedup_lo"], line["speedup_hi"],
                color=line_of["color"], alpha=0.18, linewidth=0,
            )  # fmt: skip
        axes.axhline(1, color=INK, linewidth=0.8)
        look.powers_of_two(axes, sorted(own["batch"].unique()))
        axes.set_xlabel(LABELS["batch"])
        several = sum(name == other for other, _ in names) > 1
        axes.set_title(f"{name} on {gpu}" if several else name, fontsize=8, color=INK)
        look.style(axes, "both")
    panels[0].set_ylabel("speedup over no speculation (×)")
    if left := len(every) - len(others):
        panels[0].plot([], [], " ", label=f"({left} slower, not drawn)")
    look.legend(figure, title=of, of=panels[0])
    return figure


def plot_ladder(rungs: pd.DataFrame) -> Figure:
    """Plot time per token of every rung as shares of plain decoding's; rows of `ladder.ladder`."""
    figure, axes = look.canvas(8.2, 0.3 * len(rungs) + 1.4)
    y = np.arange(len(rungs))[::-1]
    labels = {
        "useful_draft": "drafts accepted", "wasted_draft": "other drafting",
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
            text += f"  {100 * share[i]:.0f}%"
        axes.text(
            float(left[i]) + 0.01, float(y[i]), text, va="center", fontsize=7.5, color=INK,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1},  # over the grid
        )  # fmt: skip
    names = [
        f"{p} ({r})" if r == "best-fixed" else str(p)
        for p, r in zip(rungs["policy"], rungs["rung"], strict=True)
    ]
    axes.set_yticks(y, names)
    for tick, rung in zip(axes.get_yticklabels(), rungs["rung"], strict=True):
        tick.set_fontweight("normal" if rung == "policy" else "bold")
    axes.set_xlim(0, 1.32 * max(1.0, float(left.max())))
    axes.set_ylim(-0.8, len(rungs) - 0.2)
    axes.set_xlabel("time per token, no speculation = 1;  speedup [95% interval]  "
                    "share of the oracle's gain")  # fmt: skip
    look.style(axes, "x")
    look.legend(figure, 5)
    return figure


def _furthest(found: pd.DataFrame, names: Sequence[str]) -> list[str]:
    """Return the `MOST_LINES` of `names` with the largest mean c, in their order."""
    reach = {}
    for name in names:
        value = found.loc[found["policy"] == name, "break_even"].to_numpy(float)
        # One that is faster everywhere ends beyond all points, one that is nowhere short of them.
        ends = found[["first", "last"]].to_numpy(float)
        far, near = 2 * ends.max() - ends.min(), 2 * ends.min() - ends.max()
        reach[name] = float(np.where(np.isnan(value), near, np.minimum(value, far)).mean())
    best = sorted(names, key=lambda n: -reach[n])[:MOST_LINES]
    return [n for n in names if n in best]


def _finite(column: pd.Series) -> npt.NDArray[np.float64]:
    return column.replace([np.inf, -np.inf], np.nan).to_numpy(float)


def _maps(maps: Sequence[tuple[str, Surface]], x: str, y: str) -> Figure:
    """Draw maps of speedups over x and y with one scale, each under its title."""
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.1 + 2.9 * columns, 0.8 + 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    scale = look.shading(*(found.values for _, found in maps))
    image: Any = None
    for i, (title, found) in enumerate(maps):
        axes = grid[i // columns][i % columns]
        log = _scale(axes, x, y, found)
        image = look.draw_map(axes, found.x, found.y, found.values, scale, log=log)
        for bound in (found.low, found.high):
            if np.isfinite(bound).all():
                look.draw_edge(axes, found.x, found.y, bound, log=log, bound=True)
        axes.set_title(title, fontsize=9, color=INK)
        axes.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(maps))
    for blank in grid.ravel()[len(maps) :]:
        blank.set_visible(False)
    figure.supxlabel(LABELS[x], fontsize=9)
    figure.supylabel(LABELS[y], fontsize=9)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02)
    bar.set_label("speedup over no speculation (hatched: slower)", fontsize=8)
    look.mark_bar(bar)
    return figure


def _scale(axes: Axes, x: str, y: str, found: Surface) -> tuple[bool, bool]:
    """Scale both axes as their values ask for; which of x and y are logarithmic."""
    logs = []
    for name, points, axis, put in (
        (x, found.x, axes.xaxis, axes.set_xscale), (y, found.y, axes.yaxis, axes.set_yscale)
    ):  # fmt: skip
        logs.append(name in ("c", "batch", "context") and bool((points > 0).all()))
        if logs[-1]:
            put("log")
            look.log_ticks(axis, points)
        elif name == "alpha" and len(points) <= 6:
            axis.set_major_locator(FixedLocator(points.tolist()))
        elif name in ("gamma", "k"):
            # A tick between the lengths that were priced would name one that was not.
            few = len(points) <= MOST_TICKS
            axis.set_major_locator(
                FixedLocator(points.tolist()) if few else MaxNLocator(integer=True)
            )
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    return logs[0], logs[1]


def plot_surface(surface: pd.DataFrame) -> Figure:
    """Draw the speedup over batch and context, a map a draft length; hatched is slower.

    With one batch size or one context, the map is over the other and the draft length.
    ``surface`` as in `simulator.tune.breakeven`.  Raises DraftsimError if neither has two values.
    """
    drafted = surface[surface["k"] > 0]
    axes_of = [name for name in ("context", "batch") if drafted[name].nunique() > 1]
    if not axes_of:
        raise DraftsimError("one batch size and one context make no map: ask for more of them")
    maps: list[tuple[str, pd.DataFrame]]
    if len(axes_of) == 2:
        x, y = axes_of
        maps = [(f"K = {k}", part) for k, part in drafted.groupby("k")]
    else:
        x, y = axes_of[0], "k"
        other = "context" if x == "batch" else "batch"
        maps = [(f"{other} {drafted[other].iloc[0]}", drafted)]
    surfaces = []
    for title, part in maps:
        table = part.pivot_table(index=y, columns=x, values="speedup")
        across, up, values = (v.to_numpy(float) for v in (table.columns, table.index, table))
        unknown = np.full_like(values, np.nan)
        surfaces.append((title, Surface(across, up, values, unknown, unknown)))
    return _maps(surfaces, x, y)
