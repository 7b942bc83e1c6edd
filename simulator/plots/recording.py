"""Every figure of one recording, and what is not in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from policies.from_file import split_name
from policies.registry import is_bound
from simulator import plots
from simulator.ratios import own_ratios
from simulator.robustness import families_of, speedup_by_gamma
from simulator.summary import summarize, summarize_by_category
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.sources.registry import DRAFT_MODEL

COMPARED = (
    "fixed", "hf-heuristic", "confidence", "gammatune", "svip", "oracle", "eagle", "eagle3",
)  # fmt: skip
"""Policies and systems drawn where a plot holds only a few and all were asked for."""
FEW = 6
"""Names that a line on what is left out still lists."""


class Drawn(NamedTuple):
    """Plots that were written."""

    paths: list[Path]
    left_out: list[str]
    """A line for each plot that does not hold all policies."""


def _fastest(logs: Sequence[RoundLog], speed: Mapping[str, float]) -> RoundLog | None:
    """Return the fastest that one could run and whose text is the target's own."""
    real = [log for log in logs if log.mismatched is None and not is_bound(log.policy)]
    return max(real, key=lambda log: speed[log.policy], default=None)


def save_all(
    trace: Trace, latency: LatencyTable, logs: Sequence[RoundLog], folder: Path,
    validation: pd.DataFrame | None = None, systems: Sequence[RoundLog] = (),
    texts: Sequence[str] | None = None, title: str = "",
) -> Drawn:  # fmt: skip
    """Draw everything a recording shows into `folder`.

    ``logs`` are of the draft model; ``systems``, with drafts or rules of their own, are added where
    speedups are drawn.  ``texts`` are the policies as they were named: these are in
    every plot that can hold them, as is the fastest.  Where all were asked for, plots of a few
    hold `COMPARED`. ``title`` names pair and device above every plot.
    """
    every = [*logs, *systems]
    label = "lower bounds: the log does not tell its draft lengths" if trace.is_lower_bound else ""
    overall = summarize(every, latency)
    speed = dict(zip(overall["policy"], overall["speedup"], strict=True))
    if texts and "all" not in texts:
        some = list(every)
    else:
        wanted = {*COMPARED, *(split_name(text.rpartition("/")[2])[0] for text in texts or ())}
        best = None if trace.is_lower_bound else _fastest(every, speed)
        some = [log for log in every if split_name(log.policy)[0] in wanted or log is best]
        some = some or list(logs)
    if not trace.is_lower_bound:
        some.sort(key=lambda log: -speed[log.policy])
    figures = {
        "speedup": plots.plot_speedup(overall),
        "categories": plots.plot_categories(summarize_by_category(some, latency)),
        "survival": plots.plot_survival(trace),
    }
    said = []
    if others := [log.policy for log in every if log not in some]:
        names = ", ".join(dict.fromkeys(others)) if len(others) <= FEW else f"{len(others)} others"
        said.append(
            f"categories.png and cost_ratio.png hold the fastest and {len(some) - 1} to compare it "
            f"with, without {names}: name policies with --policy to draw them"
        )
    drafted = [log for log in some if log.source == DRAFT_MODEL]
    if drafted:
        own = own_ratios(trace, latency)
        figures["cost_ratio"] = plots.plot_cost_ratio(drafted, latency=latency, own=own)
    elsewhere = [log.policy for log in some if log.source != DRAFT_MODEL]
    if elsewhere:
        said.append(
            f"cost_ratio.png is of the draft model: without {', '.join(dict.fromkeys(elsewhere))}"
        )
    try:
        families = families_of(trace, texts)
    except DraftsimError as error:
        said.append(f"robustness.png is not drawn: {error}")
    else:
        speedups = speedup_by_gamma(trace, families.made, latency, families.gammas)
        figures["robustness"] = plots.plot_robustness(speedups)
        said += families.left_out
    if validation is not None:
        figures["validation"] = plots.plot_validation(validation.dropna(subset=["predicted_s"]))
    paths = [
        plots.save_all_kinds(figure, folder / f"{name}.png", label, title)
        for name, figure in figures.items()
    ]
    return Drawn(paths, said)
