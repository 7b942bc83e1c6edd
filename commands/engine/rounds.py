"""Rounds that an engine took, held to those of the replay or of the simulated batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from policies.core import DraftPolicy, Round
from simulator.serving import Timeline, simulate
from traces.acceptance.trace import Trace
from traces.replay.run import replay

if TYPE_CHECKING:
    from profiler.engines.loads import LoadRun
    from simulator.serving import Run, Scenario
    from traces.latency.table import LatencyTable


def rounds_differ(
    runs: Sequence[LoadRun], predicted: Run, trace: Trace, latency: LatencyTable, policy: Any,
    scenario: Scenario,
) -> int:  # fmt: skip
    """Rounds that are not the predicted ones, of the run where most are not.

    Those of a policy that sees one request are the replay's.  A policy for batches, or one that
    learns across requests, decides by who runs together: in closed loops its rounds are those of
    the simulation, and under timed arrivals, where the clock decides, only their number is.
    """
    if isinstance(policy, DraftPolicy) and not policy.learns_across_requests:
        own = _replayed(trace, policy)
        each = {n: own.get(int(n.partition("/")[0]), []) for run in runs for n in _decoded(run)}
    elif scenario.arrivals.concurrency is not None:
        drawn = simulated_rounds(trace, latency, policy, scenario)
        each = {n: drawn.get(_index(n), []) for run in runs for n in _decoded(run)}
    else:
        requests = predicted.requests
        numbers = dict(zip(requests["index"], requests["rounds"], strict=True))
        return max(
            sum(abs(len(found) - int(numbers[_index(n)])) for n, found in run.rounds.items())
            for run in runs
        )
    # Where drafts come from the target itself, the engine's records count the catching up of
    # another drafter.
    fields = len(Round._fields) - trace.takes_verified
    return max(_different(run.rounds, each, _decoded(run), fields) for run in runs)


def simulated_rounds(
    trace: Trace, latency: LatencyTable, policy: Any, scenario: Scenario
) -> dict[int, list[Round]]:
    """The rounds of every request that the simulator serves, by its place in the load."""
    drawn = _Drawn()
    simulate(trace, latency, policy, scenario, timeline=drawn)
    return drawn.rounds


class _Drawn(Timeline):
    """Keeps the rounds of every request instead of drawing them."""

    def __init__(self) -> None:
        super().__init__(os.devnull)
        self.rounds: dict[int, list[Round]] = {}

    def round(
        self, index: int, start_s: float, seconds: float, outcome: Round, wasted: int
    ) -> None:
        self.rounds.setdefault(index, []).append(outcome)


def _different(
    found: Mapping[str, Sequence[Round]], expected: Mapping[str, Sequence[Round]],
    names: Sequence[str], fields: int,
) -> int:  # fmt: skip
    pairs = [
        (a and a[:fields], b and b[:fields])
        for name in names
        for a, b in itertools.zip_longest(found.get(name, ()), expected[name])
    ]
    return sum(a != b for a, b in pairs)


def _replayed(trace: Trace, policy: DraftPolicy) -> dict[int, list[Round]]:
    own: dict[int, list[Round]] = {}
    for row in replay(trace, policy).rounds:
        outcome = Round(*(int(row[field]) for field in Round._fields))
        own.setdefault(int(row["request"]), []).append(outcome)
    return own


def _decoded(run: LoadRun) -> list[str]:
    """Names of the requests that have rounds: whose prompt does not end them."""
    requests = run.requests
    return list(requests["name"][requests["tokens"] > 1])


def _index(name: str) -> int:
    return int(name.rpartition("/")[2])
