"""The policies that full runs compare, and what is kept of each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.core import own_copy
from policies.registry import parse_policy
from profiler.checks.spot_check import Arm
from profiler.suite.environment import NoTimeError
from traces.acceptance.trace import Trace
from traces.store.measured import MEASURED_COLUMNS

ARMS = (
    "autoregressive", "fixed:gamma=4", "fixed:gamma=2", "fixed:gamma=8", "confidence",
    "hf-heuristic", "gammatune", "gammatune-plus", "cm-asd", "svip", "adaedl",
    "draft-and-verify", "oracle",
)  # fmt: skip
"""Plain decoding, fixed lengths as control, and the policies of the papers."""

MORE_ARMS = (
    "specdec-pp", "disco", "rate-optimal", "ucb", "exp3", "bild",
    "confidence:roc_update=in_call", "hf-heuristic:full_accept_means=budget",
)  # fmt: skip
"""The other policies that decide for one sequence at a time, as long as the time holds.

Those for whole batches (`policies.batch.base.BatchPolicy`) are not among them: they choose one
length for all sequences of an engine, from its own costs, and are held against served batches.
"""

QUICK_ARMS = ("autoregressive", "fixed:gamma=3", "svip")
MORE_QUICK_ARMS = ("ucb",)

LEAST_REPEATS = 2
"""One repeat alone cannot tell a difference from chance."""

REPEATS = 3

COLUMNS = ("pair", "mode", *MEASURED_COLUMNS)
"""Columns of the suite's measured runs."""


def arms_of(trace: Trace, quick: bool) -> list[Arm]:
    """The arms, their maxima lowered to what the trace holds."""
    return arms_named(QUICK_ARMS if quick else ARMS, trace)


def more_arms_of(trace: Trace, quick: bool) -> list[Arm]:
    """The arms that come after those of `arms_of`."""
    return arms_named(MORE_QUICK_ARMS if quick else MORE_ARMS, trace)


def repeats_of(quick: bool) -> int:
    """Return how often an arm runs: once in miniatures, whose times are not used."""
    return 1 if quick else REPEATS


def arms_named(names: Sequence[str], trace: Trace) -> list[Arm]:
    """Return an arm per policy, its maximum lowered to what the trace holds."""
    made = {name: parse_policy(name, max_gamma=trace.max_gamma) for name in names}
    # The vocabulary is the recorded pair's: what is run here is what a replay predicts.
    return [Arm(name, own_copy(policy, trace.vocab_size)) for name, policy in made.items()]


def sweeps(
    arms: Sequence[Arm],
    groups: Sequence[Any],
    run: Callable[[Arm, Any], tuple[float, int]],
    *,
    repeats: int,
    left: Callable[[], float],
    check_time: Callable[[], None],
    warm: int = 1,
    needed: int | None = None,
) -> list[tuple[str, int, Any, float, int]]:
    """Run every arm on every group, `repeats` times, in rotated order.

    The first `warm` arms run once beforehand, untimed.  Then every arm runs on the first group.
    From that time follows what the time `left` holds: arms beyond the first `needed` (all by
    default), and groups beyond the first, as many as can be run `repeats` times.  Fewer repeats
    than that are made if they take longer than expected, but LEAST_REPEATS until `check_time`,
    asked before every run, raises NoTimeError.  A sweep is whole or not kept.

    Returns
    -------
    (arm, repeat, group, seconds, rounds) of every run.

    Raises
    ------
    NoTimeError
        If there was no time for every needed arm to run once.
    """
    for arm in arms[:warm]:
        check_time()
        run(arm, groups[0])
    rows: list[tuple[str, int, Any, float, int]] = []
    whole = left()
    for k, arm in enumerate(arms):
        spent = whole - left()
        if needed is not None and k >= max(1, needed) and (k + 1) * repeats * spent / k > whole:
            break
        check_time()
        rows.append((arm.name, 0, groups[0], *run(arm, groups[0])))
    arms, took = arms[: len(rows)], whole - left()
    if took > 0:
        groups = groups[: max(1, int(whole / (took * repeats)))]
    longest = 0.0
    try:
        for repeat in range(repeats):
            before, sweep = left(), []
            if repeat >= LEAST_REPEATS and before < longest:
                break
            for i, group in enumerate(groups if repeat else groups[1:], 0 if repeat else 1):
                for k in range(len(arms)):
                    arm = arms[(k + i + repeat) % len(arms)]
                    check_time()
                    sweep.append((arm.name, repeat, group, *run(arm, group)))
            rows += sweep
            longest = max(longest, before - left() + (0 if repeat else took))
    except NoTimeError:
        pass  # what was run as a whole stands
    return rows
