"""A closed loop run through thousands of iterations at a time is the loop by iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario
from simulator.serving.arrivals import Job
from simulator.serving.spans import LoopEngine, PlannedLoopEngine, SpanEngine, loop
from tests.serving import GRID, SMALL
from tests.spans import LENGTHS, PROMPTED, SIGNALLED, assert_same, ran
from traces.acceptance.trace import Trace


@dataclass(frozen=True)
class AnyLength(ClosedLoop):
    """Prompts and outputs of any length: cut recordings and repeated ones, and single tokens."""

    def jobs(self, trace: Trace, rng: np.random.Generator, requests: int | None) -> Iterator[Job]:
        for job in super().jobs(trace, rng, requests):
            prompt, output = rng.integers(1, (60, 90)).tolist()
            yield job._replace(prompt_tokens=prompt, output_tokens=rng.choice([1, 2, output]))


SCENARIOS = st.builds(
    Scenario,
    st.one_of(st.builds(ClosedLoop, st.integers(1, 9)), st.builds(AnyLength, st.integers(1, 9))),
    st.builds(
        Limits, max_batch=st.integers(1, 9), token_budget=st.sampled_from([30, 70, 200, 8192]),
        block_size=st.sampled_from([4, 16]),
    ),
    requests=st.integers(1, 60), seed=st.integers(0, 5), warmup=st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip


@pytest.mark.invariant(3)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SCENARIOS, st.sampled_from(["fixed:gamma=3", "autoregressive", "gammatune"]),
    st.sampled_from([*PROMPTED]), st.sampled_from([1, 7, 4096]), st.sampled_from([0, 6]),
)  # fmt: skip
def test_a_loop_planned_ahead_is_its_iterations(scenario, policy, cells, ahead, few):
    with patch.object(loop, "AHEAD", ahead), patch.object(loop, "FEW", few):
        engine = assert_same(SIGNALLED, PROMPTED[cells], parse_policy(policy), scenario)
    assert isinstance(engine, LoopEngine)


@pytest.mark.invariant(3)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SCENARIOS, st.sampled_from(LENGTHS), st.sampled_from([*PROMPTED]),
    st.sampled_from([1, 7, 4096]),
)  # fmt: skip
def test_a_loop_of_lengths_by_number_planned_ahead_is_its_iterations(
    scenario, policy, cells, ahead
):
    with patch.object(loop, "AHEAD", ahead):
        engine = assert_same(SIGNALLED, PROMPTED[cells], policy, scenario)
    assert isinstance(engine, PlannedLoopEngine)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(Poisson(20.0), requests=9),
        Scenario(ClosedLoop(3, 0.1), requests=9),
        Scenario(ClosedLoop(3), Limits(kv_blocks=40), requests=9),
        Scenario(ClosedLoop(3), Limits(chunked_prefill=False), requests=9),
        Scenario(ClosedLoop(3), requests=9, mode="static"),
        Scenario(ClosedLoop(3), requests=9, max_tokens=100),
    ],
)
def test_what_the_clock_decides_is_not_planned_ahead(scenario):
    _, engine = ran(SMALL, GRID, Fixed(3), scenario)
    assert type(engine) is SpanEngine


def test_a_bound_of_time_cuts_a_loop_where_it_cuts_its_iterations():
    scenario = Scenario(ClosedLoop(3), Limits(3), requests=30, max_time_s=1.7)
    assert_same(SMALL, GRID, Fixed(3), scenario)


def test_a_loop_asks_the_clock_for_nothing(monkeypatch):
    spans = []
    keep = SpanEngine.turn
    monkeypatch.setattr(SpanEngine, "turn", lambda self: spans.append(1) or keep(self))
    ran(SMALL, GRID, Fixed(3), Scenario(ClosedLoop(4), Limits(4), requests=200))
    assert len(spans) == 1  # in which no request is left
