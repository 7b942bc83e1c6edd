"""The figures of a sweep: which of them its axes allow, and where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commands.common.output import note


def draw_maps(frame: Any, folder: Path, label: str = "", title: str = "") -> list[Path]:
    """Write every map that the grid's axes allow into `folder`, and return the PNG files.

    ``label`` is written below each, ``title`` above it.
    """
    from simulator.plots import save_all_kinds
    from simulator.whatif import plots

    drawn = []
    rates = frame["alpha_asked"].notna().all()
    first = frame[frame["batch"] == frame["batch"].iloc[0]]
    by_ratio = first[first["latency"] == "ratio"]
    if rates and by_ratio["alpha_asked"].nunique() > 1 and by_ratio["c"].nunique() > 1:
        drawn += [
            ("break_even_c", plots.plot_break_even(by_ratio)),
            ("map_c_alpha", plots.plot_maps(by_ratio)),
        ]
        if by_ratio["adapting"].notna().all():
            drawn.append(("adapting", plots.plot_adapting(by_ratio)))
    priced = frame[frame["latency"] != "ratio"]
    tables = list(dict.fromkeys(zip(priced["latency"], priced["gpu"], strict=True)))
    for i, (name, gpu) in enumerate(tables):
        part = priced[(priced["latency"] == name) & (priced["gpu"] == gpu)]
        part = part[part["alpha"] == part["alpha"].iloc[0]]
        suffix = f"_{i + 1}" if len(tables) > 1 else ""
        if part["batch"].nunique() > 1 and part["context"].nunique() > 1:
            drawn.append((f"map_context_batch{suffix}", plots.plot_maps(part, "context", "batch")))
        contexts = part["context"].fillna(-1)
        at = part[contexts == contexts.iloc[0]]
        if at["batch"].nunique() > 1 and at["gamma"].nunique() > 1:
            drawn.append((f"map_batch_gamma{suffix}", plots.plot_maps(at, "batch", "gamma")))
    one = priced[priced["alpha"] == priced["alpha"].min()] if len(priced) else priced
    if len(one) and one["batch"].nunique() > 1 and one["context"].fillna(-1).nunique() == 1:
        drawn.append(("speedup_batch", plots.plot_batches(one)))
    if not drawn:
        note("nothing to map: give two values or more of c and alpha, batch and gamma, or "
             "batch and context")  # fmt: skip
    return [save_all_kinds(figure, folder / f"{name}.png", label, title) for name, figure in drawn]
