"""Real decoding held to the replay of its recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies import DraftPolicy
from policies.core import own_copy, speculate
from profiler.checks.differences import output_of, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, run_requests
from profiler.models.loading import Pair
from profiler.sources.run import SourceRunner
from traces.acceptance.trace import Trace
from traces.replay.calls import pack_calls
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources.base import Source
from traces.sources.recording import Recordings
from traces.sources.replay import replay_source


def assert_decoded_as_replayed(pair: Pair, trace: Trace, planned: Sequence[PlannedPolicy]) -> None:
    """Every run has the rounds of its replay, and writes the recorded outputs."""
    measured = run_requests(pair, trace, planned, repeats=1)
    for run in planned:
        expected = replay(trace, run.policy, name=run.name)
        np.testing.assert_array_equal(measured.logs[run.name].rounds, expected.rounds)
        assert rounds_differ(measured.logs[run.name], expected) == 0
        for i in range(len(trace.requests)):
            assert measured.outputs[run.name][i] == output_of(trace, i), run.name


class SourceRun(NamedTuple):
    """Rounds and outputs of requests that were decoded for real with a source."""

    log: RoundLog
    outputs: list[list[int]]


def run_source(runner: SourceRunner, source: Source, policy: DraftPolicy) -> SourceRun:
    """Decode every request of the runner's trace for real, in recording order."""
    shared, rounds, calls, outputs = own_copy(policy, runner.target.vocab_size), [], [], []
    for i in range(len(runner.trace.requests)):
        decoder = runner.decoder(source, i)
        rounds.append(list(speculate(decoder, shared.fresh())))
        calls.append(decoder.calls.rounds)
        outputs.append(decoder.output)
    log = RoundLog(
        RoundLog.pack(rounds), runner.trace.requests, type(policy).__name__, source=source.name,
        reads=policy.reads, recorded_calls=pack_calls(calls),
    )  # fmt: skip
    return SourceRun(log, outputs)


def run_as_replayed(
    runner: SourceRunner, source: Source, policy: DraftPolicy, trace: Trace,
    recordings: Recordings | None = None, calls: bool = True,
) -> tuple[SourceRun, RoundLog]:  # fmt: skip
    """Run a source for real: it writes the recorded outputs in the rounds of its replay.

    Its calls are the replay's too, unless `calls` says that passes of a draft model are counted
    instead.  Returns the real run and the replay's log.
    """
    real = run_source(runner, source, policy)
    log = replay_source(trace, source, policy, recordings=recordings)
    assert real.outputs == [output_of(trace, i) for i in range(len(trace.requests))]
    np.testing.assert_array_equal(real.log.rounds, log.rounds)
    assert (log.recorded_calls is not None) == calls
    if calls:
        np.testing.assert_array_equal(real.log.recorded_calls, log.recorded_calls)
    return real, log


def same_means(real: RoundLog, log: RoundLog) -> None:
    """Means of two samples of rounds differ by less than four standard errors.

    Requests are independent; rounds of one are not.
    """
    for name in ("drafted", "accepted", "emitted"):
        mine, theirs = (run.per_request(run.rounds[name]) for run in (real, log))
        error = np.sqrt((mine.var() + theirs.var()) / len(mine))
        assert abs(mine.mean() - theirs.mean()) < 4 * error, name
