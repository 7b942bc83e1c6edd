"""The model of the page's sliders: priced rounds, carried over to other cost ratios.

Drafting costs in proportion to c and verifying drafts to v, in target passes; what else rounds
take stays (`simulator.ratios.carried_sums`).  At the pair's own ratios the page's curves are
therefore its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from policies.lengths.basic import Fixed
from simulator.pricing import autoregressive, price
from simulator.ratios import OwnRatios, carried_sums
from simulator.whatif.tilt.fidelity import tilt_errors
from simulator.whatif.tilt.trace import Tilter
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.vectorised import replay_many

Sums = list[float]

MOST_GAMMA = 12
DIGITS = 3
"""Significant digits of a slider's stops; only the pair's own has all of its digits."""
ALPHAS = (*(round(0.05 * i, 2) for i in range(20)), 0.98)
"""Stops of the acceptance slider; the recording is tilted to all but 0."""


def slider(values: Sequence[float], start: float) -> dict[str, Any]:
    """Stops of a slider, `start` among them; ``start`` in the result is its index."""
    others = {_significant(v) for v in values} - {_significant(start)}
    stops = sorted(others | {start})
    return {"values": stops, "start": stops.index(start)}


def sliders(trace: Trace, c: float, v: float, gammas: Sequence[int], gamma: int) -> dict[str, Any]:
    """Return the four sliders of the page; every stop is a number that Python and page share."""
    alpha = recorded_alpha(trace)
    return {
        "c": slider(np.geomspace(0.005, 1, 60).tolist(), c),
        "v": slider([1 + 0.05 * i for i in range(41)], v),
        "alpha": slider(ALPHAS, _significant(alpha)),
        "gamma": {"values": list(gammas), "start": list(gammas).index(gamma)},
    }


def recorded_alpha(trace: Trace) -> float:
    """Return the share of on-path drafts that match."""
    match = trace.columns["match"][trace.on_path]
    return float((match[match != UNKNOWN] == MATCH).mean())


def fixed_lengths(trace: Trace) -> dict[int, RoundLog]:
    """Return the trace at fixed draft lengths 1 to 12, as far as the recording goes."""
    most = min(MOST_GAMMA, trace.max_gamma or MOST_GAMMA)
    return _at_lengths(trace, range(1, most + 1))


def _at_lengths(trace: Trace, gammas: Sequence[int]) -> dict[int, RoundLog]:
    policies = {f"fixed:gamma={g}": Fixed(g) for g in gammas}
    return dict(zip(gammas, replay_many(trace, policies), strict=True))


def carried(trace: Trace, latency: LatencyTable, own: OwnRatios) -> Callable[[RoundLog], Sums]:
    """Return the function that makes the sums of a log of `trace`, as the page holds them."""
    plain = price(autoregressive(_at_lengths(trace, (1,))[1]), latency)

    def sums(log: RoundLog) -> Sums:
        return list(carried_sums(price(log, latency), plain, own, log.source == trace.source))

    return sums


def tilted(
    trace: Trace, latency: LatencyTable, own: OwnRatios, stops: Sequence[float],
    gammas: Sequence[int],
) -> dict[str, Any] | None:  # fmt: skip
    """Per alpha stop, tokens and rounds of every gamma on the tilted recording.

    None if it cannot be tilted: all drafts of it match, or none does, or its off-path tails
    are too short.  Each entry of ``rounds`` holds the fields of `simulator.ratios.RatioSums`;
    each of ``error`` the relative error to expect of a speedup and whether a shift as large
    was measured, or None if no prompts differ enough to measure one.
    """
    recorded = _significant(recorded_alpha(trace))
    wanted = [a for a in stops if 0 < a < 1]
    found, sums = [], carried(trace, latency, own)  # plain decoding drafts nothing: alike in all
    try:
        tilter = Tilter(trace)
        for alpha, shift in zip(wanted, tilter.shifts(wanted), strict=True):
            # At its own rate the recording speaks for itself.
            other = trace if alpha == recorded else tilter.shifted(float(shift))
            found.append([sums(log) for log in _at_lengths(other, gammas).values()])
        error = tilt_errors(trace).lengths  # fixed lengths read no signal
    except DraftsimError:
        return None
    known = error.comparisons > 0
    off = [
        [error.at(a, tilter.alpha), error.tried(a, tilter.alpha)] if known else None for a in wanted
    ]
    return {"alphas": wanted, "rounds": found, "error": off}


def _significant(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
