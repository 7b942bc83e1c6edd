"""The time that a server adds to an engine, per request and iteration, in closed form."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from policies import parse_policy
from simulator.serving import ClosedLoop, Limits, Poisson, Run, Scenario, simulate
from simulator.serving.arrivals import Arrivals
from simulator.serving.cost import EngineCost
from tests.serving import GRID, SMALL, little_error
from traces.latency.table import LatencyTable, as_cells

AROUND_S, BESIDE_S = 0.03, 0.002
LIMITS = Limits(max_batch=4)


def with_server(*cells: tuple[str, int, float]) -> LatencyTable:
    rows = [("server", phase, batch, 1, 0, seconds, 0.0, 1) for phase, batch, seconds in cells]
    more = as_cells(rows)
    return LatencyTable(pd.concat([GRID.cells, more], ignore_index=True))


SERVED = with_server(("request", 1, AROUND_S), ("iteration", 1, BESIDE_S))


def run(table: LatencyTable, arrivals: Arrivals, policy: str, **how: bool) -> Run:
    scenario = Scenario(arrivals, LIMITS, requests=30, warmup=0.0, seed=5)
    return simulate(SMALL, table, parse_policy(policy), scenario, **how)


@pytest.mark.parametrize("policy", ["autoregressive", "fixed:gamma=3", "gammatune"])
def test_one_client_waits_for_the_server_at_every_request_and_iteration(policy: str) -> None:
    bare, served = (run(t, ClosedLoop(1), policy) for t in (GRID, SERVED))
    one, other = bare.requests, served.requests
    assert list(one["rounds"]) == list(other["rounds"])
    # One iteration for the prompt and one a round.
    np.testing.assert_allclose(other["ttft_s"], one["ttft_s"] + AROUND_S + BESIDE_S)
    longer = AROUND_S + BESIDE_S * (1 + one["rounds"])
    np.testing.assert_allclose(other["e2e_s"], one["e2e_s"] + longer)
    # The next request is sent when the answer is there.
    end_s = bare.requests["finish_s"].max() + longer.sum()
    assert other["finish_s"].max() == pytest.approx(end_s)
    assert served.recorder.busy_s == pytest.approx(
        bare.recorder.busy_s + BESIDE_S * served.recorder.iterations
    )


@pytest.mark.parametrize("policy", ["autoregressive", "fixed:gamma=3"])
@pytest.mark.parametrize("arrivals", [ClosedLoop(3), Poisson(6.0)])
@pytest.mark.parametrize("more", [(), (("apart", 3, 1e-4),)])
def test_iterations_compiled_and_with_events_cost_the_same(
    arrivals: Arrivals, policy: str, more: tuple[tuple[str, int, float], ...]
) -> None:
    served = with_server(("request", 1, AROUND_S), ("iteration", 1, BESIDE_S), *more)
    compiled, single = (run(served, arrivals, policy, by_iteration=by) for by in (False, True))
    for column in ("arrival_s", "first_s", "finish_s", "rounds"):
        np.testing.assert_allclose(compiled.requests[column], single.requests[column])
    assert little_error(compiled) < 1e-9


def test_open_arrivals_do_not_change_by_what_is_around_requests_alone() -> None:
    around = with_server(("request", 1, AROUND_S))
    bare, served = (run(t, Poisson(6.0), "gammatune").requests for t in (GRID, around))
    np.testing.assert_allclose(served["arrival_s"], bare["arrival_s"])
    for column in ("ttft_s", "e2e_s"):
        np.testing.assert_allclose(served[column], bare[column] + AROUND_S)
    np.testing.assert_allclose(served["tpot_s"], bare["tpot_s"])


def test_a_fuller_engine_has_a_slower_server_around_it() -> None:
    growing = with_server(("request", 1, AROUND_S), ("request", 3, 3 * AROUND_S))
    found = [EngineCost(growing).host(batch).request_s for batch in (1, 2, 3, 8)]
    np.testing.assert_allclose(found, [AROUND_S, 2 * AROUND_S, 3 * AROUND_S, 3 * AROUND_S])
    bare, served = (run(t, ClosedLoop(1), "autoregressive").requests for t in (GRID, growing))
    np.testing.assert_allclose(served["e2e_s"], bare["e2e_s"] + AROUND_S)


@pytest.mark.parametrize("by_iteration", [False, True])
def test_requests_sent_at_once_reach_the_engine_one_by_one(by_iteration: bool) -> None:
    """The first is taken alone; those that came meanwhile join it in the next iteration."""
    at_once, apart = (
        run(table, ClosedLoop(3), "autoregressive", by_iteration=by_iteration)
        for table in (GRID, with_server(("apart", 3, 1e-5)))
    )
    first, *others = apart.requests["first_s"][:3]
    assert at_once.requests["first_s"][:3].nunique() == 1
    assert first < others[0] == others[1]
    assert first < at_once.requests["first_s"].min() < others[0]
    np.testing.assert_allclose(sorted(apart.requests["arrival_s"])[:3], [0.0, 1e-5, 2e-5])
    # All have as many tokens: the first ends an iteration before the others, again and again.
    assert apart.recorder.iterations == at_once.recorder.iterations + 1
    assert apart.requests["rounds"].sum() == at_once.requests["rounds"].sum()
