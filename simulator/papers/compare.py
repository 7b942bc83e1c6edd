"""All rows of the comparison, table by table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from policies.lengths.gammatune import GammaTune
from simulator import published
from simulator.executors import results_of
from simulator.papers import specbound
from simulator.papers.cmasd import FIGURE_2, at_tau, batch_rows, cmasd_rows
from simulator.papers.csd import TRAINING_SHARE, csd_rows, csd_rule
from simulator.papers.gammatune import gammatune_rows
from simulator.papers.ours import Ours, Row, experiment, missing_rows, outcome
from simulator.papers.quantities import SPECBOUND, quantity_rows
from simulator.papers.settings import TABLE as SETTINGS_TABLE
from simulator.papers.settings import setting_rows
from simulator.published import SPECBOUND_1, TABLES, TASKS, PaperTable
from traces.aliases import Count, silent
from traces.errors import DraftsimError, SignalError
from traces.sources.methods import CMASD_ABLATION, FIXED_TAUS, MEAN_TAU
from traces.sources.methods import CSD_ABLATION as CSD_METHODS

SPECBOUND_CELLS = PaperTable(
    SPECBOUND, tuple(f"{task} {column}" for column in ("CR", "SD") for task in TASKS),
    {f"{model} {method}": line.compression + line.speedup
     for (model, method), line in SPECBOUND_1.items()},
)  # fmt: skip
QUANTITIES = "same quantities"
LONGEST = (
    SETTINGS_TABLE, FIGURE_2, published.CMASD_3.name, specbound.FIGURE_4, SPECBOUND, QUANTITIES,
)  # fmt: skip
"""Parts that take as long as all others, the longest first."""
SETTINGS = 100
"""Replays of the recording that the experiments take, in all."""


def side_by_side(
    ours: Ours, progress: Count = silent
) -> list[Row]:  # fmt: skip
    """Return one row per published cell, and per number of ours that has none, sorted by table.

    An experiment that the recording cannot support (no target scores, no signals) is left
    to the rows that need the papers' weights, with one row saying why.  `progress` is told how many
    experiments are done, and of how many.
    """
    experiments: dict[str, Callable[[Ours], list[Row]]] = {
        QUANTITIES: lambda _: quantity_rows(),
        published.GAMMATUNE_2.name: gammatune_rows,
        published.CMASD_3.name: cmasd_rows,
        FIGURE_2: batch_rows,
        published.CSD_ABLATION.name: csd_rows,
        SPECBOUND: specbound.system_rows,
        published.SPECBOUND_2.name: specbound.sampling_rows,
        specbound.FIGURE_4: specbound.early_exit_rows,
        SETTINGS_TABLE: setting_rows,
    }

    def rows_of(name: str) -> list[Row]:
        try:
            return experiments[name](ours)
        except DraftsimError as error:
            return [experiment(name, "our pair", "all", None, str(error))]

    names = [*LONGEST, *(name for name in experiments if name not in LONGEST)]
    tokens = ours.trace.tokens * SETTINGS
    parts = [partial(rows_of, name) for name in names]
    found = dict(zip(names, results_of(parts, tokens, progress=progress), strict=True))
    found[SPECBOUND] += specbound.order_rows(found[SPECBOUND])
    done = [row for name in experiments for row in found[name]]
    if not any(row.table == published.SPECBOUND_5.name for row in done):
        done += _draft_model_distribution(ours)
    for table in (SPECBOUND_CELLS, *TABLES.values()):
        done += missing_rows(table, done)
    order = {name: i for i, name in enumerate(TABLES)}
    return sorted(done, key=lambda row: (row.table.split()[0], order.get(row.table, -1)))


def _draft_model_distribution(ours: Ours) -> list[Row]:
    gamma = min(ours.trace.max_gamma or 24, 24)
    try:
        log = outcome(ours, GammaTune(gamma=min(4, gamma), gamma_max=gamma)).log
        return specbound.distribution_rows(
            log, ours, "GammaTune with a draft model: no early exits were recorded"
        )
    except SignalError as error:
        return [experiment(published.SPECBOUND_5.name, "our pair", "percent", None, str(error))]


REAL_RUNS: tuple[tuple[str, str, float | None], ...] = (
    *((m.policy, m.rule, None) for m in CMASD_ABLATION.values() if m.rule != "exact"),
    *(
        (m.policy, at_tau(m, tau).rule, None)
        for m in CMASD_ABLATION.values()
        if MEAN_TAU in m.rule
        for tau in FIXED_TAUS
    ),
    *((m.policy, csd_rule(m), TRAINING_SHARE) for m in CSD_METHODS.values() if m.rule != "exact"),
)
"""(policy, rule, share to calibrate on) of what is better decoded for real than replayed."""
