"""Where speculation stops giving a speedup: speedup over batch size, context and draft length.

A round of K drafts gives a speedup if it emits more tokens than steps without speculation in the
same time.  So the acceptance length that breaks even is the seconds of a round over those of a
step without speculation.  It depends on costs alone, not on a drafter's acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.batch.base import IterationCost
from simulator.aggregate.advice import informative
from simulator.aggregate.hazard import interval_of
from simulator.aggregate.positions import Positions
from simulator.aggregate.server import ANY_TARGET, ServerFit, ServerRun, priors_of
from simulator.bootstrap import Interval
from simulator.formulas.leviathan import acceptance_rate
from simulator.tune.formats import BY_BATCH, BY_LENGTH
from simulator.tune.launch import TARGET, launch_line
from simulator.tune.vllm import table_rows
from traces.digits import counted
from traces.errors import DraftsimError

COLUMNS = (
    "batch", "context", "k", "emitted", "needed", "needed_rate", "speedup", "low", "high",
    "speedup_above_1", "tokens_per_s",
)  # fmt: skip
"""Columns of a surface.

* ``emitted`` is the acceptance length, ``needed`` the one at which speculation breaks even,
  ``needed_rate`` that as an acceptance rate alike at every position (None if no rate does).
* ``speedup`` is over an engine without a drafter; ``low`` and ``high`` are its interval, from the
  acceptance where it is extended to other draft lengths, and from the costs where they are fitted
  to runs.
* ``k`` 0 is an engine with a drafter that drafts nothing: its drafter reads along.
"""
IDLE = ServerRun(1, 1, 1.0, emitted=1.0, drafted=0.0)
"""An engine with a drafter that drafts nothing: its drafter still takes a pass in every step."""
DRAWS = 2000
"""Servers drawn from the priors for a plan without runs."""
EXACT = 0.05
"""Standard deviation of a speedup at which a plan ends."""
MOST_RUNS = 24
"""Longest plan."""


class SurfaceCell(NamedTuple):
    """One cell of the surface."""

    batch: int
    context: int
    k: int


def priced_surface(
    cost: IterationCost, plain: IterationCost, acceptance: Positions, loads: Sequence[SurfaceCell],
    level: float = 0.8,
) -> pd.DataFrame:  # fmt: skip
    """Return the surface from a latency table's costs (columns `COLUMNS`).

    ``cost`` is of an engine with the drafter, ``plain`` of one without (`TableCost.speculates`).
    """
    emitted = {k: acceptance.emitted(k, level) for k in {load.k for load in loads}}
    rows = []
    for batch, context, k in loads:
        plain_s = plain(batch, 0, batch, context)
        # At K = 0 the draft model still reads every token (`policies.batch.base.KeptInStep`).
        round_s = cost(batch, max(k, 1), batch * (k + 1), context)
        needed = round_s / plain_s
        rows.append(_row(batch, context, k, emitted[k], needed, emitted[k].scaled(1 / needed),
                         batch * emitted[k].value / round_s))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def measured_surface(
    server: ServerFit,
    acceptance: Positions | None,
    loads: Sequence[SurfaceCell],
    level: float = 0.8,
) -> pd.DataFrame:
    """Return the surface of a server calibrated from its runs.

    ``acceptance`` replaces that of the runs, which may have been dictated (vLLM's
    ``rejection_sample_method: "synthetic"``).
    """
    if acceptance is not None:
        server = server.at_acceptance(acceptance.known)
    _, prompts = server.usual
    rows = []
    for batch, context, k in loads:
        plain = server.tokens_per_s(batch, 0, context, prompts, noisy=False)
        like = None if k else IDLE
        speeds = server.tokens_per_s(batch, max(k, 1), context, prompts, noisy=False, like=like)
        emitted = interval_of(server.emitted(k), level)
        gain = interval_of(speeds / plain, level)
        rows.append(_row(batch, context, k, emitted, emitted.value / gain.value, gain,
                         float(np.median(speeds))))  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(
    batch: int, context: int, k: int, emitted: Interval, needed: float, gain: Interval,
    speed: float,
) -> tuple[Any, ...]:  # fmt: skip
    rate = acceptance_rate(needed, k) if k and 1 <= needed <= k + 1 else None
    return (
        batch, context, k, emitted.value, needed, rate, gain.value, gain.low, gain.high,
        gain.value > 1, speed,
    )  # fmt: skip


class LoadTable(NamedTuple):
    """Draft lengths by one dimension of the load, as vLLM reads them, and what they lose."""

    document: dict[str, Any] | None
    """None if no K above 0 is fastest anywhere."""
    loses: float
    """Mean loss of tokens/s against the best K of every cell."""
    slower: Mapping[int, tuple[int, float]] = {}
    """K and loss against an engine without a drafter, by the loads at which every K loses."""

    def said_slower(self, along: str, over: str = "") -> str:
        """Return at which loads every K is slower than no speculation; empty if at none.

        ``over`` says what the losses are means over.
        """
        if self.document is None or not self.slower:
            return ""
        at = ", ".join(f"{loss:.1%} at {along} {load:,}" for load, (_, loss) in self.slower.items())
        kept = sorted({k for k, _ in self.slower.values()} - {0})
        keeps = (
            f": the table keeps {' and '.join(f'K={k}' for k in kept)}, because" if kept else ";"
        )
        return (
            f"every K is slower than an engine without a drafter by {at}{over}{keeps} K = 0 still "
            "runs the drafter"
        )


def vllm_tables(surface: pd.DataFrame) -> dict[str, LoadTable]:
    """Return K by ``batch`` size and K by ``seq_len`` with the highest mean speedup.

    ``num_speculative_tokens_per_seq_len`` is the key of vllm-project/vllm pull request 54801: rows
    [lo, hi, K] over the tokens of a sequence.  K is the same for all contexts in one table and for
    all batch sizes in the other, so a table loses where the best K depends on both.
    """
    cube = surface.pivot_table(index=["batch", "context"], columns="k", values="speedup")
    lengths = [int(k) for k in cube.columns]
    gains = np.log(cube.to_numpy())
    best = gains.max(axis=1)
    found = {}
    for called, level, key in (("batch", "batch", BY_BATCH), ("seq_len", "context", BY_LENGTH)):
        at = cube.index.get_level_values(level).to_numpy()
        values = sorted({int(v) for v in at})
        picked = {v: int(gains[at == v].mean(axis=0).argmax()) for v in values}
        own = np.array([gains[i, picked[int(v)]] for i, v in enumerate(at)])
        lost = {v: float(1 - np.exp(gains[at == v].mean(axis=0).max())) for v in values}
        slower = {v: (lengths[picked[v]], loss) for v, loss in lost.items() if loss > 0}
        chosen = np.array([[picked[v] for v in values]])
        if key == BY_BATCH:
            rows = table_rows(chosen.T, values, [None], lengths)
        else:
            rows = [row[2:] for row in table_rows(chosen, [1], values, lengths)]
        longest = max(row[-1] for row in rows)
        document = {"num_speculative_tokens": longest, key: rows} if longest else None
        found[called] = LoadTable(document, float(1 - np.exp(own - best).mean()), slower)
    return found


class PlannedRun(NamedTuple):
    """A run to measure."""

    batch: int
    context: int
    k: int
    emitted: float
    """Acceptance length to dictate."""
    uncertain: float
    """Standard deviation of the speedups, relative, once this run and those before are known."""

    def commands(self) -> dict[str, str]:
        """Return the command that starts vLLM (``serve``), and the one that measures (``bench``).

        The target, and the drafter's method and model, are placeholders.
        """
        config = {
            "num_speculative_tokens": self.k, "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": round(self.emitted, 3),
        }  # fmt: skip
        answer = 256
        prompt = max(self.context - answer // 2, 16)
        return {
            "serve": launch_line("vllm", config if self.k else None),
            "bench": f"vllm bench serve --model {TARGET} --dataset-name random "
            f"--random-input-len {prompt} --random-output-len {answer} --ignore-eos "
            f"--max-concurrency {self.batch} --num-prompts {4 * self.batch} --save-result "
            f"--result-filename b{self.batch}-c{self.context}-k{self.k}.json",
        }


def plan(
    loads: Sequence[SurfaceCell], acceptance: Positions | None, server: ServerFit | None = None,
    passes: int | None = None,
) -> list[PlannedRun]:  # fmt: skip
    """Return the runs that determine the surface, the most informative first.

    Runs are chosen one by one (`simulator.aggregate.advice.informative`), over servers drawn from
    the priors or left by the runs of `server`.  The plan ends when the speedups' standard deviation
    is `EXACT`.  Acceptance is dictated, so no good drafter is needed; None is that of the runs.
    """
    made = server or replace(_prior_server(), passes=passes)
    emitted = {
        k: float(np.median(made.emitted(k))) if acceptance is None else acceptance.emitted(k).value
        for k in {0, *(load.k for load in loads)}
    }
    made = replace(made, known={k: e for k, e in emitted.items() if k})
    cells = sorted({*loads, *(SurfaceCell(b, c, 0) for b, c, _ in loads)})
    logs = np.stack([
        np.log(made.tokens_per_s(b, k, c, prompts=0.0, noisy=False)) for b, c, k in cells
    ])  # fmt: skip
    at = {cell: i for i, cell in enumerate(cells)}
    pairs = [(at[cell], at[SurfaceCell(cell.batch, cell.context, 0)]) for cell in cells if cell.k]
    if not pairs:
        raise DraftsimError("a plan needs a draft length above 0")
    uncertain, chosen = informative(logs, pairs, made.misfit)
    runs: list[PlannedRun] = []
    while len(runs) < MOST_RUNS and math.sqrt(uncertain) > EXACT:
        place, _, uncertain = next(chosen)
        cell = cells[place]
        runs.append(PlannedRun(*cell, emitted[cell.k], math.sqrt(uncertain)))
    return runs


def _prior_server() -> ServerFit:
    """Return servers as the priors have them, none of them measured."""
    random = np.random.default_rng(0)
    draws = [
        prior.mean + prior.spread * random.standard_normal(DRAWS)
        for prior in priors_of(ANY_TARGET).values()
    ]
    return ServerFit((ServerRun(1, 0, 1.0, prompt=1.0, answer=1.0),), None, 1.0, np.stack(draws, 1))


def grid(batches: Sequence[int], contexts: Sequence[int], ks: Sequence[int]) -> list[SurfaceCell]:
    """Return every cell of a grid."""
    return [SurfaceCell(*cell) for cell in product(batches, contexts, ks)]


def faster_up_to(surface: pd.DataFrame, along: str, unit: str) -> str:
    """Return in a few words how far along an axis the best draft length gives a speedup.

    The other axis has its smallest value, which is named where there are several.

    >>> made = pd.DataFrame({"batch": [1, 8], "context": 2, "k": 2, "speedup": [1.5, 0.9]})
    >>> faster_up_to(made, "batch", "requests")
    'up to 1 request'
    """
    other = "batch" if along == "context" else "context"
    least = int(surface[other].min())
    named = counted(least, "request" if other == "batch" else "token")
    named += " of context" * (other == "context")
    at = f" at {named}" if surface[other].nunique() > 1 else ""
    surface = surface[surface[other] == least]
    best = surface[surface["k"] > 0].groupby(along)["speedup"].max().sort_index()
    faster = [int(value) for value in best[best > 1].index]
    if not faster:
        return f"nowhere{at}"
    if faster == [1]:
        unit = unit.removesuffix("s")
    if len(faster) == len(best):
        return f"up to {faster[-1]:,} {unit}{at}, all that were asked"
    if faster == [int(value) for value in best.index[: len(faster)]]:
        return f"up to {faster[-1]:,} {unit}{at}"
    return f"at {', '.join(f'{value:,}' for value in faster)} {unit}{at}"
