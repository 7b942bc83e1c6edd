"""Matches in the order of a text, because the chance of each depends on those before it."""

from __future__ import annotations

from typing import Any

from policies.arrays import Bools, Floats, Ints
from simulator.machine_code import compiled

DECAY = 0.9
"""Weight of the past in the running share of matches, per token."""


@compiled
def remembered(
    match: Bools, starts: Ints, begin: float, longest: int, run: Ints, share: Floats
) -> None:
    """Write the history before each position into `run` and `share`, all of shape (positions,).

    ``starts``, shape (requests + 1,): a request begins without a run and with the share `begin`.
    """
    for request in range(len(starts) - 1):
        matches, rate = 0, begin
        for place in range(starts[request], starts[request + 1]):
            run[place], share[place] = matches, rate
            hit = match[place]
            matches = min(matches + 1, longest) if hit else 0
            rate = DECAY * rate + (1 - DECAY) * hit


@compiled
def drawn(
    margins: Floats, starts: Ints, shifts: Floats, begin: float, run_logit: Floats, one: float,
    two: float, match: Any,
) -> None:  # fmt: skip
    """Write matches under each shift into `match`, shape (shifts, positions).

    ``margins``, shape (positions,): log-odds of the signals, less the bar that a match must pass;
    ``run_logit``, shape (longest run + 1,), ``one`` and ``two``: what runs and shares add.
    """
    longest = len(run_logit) - 1
    for row in range(len(shifts)):
        for request in range(len(starts) - 1):
            matches, rate = 0, begin
            for place in range(starts[request], starts[request + 1]):
                history = run_logit[matches] + rate * (one + two * rate)
                hit = margins[place] + history + shifts[row] > 0
                match[row, place] = hit
                matches = min(matches + 1, longest) if hit else 0
                rate = DECAY * rate + (1 - DECAY) * hit
