"""Real decoding held to the replay of its recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler.checks.differences import output_of
from profiler.checks.spot_check import Arm, rounds_differ, run_arms
from profiler.models.loading import Pair
from traces.acceptance.trace import Trace
from traces.replay.run import replay


def assert_decoded_as_replayed(pair: Pair, trace: Trace, arms: Sequence[Arm]) -> None:
    """Every arm has the rounds of its replay, and writes the recorded outputs."""
    measured = run_arms(pair, trace, arms, repeats=1)
    for arm in arms:
        expected = replay(trace, arm.policy, name=arm.name)
        np.testing.assert_array_equal(measured.logs[arm.name].rounds, expected.rounds)
        assert rounds_differ(measured.logs[arm.name], expected) == 0
        for i in range(len(trace.requests)):
            assert measured.outputs[arm.name][i] == output_of(trace, i), arm.name
