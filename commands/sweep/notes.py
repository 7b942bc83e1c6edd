"""Remarks of ``draftsim sweep`` on its table: break-even, and what is only estimated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from commands.common.output import note
from commands.common.printed import print_table

if TYPE_CHECKING:
    import pandas as pd

    from simulator.whatif.sweep.run import Sweep

VARYING = ("alpha", "c", "latency", "gpu", "batch", "context")


def headline(best: pd.DataFrame) -> str:
    """Which policy is fastest where, in one sentence; rows of `simulator.whatif.fastest`.

    Along a single axis every value is named, neighbours with one winner together; over several
    axes the winners are counted.
    """
    axes = [name for name in ("alpha_asked", "c", "latency", "gpu", "batch", "context")
            if best[name].nunique(dropna=False) > 1]  # fmt: skip
    if best.empty:
        return "nothing was swept but the oracle"
    if len(axes) > 1:
        counts = best["policy"].value_counts()
        said = ", ".join(f"{name} ({n / len(best):.0%})" for name, n in counts.head(4).items())
        return f"fastest over {len(best)} points: {said}"
    parts: list[str] = []
    runs = (best["policy"] != best["policy"].shift()).cumsum()
    for _, part in best.groupby(runs, sort=False):
        name, ends = part["policy"].iloc[0], [part["speedup"].min(), part["speedup"].max()]
        figures = " to ".join(dict.fromkeys(f"{value:.3g}x" for value in ends))
        where = "" if not axes else f" at {_along(axes[0], part[axes[0]].tolist())}"
        parts.append(f"{name}{where}" + ("" if name == "no speculation" else f" ({figures})"))
    return f"fastest: {'; '.join(parts)}"


def _along(axis: str, values: list[object]) -> str:
    """The values of an axis in words: its ends, or the one there is."""

    def figure(value: object) -> str:
        if isinstance(value, float):
            return "as recorded" if math.isnan(value) else f"{value:.4g}"
        return str(value)

    name = axis.removesuffix("_asked")
    ends = dict.fromkeys(figure(value) for value in (values[0], values[-1]))
    return f"{name} {' to '.join(ends)}"


def print_thresholds(rows: pd.DataFrame, out: Path | None) -> None:
    """The table of `simulator.whatif.sweep.thresholds`, or some of its points."""
    from simulator.whatif.sweep.thresholds import some_points

    if rows.empty:
        return
    shown = some_points(rows)
    axes = [n for n in VARYING if rows[n].nunique(dropna=False) > 1]
    columns = ["along", "policy", *axes, "side", "says", "below_1", "adapting", "adapting_most"]
    print_table(
        shown.to_dict("records"), columns, "Where speedup is 1, with its interval over prompts"
    )
    if len(shown) < len(rows):
        where = "" if out is None else f" and in {out.stem}.breakeven.parquet"
        note(f"{len(shown)} of {len(rows)} break-even points shown; all with --json{where}")


def say_tilt(study: Sweep) -> None:
    """How wrong tilting to another acceptance was measured to be."""
    if study.error is None:
        return
    note("alpha is tilted: approximate")
    for error, kind in (
        (study.error.lengths, "that read no signal"),
        (study.error.signals, "that read signals"),
    ):
        if error.comparisons:
            note(
                f"  policies {kind}: speedup off by {error.median:.1%} in the median, "
                f"{error.worst:.1%} at worst, in {error.comparisons} comparisons between groups of "
                f"these prompts (i.i.d.: {error.iid_median:.1%} in the median); "
                f"{error.per_logit:.1%} per unit of logit(alpha)"
            )
        else:
            note(f"  policies {kind}: error not measured, these prompts are too alike")


def say_untried(study: Sweep, frame: pd.DataFrame) -> None:
    """Which acceptance rates lie further off than any that tilting was tried at."""
    tilted = frame[(frame["source"] == "tilted") & ~frame["tilt_tried"]]
    if study.error is None or not study.error.lengths.comparisons or tilted.empty:
        return
    rates = sorted(set(tilted["alpha_asked"]))
    asked = ", ".join(f"{r:.3g}" for r in rates if len(rates) < 9) or "see tilt_tried"
    said = f"{len(rates)} of {frame['alpha_asked'].nunique()} acceptance rates ({asked})"
    unknown = " and not known where nothing or everything matches"
    note(
        f"{said} lie outside the measured range of tilting: tilt_error is extrapolated there"
        f"{unknown if tilted['tilt_error'].isna().any() else ''}"
    )


def say_outside(frame: pd.DataFrame) -> None:
    """The row with most passes read outside the measured latencies."""
    outside = frame[frame["outside"] > 0]
    if outside.empty:
        return
    worst = outside.sort_values(["outside", "context", "batch"], na_position="first").iloc[-1]
    context = "" if worst["context"] != worst["context"] else f", context {worst['context']:g}"
    note(
        f"{len(outside)} of {len(frame)} rows read passes outside the measured cells, by a fitted "
        f"roofline: most {worst['policy']} at batch {worst['batch']}{context} "
        f"({worst['outside']:.0%} of its passes); see the column outside"
    )
