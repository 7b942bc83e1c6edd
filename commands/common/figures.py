"""The set of plots drawn from one recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from policies.core import DraftPolicy
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.replay.rounds import RoundLog

COMPARED = (
    "fixed", "hf-heuristic", "confidence", "gammatune", "svip", "oracle", "eagle", "eagle3",
)  # fmt: skip
"""Policies and systems drawn where a plot holds only a few, by name without parameters."""


def robustness_families(max_gamma: int) -> dict[str, Callable[[int], DraftPolicy]]:
    """Policies that start from a draft length, as functions of it (GammaTune, Table 2)."""
    from policies import Confidence, Fixed, GammaTune, GammaTunePlus, HFHeuristic

    return {
        "fixed": Fixed,
        "hf-heuristic": lambda gamma: HFHeuristic(gamma=gamma, gamma_max=max_gamma),
        "confidence": lambda gamma: Confidence(gamma=gamma),
        "gammatune": lambda gamma: GammaTune(gamma=gamma, gamma_max=max_gamma),
        "gammatune-plus": lambda gamma: GammaTunePlus(gamma=gamma, gamma_max=max_gamma),
    }


def save_all(
    trace: Trace,
    latency: LatencyTable,
    logs: Sequence[RoundLog],
    folder: Path,
    validation: pd.DataFrame | None = None,
    systems: Sequence[RoundLog] = (),
) -> list[Path]:
    """Draw everything a recording shows into `folder`; the paths written.

    ``logs`` are of the draft model; ``systems``, with drafts of their own, stand beside them where
    speedups are drawn.
    """
    from simulator import plots
    from simulator.ratios import own_ratios
    from simulator.robustness import INITIAL_GAMMAS, speedup_by_gamma
    from simulator.summary import summarize, summarize_by_category

    label = "lower bounds: the log does not tell its draft lengths" if trace.is_lower_bound else ""
    some, beside = (
        [log for log in group if log.policy.partition(":")[0] in COMPARED]
        for group in (logs, systems)
    )
    some = some or list(logs)
    overall = summarize([*logs, *systems], latency)
    both = [*some, *beside]
    if not trace.is_lower_bound:
        speed = dict(zip(overall["policy"], overall["speedup"], strict=True))
        for shown in (some, both):
            shown.sort(key=lambda log: -speed[log.policy])
    figures = {
        "speedup": plots.plot_speedup(overall),
        "categories": plots.plot_categories(summarize_by_category(both, latency)),
        "cost_ratio": plots.plot_cost_ratio(some, latency=latency, own=own_ratios(trace, latency)),
        "survival": plots.plot_survival(trace),
    }
    if trace.max_gamma is not None and trace.max_gamma >= max(INITIAL_GAMMAS):
        families = robustness_families(trace.max_gamma)
        figures["robustness"] = plots.plot_robustness(speedup_by_gamma(trace, families, latency))
    if validation is not None:
        figures["validation"] = plots.plot_validation(validation.dropna(subset=["predicted_s"]))
    return [
        plots.save(figure, folder / f"{name}.png", label=label) for name, figure in figures.items()
    ]
