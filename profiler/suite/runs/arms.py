"""The policies that full runs compare, and what is kept of each run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from policies.core import DraftPolicy, Round, own_copy, speculate
from policies.registry import parse_policy
from profiler.checks.differences import explain
from profiler.checks.spot_check import Arm, rounds_differ
from profiler.machine import timed
from profiler.suite.environment import NoTimeError, Workplace
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
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


Open = Callable[[Arm, int], Any]
"""Makes a decoder (`policies.core.Decoder`) for an arm's run of a request, after its prefill."""


def compared_runs(
    place: Workplace, name: str, mode: str, arms: Sequence[Arm], recorded: Trace, opened: Open,
    *, seconds: float, drafted: Trace | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Every arm on the requests of `recorded`, as many as `seconds` hold; rounds against replay.

    ``name``: of the pair, for the rows.  ``drafted``: the same requests with what drafts in the
    place of the draft model (`traces.sources.starts.as_draft`), where another does.

    Returns the measured ``times``, rows of `profiler.suite.runs.arms.COLUMNS`, and what was
    ``checked``.

    Raises
    ------
    NoTimeError
        If there is no time to run every arm once.
    """
    begin = time.monotonic()
    rounds: dict[str, dict[int, list[Round]]] = {arm.name: {} for arm in arms}
    outputs: dict[str, dict[int, list[int]]] = {arm.name: {} for arm in arms}
    runs: dict[str, DraftPolicy] = {}

    def one(arm: Arm, i: int) -> tuple[float, int]:
        decoder = opened(arm, i)
        if i == 0:  # every sweep begins with the first request, and what it learns again
            runs[arm.name] = arm.policy.for_run()
        policy = runs[arm.name].fresh()
        with timed(place.device) as spent:
            log = list(speculate(decoder, policy))
        rounds[arm.name][i], outputs[arm.name][i] = log, decoder.output
        return spent(), len(log)

    rows = sweeps(
        arms, range(len(recorded.requests)), one,
        repeats=repeats_of(place.quick), warm=0 if place.quick else 1,
        left=lambda: begin + seconds - time.monotonic(), check_time=place.check_time,
    )  # fmt: skip
    # As many requests as the time held.
    indices = sorted({i for _, _, i, *_ in rows})
    recorded = recorded.select(indices)
    replayed = recorded if drafted is None else drafted.select(indices)
    times = [
        [name, mode, arm, "exact", 1, False, repeat, recorded.requests[i].id, spent, count]
        for arm, repeat, i, spent, count in rows
    ]
    differ, causes = {}, []
    for arm in arms:
        packed = RoundLog.pack([rounds[arm.name][i] for i in indices])
        real = RoundLog(packed, recorded.requests, arm.name, reads=arm.policy.reads)
        expected = replay(replayed, arm.policy, name=arm.name)
        differ[arm.name] = [rounds_differ(real, expected), len(expected)]
        texts = [outputs[arm.name][i] for i in indices]
        causes += explain(real, expected, texts, recorded, place.dtype, replayed)
    counts = {c: sum(d["cause"] == c for d in causes) for c in {d["cause"] for d in causes}}
    place.say(f"{name}, {mode}: {len(rows)} runs, differences {counts or 'none'}")
    checked = {"rounds_differ_of": differ, "causes": counts, "first_differences": causes}
    return {"times": times, "checked": checked}
