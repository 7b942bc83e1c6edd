"""What the page's sliders compute with: round-log histograms in the textbook cost model.

A round costs c per draft pass and one target pass, or v target passes where it verifies
drafts; `simulator.ratios.price_ratios` does the same sum over the same histograms, and
`simulator.ratios.break_even_ratio` finds where it is 1 from the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.basic import Fixed
from simulator.ratios import draft_histogram, ratio_sums
from simulator.whatif.fidelity import tilt_errors
from simulator.whatif.tilt import Tilter
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.replay import replay
from traces.rounds import RoundLog
from traces.trace import MATCH, UNKNOWN, Trace

MOST_GAMMA = 12
ASSUMED = (0.1, 1.0)
"""c and v where a latency table has no draft passes to take them from."""
DIGITS = 3
"""Significant digits of a slider's stops: what is shown is what is computed with."""
ALPHAS = (*(round(0.05 * i, 2) for i in range(20)), 0.98)
"""Stops of the acceptance slider; the recording is tilted to all but 0."""


def histogram(log: RoundLog) -> dict[str, Any]:
    """Emitted tokens, and rounds by (draft passes, drafts verified) of a log."""
    forwards, drafted, count = draft_histogram(log)
    return {
        "emitted": int(log.rounds["emitted"].sum(dtype=np.int64)),
        "forwards": forwards.tolist(),
        "drafted": drafted.tolist(),
        "count": count.tolist(),
    }


def measured_ratios(trace: Trace, latency: LatencyTable, drafted: int) -> tuple[float, float, bool]:
    """c = T_draft / T_target and v = T_verify / T_target at the recording's mean context.

    T_verify is that of `drafted` drafts.  The third says whether they were measured, or had to
    be assumed.
    """
    if not latency.has("draft", "forward"):
        return (*ASSUMED, False)
    context = sum(r.prompt_length + r.tokens / 2 for r in trace.requests) / len(trace.requests)
    target = float(latency.seconds("target", "forward", context=context))
    draft = float(latency.seconds("draft", "forward", context=context))
    verify = latency.seconds("target", "forward", new_tokens=drafted + 1, context=context)
    return draft / target, float(verify) / target, True


def slider(values: Sequence[float], start: float) -> dict[str, Any]:
    """Stops of a slider, `start` among them; ``start`` in the result is its index."""
    own = _significant(start)
    stops = sorted({_significant(v) for v in values} | {own})
    return {"values": stops, "start": stops.index(own)}


def sliders(trace: Trace, c: float, v: float, gammas: Sequence[int], gamma: int) -> dict[str, Any]:
    """The four sliders of the page; every stop is a number that Python and page share."""
    alpha = recorded_alpha(trace)
    return {
        "c": slider(np.geomspace(0.005, 1, 60).tolist(), c),
        "v": slider([1 + 0.05 * i for i in range(41)], v),
        "alpha": slider(ALPHAS, alpha),
        "gamma": {"values": list(gammas), "start": list(gammas).index(gamma)},
    }


def recorded_alpha(trace: Trace) -> float:
    """Share of on-path drafts that match."""
    match = trace.columns["match"][trace.on_path]
    return float((match[match != UNKNOWN] == MATCH).mean())


def fixed_lengths(trace: Trace) -> dict[int, RoundLog]:
    """The trace at fixed draft lengths 1 to 12, as far as the recording goes."""
    most = min(MOST_GAMMA, trace.max_gamma or MOST_GAMMA)
    return {gamma: replay(trace, Fixed(gamma)) for gamma in range(1, most + 1)}


def page_rounds(logs: Sequence[RoundLog]) -> dict[str, Any]:
    """Histograms and sums of logs, in their order."""
    return {
        "histograms": [histogram(log) for log in logs],
        "sums": [list(ratio_sums(log)) for log in logs],
    }


def tilted(trace: Trace, stops: Sequence[float], gammas: Sequence[int]) -> dict[str, Any] | None:
    """Per alpha stop, tokens and rounds of every gamma on the tilted recording.

    None where it cannot be tilted: all drafts of it match, or none does, or its off-path tails
    are too short.  Each entry of ``rounds`` holds the fields of `simulator.ratios.RatioSums`;
    each of ``error`` the relative error to expect of a speedup and whether a shift as large
    was measured, or None where no prompts differ enough to measure one.
    """
    own = _significant(recorded_alpha(trace))
    wanted = [a for a in stops if 0 < a < 1]
    found = []
    try:
        tilter = Tilter(trace)
        for alpha, shift in zip(wanted, tilter.shifts(wanted), strict=True):
            # At its own rate the recording speaks for itself.
            other = trace if alpha == own else tilter.shifted(float(shift))
            found.append([list(ratio_sums(replay(other, Fixed(g)))) for g in gammas])
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
