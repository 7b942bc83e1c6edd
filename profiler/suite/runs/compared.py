"""Real runs of several policies, interleaved, each held against its replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from policies.core import DraftPolicy, Round, speculate
from profiler.checks.differences import explain
from profiler.checks.spot_check import Arm, rounds_differ
from profiler.machine import timed
from profiler.suite.environment import Workplace
from profiler.suite.runs.arms import repeats_of, sweeps
from traces.acceptance.trace import Trace
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

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
