"""The figure of a break-even surface: a map of speedups for every draft length."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from simulator.palette import INK
from simulator.plots.look import draw_map, log_ticks, mark_bar, shading
from traces.errors import DraftsimError

LABELS = {"batch": "batch (requests)", "context": "context (tokens)", "k": "draft length K"}


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
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.3 + 2.9 * columns, 0.8 + 2.5 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    scale = shading(drafted["speedup"].to_numpy())
    image: Any = None
    for i, (title, part) in enumerate(maps):
        panel = panels[i // columns][i % columns]
        table = part.pivot_table(index=y, columns=x, values="speedup")
        across, up = table.columns.to_numpy(float), table.index.to_numpy(float)
        log = tuple(name != "k" and v[0] > 0 for name, v in ((x, across), (y, up)))
        image = draw_map(panel, across, up, table.to_numpy(), scale, log=(log[0], log[1]))
        for axis, points, own in ((panel.xaxis, across, log[0]), (panel.yaxis, up, log[1])):
            if own:
                (panel.set_xscale if axis is panel.xaxis else panel.set_yscale)("log")
                log_ticks(axis, points)
        panel.set_title(title, fontsize=9, color=INK)
        panel.tick_params(labelsize=8)
    for blank in panels.ravel()[len(maps) :]:
        blank.set_visible(False)
    figure.supxlabel(LABELS[x], fontsize=9)
    figure.supylabel(LABELS[y], fontsize=9)
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
    bar.set_label("speedup over no speculation (hatched: slower)", fontsize=8)
    mark_bar(bar)
    return figure
