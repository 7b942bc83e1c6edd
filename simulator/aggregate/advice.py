"""The best draft length of a calibrated server, and the most informative next run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from policies.arrays import Floats
from simulator.aggregate.hazard import interval_of
from simulator.aggregate.server import ServerFit, ServerRun
from simulator.bootstrap import Interval
from traces.digits import counted

LONGEST = 8
"""Longest draft length asked about where the runs have none longer."""
SURE = 0.9
"""A gain or a loss that this part of the draws agree on is called certain."""


class PredictedSpeed(NamedTuple):
    """A load, its output tokens per second, and its speedup over no speculation there."""

    batch: int
    k: int
    """0: no speculation."""
    context: float
    tokens_per_s: Interval
    speedup: Interval
    faster: float
    """Chance that it is faster than no speculation; NaN at k = 0."""
    extrapolated: bool
    """True if no run was this large, drafted this much, or had about this context."""
    p_min: float = 0.0
    """Probability below which drafts stop (llama.cpp); 0 if they do not."""

    @property
    def row(self) -> dict[str, Any]:
        """The prediction as a row of numbers; intervals are ``_lo`` and ``_hi``."""
        return {
            "batch": self.batch, "k": self.k, "context": self.context,
            **self.tokens_per_s.columns("tokens_per_s"), **self.speedup.columns("speedup"),
            "faster": self.faster if self.k else None, "extrapolated": self.extrapolated,
            "p_min": self.p_min,
        }  # fmt: skip


class Suggestion(NamedTuple):
    """A run to measure next."""

    batch: int
    k: int
    narrows: float
    """Part of the mean variance of the predicted speedups that it takes away."""

    @property
    def said(self) -> str:
        """The suggestion in a sentence."""
        return (
            f"measure next: {counted(self.batch, 'request')} at K = {self.k}, which removes "
            f"{self.narrows:.0%} of the variance of the predicted speedups"
        )


def concurrencies(runs: Sequence[ServerRun]) -> list[int]:
    """Return concurrencies to answer for: those measured, and powers of two between them."""
    measured = {run.batch for run in runs}
    low, high = min(measured), max(measured)
    doubles = {1 << i for i in range(high.bit_length()) if low <= 1 << i <= high}
    return sorted(measured | doubles)


def draft_lengths(runs: Sequence[ServerRun]) -> list[int]:
    """Draft lengths to choose from: 0 to one more than the longest measured, at most `LONGEST`."""
    longest = max((run.k for run in runs), default=0)
    return list(range(max(longest, min(longest + 1, LONGEST)) + 1))


def predicted(
    server: ServerFit, batch: int, k: int, context: float, level: float = 0.8,
    like: ServerRun | None = None,
) -> PredictedSpeed:  # fmt: skip
    """Return the speed at a load, with intervals for a further run.

    ``like`` is a run whose drafts stop early, as in `ServerFit.tokens_per_s`.
    """
    _, prompts = server.usual
    speeds = server.tokens_per_s(batch, k, context, prompts, like=like)
    gain = speeds / server.tokens_per_s(batch, 0, context, prompts)
    return PredictedSpeed(
        batch, k, context, interval_of(speeds, level), interval_of(gain, level),
        float(np.mean(gain > 1)) if k else float("nan"),
        batch > max(run.batch for run in server.runs) or k > max(run.k for run in server.runs)
        or server.far(context),
        0.0 if like is None else like.p_min,
    )  # fmt: skip


def choices(
    server: ServerFit,
    batches: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    level: float = 0.8,
    context: float | None = None,
) -> list[PredictedSpeed]:
    """Return the fastest draft length with a speedup above 1, or 0, at each concurrency.

    `context` is in tokens of a request's cache; None: the runs' mean.
    """
    context = server.usual[0] if context is None else context
    ks = sorted({0, *(lengths or draft_lengths(server.runs))})
    asked: list[tuple[int, ServerRun | None]] = [(k, None) for k in ks]
    asked += [(run.k, run) for run in server.stopping() if run.k in ks]
    found = []
    for batch in batches or concurrencies(server.runs):
        plain, *loads = (predicted(server, batch, k, context, level, like) for k, like in asked)
        # Each load has a further run's noise of its own: the most tokens/s may be no speedup.
        faster = [load for load in loads if load.speedup.value > 1]
        found.append(max(faster, key=lambda load: load.tokens_per_s.value, default=plain))
    return found


def informative(
    logs: Floats, pairs: Sequence[tuple[int, int]], misfit: float
) -> tuple[float, Iterator[tuple[int, float, float]]]:
    """Return the mean variance of speedups, and the runs that take most of it away, one by one.

    Each run is chosen given those before it, by the linear part of how speedups depend on its
    speed; logarithms of speeds are taken as normal.  A run is the place of its load, the variance
    of all speedups together that it takes away, and the mean variance of a speedup that it leaves.

    Parameters
    ----------
    logs:
        Logarithms of the speeds at each load, over servers drawn, (loads, draws).
    pairs:
        For each speedup the places of its load and of the load without speculation.
    misfit:
        Relative standard deviation of a measured speed.
    """
    over, under = np.array(pairs).T
    spread = np.cov(logs)

    def mean_variance(held: Floats) -> float:
        own = held[over, over] + held[under, under] - 2 * held[over, under]
        return float(np.maximum(own, 0).mean())

    def chosen(spread: Floats) -> Iterator[tuple[int, float, float]]:
        while True:
            # Covariances of every load with every speedup: what a run there would take away.
            shared = spread[:, over] - spread[:, under]
            gained = np.square(shared).sum(axis=1) / (np.diag(spread) + misfit**2)
            best = int(np.argmax(gained))
            taken = np.outer(spread[:, best], spread[best]) / (spread[best, best] + misfit**2)
            spread = spread - taken
            yield best, float(gained[best]), mean_variance(spread)

    return mean_variance(spread), chosen(spread)


def next_runs(server: ServerFit) -> list[Suggestion]:
    """Return the two runs that narrow the predicted speedups most, the first one first."""
    runs = server.runs
    context, prompts = server.usual
    batches, ks = concurrencies(runs), draft_lengths(runs)
    # One step beyond what was measured: where predictions are widest.
    batches = [*batches, 2 * batches[-1]]
    loads = [(b, k) for b in batches for k in ks]
    logs = np.stack([
        np.log(server.tokens_per_s(b, k, context, prompts, noisy=False)) for b, k in loads
    ])  # fmt: skip
    at = {load: i for i, load in enumerate(loads)}
    pairs = [(at[b, k], at[b, 0]) for b in batches[:-1] for k in ks if k]
    variance, chosen = informative(logs, pairs, server.misfit)
    before = max(variance * len(pairs), 1e-12)
    return [Suggestion(*loads[place], gained / before) for place, gained, _ in islice(chosen, 2)]


def in_words(rows: Sequence[PredictedSpeed]) -> str:
    """Return one sentence: which draft length up to which concurrency, and where to switch off."""
    parts: list[str] = []
    until = "up to" if len(rows) > 1 else "at"
    for (k, p_min), alike in groupby(rows, lambda row: (row.k, row.p_min)):
        what = f"K = {k}" if k else "no speculation"
        what += f" with p-min {p_min:g}" if p_min else ""
        parts.append(f"{what} {until} {counted([*alike][-1].batch, 'request')}")
    text = ", then ".join(parts)
    return text[0].upper() + text[1:]
