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

LENGTHS = (0, 1, 2, 3, 5, 8)
UNKNOWN = 1.0
"""What is known beforehand of a cost: it is no more than about a typical iteration as a whole."""


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
    """Over speculation off at the same batch and context."""


def candidates(runs: Sequence[ServerRun]) -> list[tuple[int, int, float]]:
    """Loads to predict, and to suggest: batches to twice the largest, and two contexts."""
    largest = 2 * max(run.batch for run in runs)
    batches = [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
    contexts = sorted({run.context for run in runs})
    ends = sorted({contexts[0], contexts[-1]})
    if len(ends) == 1:
        ends.append(4 * ends[0] or 1024.0)
    longest = max(run.k for run in runs) or LENGTHS[-1]
    return list(product(batches, [k for k in LENGTHS if k <= longest], ends))


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
    rows = []
    for batch, k, context in loads:
        server = found.server
        if k == 0:
            emitted = Interval(1.0, 1.0, 1.0)
        elif totals:
            emitted = emitted_at(totals, k)
        else:
            emitted = _unknown(found, runs, k)
        step, plain = (float(server.iteration_s(batch, n, context)) for n in (k, 0))
        columns = [server.columns(batch, n, context)[keep] / s for n, s in ((k, step), (0, plain))]
        own, over = (
            reach * float(np.sqrt(max(0.0, float(c @ costs @ c))))
            for c in (columns[0], columns[0] - columns[1])
        )
        rows.append(Load(
            batch, k, context, _times(emitted, batch / step, own),
            _times(emitted, plain / step, over) if k else Interval(1.0, 1.0, 1.0),
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


def _times(emitted: Interval, factor: float, reach: float) -> Interval:
    """Tokens a round over seconds: both uncertain, the seconds relatively by `reach`."""
    return Interval(
        emitted.value * factor, emitted.low * factor / (1 + reach),
        emitted.high * factor * (1 + reach),
    )  # fmt: skip


def _slopes(found: Calibration, places: Sequence[tuple[int, int, float]]) -> Floats:
    """How a load's iteration, relative, depends on each of COSTS, (places, 6)."""
    batch, k, context = zip(*places, strict=True)
    columns = found.server.columns(batch, k, context)
    return np.asarray(columns / (columns @ found.server.costs)[:, None])
