"""How often `draftsim calibrate` recovers the costs of a synthetic server within its intervals.

    python -m benchmarks.calibrate_recovery [--trials 200] [--noise 0.01]

A trial draws a server, measures it at 14 loads with noise, and counts as recovered where every
cost lies within its interval; the intervals claim to hold together in 95 % of trials.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from simulator.aggregate.acceptance import TwoState
from simulator.aggregate.fit import calibrate
from simulator.aggregate.server import COSTS, Server, ServerRun

LOADS = (
    (1, 0, 500), (1, 2, 500), (1, 4, 3000), (4, 0, 3000), (8, 0, 500), (8, 2, 3000), (8, 4, 500),
    (16, 0, 3000), (16, 1, 500), (32, 0, 500), (32, 1, 3000), (32, 4, 500), (64, 0, 3000),
    (64, 2, 500),
)  # fmt: skip
"""Batch, draft length, context."""


class Recovery(NamedTuple):
    """Trials in which all costs lay within their intervals."""

    recovered: int
    trials: int
    width: float
    """Median half-width of an interval over its cost."""


def recovery(trials: int, noise: float = 0.01, seed: int = 0, step: bool = True) -> Recovery:
    """Calibrate so many synthetic servers; with ``step``, each has a known width step."""
    random = np.random.default_rng(seed)
    recovered, widths = 0, []
    for _ in range(trials):
        truth = Server(
            *(10 ** random.uniform(low, high) for low, high in (
                (-2.3, -1.7), (-4.7, -4.0), (-7.0, -6.3), (-3.2, -2.6), (-5.2, -4.7),
            )),
            step_s=random.uniform(-2e-3, 6e-3) if step else 0.0, threshold=32 if step else None,
        )  # fmt: skip
        member = TwoState(random.uniform(0.5, 0.8), 0.1, memory=0.9)
        runs = []
        for batch, k, context in LOADS:
            emitted = member.emitted(k)
            speed = truth.tokens_per_s(batch, k, context, emitted)
            noisy = speed * float(np.exp(random.normal(0, noise)))
            runs.append(ServerRun(batch, k, noisy, context, emitted))
        found = calibrate(runs, threshold=truth.threshold, find_step=False)
        true = dict(zip(COSTS, truth.costs.tolist(), strict=True))
        recovered += all(i.holds(true[name]) for name, i in found.intervals.items())
        widths += [(i.high - i.low) / 2 / abs(true[n]) for n, i in found.intervals.items()]
    return Recovery(recovered, trials, float(np.median(widths)))


def main() -> None:
    """Print the share of trials."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--trials", type=int, default=200)
    line.add_argument("--noise", type=float, default=0.01)
    options = line.parse_args()
    for step in (False, True):
        found = recovery(options.trials, options.noise, step=step)
        kind = "with a width step" if step else "without a step"
        print(
            f"{kind}: {found.recovered} of {found.trials} recovered within the intervals "
            f"({found.recovered / found.trials:.1%}); half-width {found.width:.0%} of a cost"
        )


if __name__ == "__main__":
    main()
