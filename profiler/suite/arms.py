"""The policies that full runs compare, and what is kept of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.registry import parse_policy
from profiler.spotcheck import Arm
from profiler.suite.environment import NoTimeError
from traces.measured import MEASURED_COLUMNS
from traces.trace import Trace

ARMS = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "confidence:roc_update=in_call", "hf-heuristic", "hf-heuristic:full_accept_means=budget",
    "gammatune", "gammatune-plus", "svip", "adaedl", "draft-and-verify", "oracle",
)  # fmt: skip
"""Every policy family, plain decoding, and fixed lengths as control."""

QUICK_ARMS = ("autoregressive", "fixed:gamma=3", "svip")

COLUMNS = ("pair", "mode", *MEASURED_COLUMNS)
"""Columns of the suite's measured runs."""


def arms_of(trace: Trace, quick: bool) -> list[Arm]:
    """The arms, their maxima lowered to what the trace holds."""
    names = QUICK_ARMS if quick else ARMS
    return [Arm(name, parse_policy(name, max_gamma=trace.max_gamma)) for name in names]


def sweeps(
    arms: Sequence[Arm],
    groups: Sequence[Any],
    run: Callable[[Arm, Any], tuple[float, int]],
    *,
    repeats: int,
    left: Callable[[], float],
    check_time: Callable[[], None],
    warm: int | None = None,
) -> list[tuple[str, int, Any, float, int]]:
    """Run every arm on every group, `repeats` times, in rotated order.

    Stops before a sweep that the time `left` does not hold, and within one when `check_time`,
    asked before every run, raises NoTimeError; a sweep is whole or not kept.  The sweep before
    the first warms up, on the first `warm` groups (all by default); from its time follows how
    many of the groups, the first at least, are run.

    Returns
    -------
    (arm, repeat, group, seconds, rounds) of every run.

    Raises
    ------
    NoTimeError
        If there was no time for a single sweep.
    """
    rows: list[tuple[str, int, Any, float, int]] = []
    longest = 0.0
    for repeat in range(-1, repeats):
        before, sweep = left(), []
        if repeat > 0 and before < longest:
            break
        for i, group in enumerate(groups if repeat >= 0 or warm is None else groups[:warm]):
            for k in range(len(arms)):
                arm = arms[(k + i + repeat) % len(arms)]
                try:
                    check_time()
                except NoTimeError:
                    if rows:
                        return rows
                    raise
                sweep.append((arm.name, repeat, group, *run(arm, group)))
        took = before - left()
        if repeat >= 0:
            rows += sweep
            longest = max(longest, took)
        elif took > 0:
            warmed = len(groups) if warm is None else min(warm, len(groups))
            groups = groups[: max(1, int(left() / took * warmed))]
    return rows
