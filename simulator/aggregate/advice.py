"""What a calibration predicts, and which further run would narrow that most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.aggregate.acceptance import Interval, TwoState, emitted_at
from simulator.aggregate.fit import ACCEPTANCE, Calibration
from simulator.aggregate.server import COSTS, ServerRun

Floats = npt.NDArray[np.float64]

UNTRIED = 8
"""Longest draft length suggested to somebody whose runs hold none."""
FARTHER = 4
"""Times the longest measured context at which a run is suggested where all runs have one."""
UNKNOWN = 1.0
"""Prior of a cost: it is no more than about a typical iteration as a whole."""


class Suggestion(NamedTuple):
    """A run to measure next."""

    batch: int
    k: int
    context: float
    narrows: float
    """Part of the mean variance of predicted speeds that it takes away."""


class Load(NamedTuple):
    """A predicted speed."""

    batch: int
    k: int
    context: float
    tokens_per_s: Interval
    speedup: Interval
    """Over no speculation at the same batch and context."""


def loads_of(runs: Sequence[ServerRun]) -> list[tuple[int, int, float]]:
    """List the loads to predict, (batch, k, context).

    Batches are those measured, and powers of two up to twice the largest.  Draft lengths are all
    from 0 to the longest measured, and contexts the shortest and the longest measured.
    """
    contexts = [run.context for run in runs]
    lengths = range(max(run.k for run in runs) + 1)
    return list(product(_batches(runs), lengths, sorted({min(contexts), max(contexts)})))


def candidates(runs: Sequence[ServerRun]) -> list[tuple[int, int, float]]:
    """List the runs that may be suggested: `loads_of`, drafts if none ran, and another context."""
    contexts = sorted({run.context for run in runs})
    ends = {contexts[0], contexts[-1]}
    if len(ends) == 1:
        ends.add(FARTHER * contexts[0] or 1024.0)
    lengths = range((max(run.k for run in runs) or UNTRIED) + 1)
    return list(product(_batches(runs), lengths, sorted(ends)))


def _batches(runs: Sequence[ServerRun]) -> list[int]:
    measured = {run.batch for run in runs}
    largest = 2 * max(measured)
    return sorted(measured | {1 << i for i in range(largest.bit_length())})


def best_lengths(loads: Sequence[Load]) -> list[Load]:
    """The load of the fastest draft length at each batch and context, in the order of `loads`."""
    found: dict[tuple[int, float], Load] = {}
    for load in loads:
        here = load.batch, load.context
        if here not in found or load.tokens_per_s.value > found[here].tokens_per_s.value:
            found[here] = load
    return list(found.values())


def next_run(found: Calibration, runs: Sequence[ServerRun]) -> Suggestion:
    """The run, of `candidates`, that narrows the predictions for all of them most."""
    places = candidates(runs)
    slopes = _slopes(found, places)
    typical = np.abs(_slopes(found, [(r.batch, r.k, r.context) for r in runs])).mean(axis=0)
    prior = np.diag(np.where(typical > 0, typical, 1.0) ** 2 / UNKNOWN**2)
    taken = _slopes(found, [(r.batch, r.k, r.context) for r in runs])
    noise = max(found.noise, 1e-3)
    spread = np.linalg.inv(prior + taken.T @ taken / noise**2)
    before = np.einsum("ij,jk,ik->i", slopes, spread, slopes)
    gained = slopes @ spread @ slopes.T  # (places, candidates)
    left = before[:, None] - gained**2 / (noise**2 + before[None])
    mean = left.mean(axis=0)
    best = int(mean.argmin())
    return Suggestion(*places[best], narrows=float(1 - mean[best] / before.mean()))


def predicted(
    found: Calibration, runs: Sequence[ServerRun], loads: Sequence[tuple[int, int, float]]
) -> list[Load]:
    """Speeds at some loads (batch, k, context), with intervals of costs and acceptance."""
    from scipy.stats import norm, t

    totals: Mapping[int, float] = {
        r.k: float(np.mean([o.round_tokens for o in runs if o.k == r.k and o.round_tokens]))
        for r in runs if r.k and r.round_tokens is not None
    }  # fmt: skip
    reach = float(
        norm.ppf((1 + found.level) / 2) if np.isinf(found.freedom)
        else t.ppf((1 + found.level) / 2, found.freedom)
    )  # fmt: skip
    names = list(found.intervals)
    keep = [i for i, name in enumerate(COSTS) if name in names]
    at = [names.index(COSTS[i]) for i in keep]
    costs = found.covariance[np.ix_(at, at)]
    least = np.array([found.intervals[COSTS[i]].low for i in keep])
    shortest = min(run.context for run in runs)

    def width(columns: Floats) -> float:
        return reach * float(np.sqrt(max(0.0, float(columns @ costs @ columns))))

    def seconds(batch: int, k: int, context: float) -> Interval:
        """An iteration: at least what its costs add up to at their least, or at a shorter context.

        No cost is negative, so that a longer context never takes less.
        """
        low = 0.0
        for length in sorted({min(shortest, context), context}):
            columns = found.server.columns(batch, k, length)[keep]
            value = float(found.server.iteration_s(batch, k, length))
            low = max(low, value - width(columns), float(columns @ least))
        return Interval(value, low, value + width(columns))

    rows = []
    for batch, k, context in loads:
        if k == 0:
            emitted = Interval(1.0, 1.0, 1.0)
        elif totals:
            emitted = emitted_at(totals, k)
        else:
            emitted = _unknown(found, runs, k)
        step, plain = seconds(batch, k, context), seconds(batch, 0, context)
        columns = [
            found.server.columns(batch, n, context)[keep] / s.value
            for n, s in ((k, step), (0, plain))
        ]
        over = 1 + width(columns[0] - columns[1])
        ratio = plain.value / step.value
        rows.append(Load(
            batch, k, context,
            Interval(
                emitted.value * batch / step.value, emitted.low * batch / step.high,
                emitted.high * batch / step.low if step.low > 0 else np.inf,
            ),
            Interval(emitted.value * ratio, emitted.low * ratio / over, emitted.high * ratio * over)
            if k else Interval(1.0, 1.0, 1.0),
        ))  # fmt: skip
    return rows


def _unknown(found: Calibration, runs: Sequence[ServerRun], k: int) -> Interval:
    """Tokens a round of `k` where no run tells any: from the acceptance fitted with the costs.

    That was fitted as if positions were independent, at the lengths that were run; what other
    lengths give, the two-state family spans.
    """
    known = found.intervals.get(ACCEPTANCE, Interval(0.5, 0.0, 1.0))
    lengths = {run.k for run in runs if run.k} or {k}
    near = min(lengths, key=lambda length: (abs(length - k), length))
    spans = [
        emitted_at({near: TwoState(min(1.0, max(0.0, rate))).emitted(near)}, k)
        for rate in (known.value, known.low, known.high)
    ]
    low, high = min(span.low for span in spans), max(span.high for span in spans)
    return Interval(spans[0].value, low, high)


def _slopes(found: Calibration, places: Sequence[tuple[int, int, float]]) -> Floats:
    """How a load's iteration, relative, depends on each of COSTS, (places, 6)."""
    batch, k, context = zip(*places, strict=True)
    columns = found.server.columns(batch, k, context)
    return np.asarray(columns / (columns @ found.server.costs)[:, None])
