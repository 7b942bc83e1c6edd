"""Fleets: every request on one replica, replicas that know nothing of each other, routers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from policies.lengths.basic import Fixed
from policies.registry import parse_serving_policy
from simulator.serving import (
    MODES,
    ROUTERS,
    ClosedLoop,
    LeastRequests,
    LeastTokens,
    Limits,
    Poisson,
    RandomSplit,
    RoundRobin,
    Scenario,
    simulate,
)
from simulator.serving import run as serving_run
from simulator.serving.compiled.engine import CompiledRun
from simulator.serving.outcome.report import Run, joined_runs
from simulator.serving.routers import Router, describe_router, parse_router
from tests import queues
from tests.compiled import SIGNALLED, same
from tests.queues import PER_TOKEN_S, SERVICE, exponential, one_token_jobs
from tests.serving import GRID, SMALL, assert_no_block_is_lost, kept_engines, little_error
from traces.errors import DraftsimError

FLEETS = st.builds(
    Scenario,
    arrivals=st.one_of(
        st.builds(Poisson, st.sampled_from([0.5, 5.0, 50.0, 500.0])),
        st.builds(ClosedLoop, st.integers(1, 12), st.sampled_from([0.0, 0.3])),
    ),
    limits=st.builds(
        Limits, max_batch=st.integers(1, 6), token_budget=st.sampled_from([70, 200, 8192]),
        kv_blocks=st.sampled_from([None, 14, 40]),
    ),
    requests=st.integers(1, 40),
    mode=st.sampled_from(["continuous", "continuous", "static", "pearl", "dsi"]),
    warmup=st.sampled_from([0.0, 0.2]),
    replicas=st.integers(2, 5),
    router=st.sampled_from([make() for make in ROUTERS.values()]),
    seed=st.integers(0, 9),
    max_time_s=st.sampled_from([None, None, 1.5]),
)  # fmt: skip

ENDS_BEFORE_ITS_LAST_ARRIVAL = Scenario(
    Poisson(0.5), Limits(max_batch=1, token_budget=70), requests=3, replicas=2,
    router=RandomSplit(), seed=2, max_time_s=1.5,
)  # fmt: skip


def assert_alike(run: Run, expected: Run, rtol: float = 0.0) -> None:
    """Two runs are the same in every metric, to the last bit unless `rtol` allows more."""
    pd.testing.assert_frame_equal(
        run.requests, expected.requests, check_exact=not rtol, **({"rtol": rtol} if rtol else {})
    )
    rows: list[dict[str, Any]] = [run.row(), expected.row()]
    for row in rows:
        del row["elapsed_s"], row["router"]
    same(rows[0], rows[1], "row")


@pytest.mark.invariant(2)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(FLEETS, st.sampled_from(["fixed:gamma=3", "gammatune", "cm-asd"]))
def test_every_request_is_served_by_one_replica(scenario: Scenario, policy: str) -> None:
    chosen = parse_serving_policy(policy, max_gamma=4)
    with kept_engines() as engines:
        run = simulate(SIGNALLED, GRID, chosen, scenario, by_iteration=True)
    frame, recorder = run.requests, run.recorder
    assert run.replicas == scenario.replicas
    assert set(frame["replica"]) <= set(range(scenario.replicas))
    assert frame["index"].is_unique
    assert frame["finish_s"].is_monotonic_increasing
    assert (frame["arrival_s"] <= frame["first_s"]).all()
    assert (frame["first_s"] <= frame["finish_s"]).all()
    if run.status == "complete":
        assert recorder.arrived == scenario.requests
        assert len(frame) + recorder.rejected == scenario.requests
        assert recorder.tokens == frame["tokens"].sum() == 40 * len(frame)
        assert recorder.drafted == frame["drafted"].sum()
        assert recorder.in_system == recorder.carried + recorder.tokens == 0
        for engine in engines:
            assert_no_block_is_lost(engine.scheduler.pool)
            assert engine.scheduler.pool.used == 0
    assert little_error(run) < 1e-9
    if isinstance(scenario.router, RoundRobin):
        assert (frame["replica"] == frame["index"] % scenario.replicas).all()


@dataclass(frozen=True)
class Watched(Router):
    """Another router's choices, on one clock: it says that it looks at the load."""

    reads_load: ClassVar[bool] = True
    router: Router

    def choose(self, index: int, replicas: Any, rng: np.random.Generator) -> int:
        return self.router.choose(index, replicas, rng)


@pytest.mark.invariant(3)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(FLEETS, st.sampled_from([RandomSplit(), RoundRobin()]), st.data())
def test_replicas_on_one_clock_are_replicas_by_themselves(
    scenario: Scenario, router: Router, data: st.DataObject
) -> None:
    """Nobody disturbs anybody: neither on one clock, nor when some are run elsewhere."""
    open_arrivals = Poisson(data.draw(st.sampled_from([0.5, 5.0, 50.0])))
    alone = replace(scenario, arrivals=open_arrivals, router=router, max_time_s=None)
    together = replace(alone, router=Watched(router))
    assert alone.splits
    assert not together.splits
    policy = parse_serving_policy(data.draw(st.sampled_from(["fixed:gamma=3", "cm-asd"])))
    run = simulate(SIGNALLED, GRID, policy, alone)
    # The fleet on one clock ends with its last replica; those by themselves end earlier.
    assert_alike(run, simulate(SIGNALLED, GRID, policy, together))
    last = alone.replicas - 1
    parts = [simulate(SIGNALLED, GRID, policy, alone, only=o) for o in (range(last), [last])]
    assert_alike(joined_runs(parts), run)


@pytest.mark.parametrize("limit_s", [None, 0.7, 1e3])
def test_replicas_without_a_request_are_counted_and_not_run(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(
        serving_run, "CompiledRun", lambda *args: ran.append(args[2]) or CompiledRun(*args)
    )
    scenario = Scenario(
        Poisson(5.0), Limits(2), requests=3, replicas=4000, warmup=0.0, max_time_s=limit_s
    )
    run = simulate(SIGNALLED, GRID, Fixed(3), scenario)
    assert ran == [[0], [1], [2], [3]]  # the last is counted for all that get no request
    each = [simulate(SIGNALLED, GRID, Fixed(3), scenario, only=[i]) for i in range(4)]
    each += [each[-1]] * 3996
    assert run.replicas == 4000
    assert_alike(run, joined_runs(each))


def test_replicas_on_one_clock_are_bounded() -> None:
    closed = Scenario(ClosedLoop(5000), Limits(2), requests=3, replicas=5000)
    compared = replace(closed, arrivals=Poisson(5.0), router=LeastRequests())
    for scenario, why in ((closed, "closed loop"), (compared, "router least-requests")):
        with pytest.raises(DraftsimError, match=f"5000, and the.*{why}.*at most 4096"):
            simulate(SIGNALLED, GRID, Fixed(3), scenario)


@pytest.mark.invariant(3)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example(ENDS_BEFORE_ITS_LAST_ARRIVAL)
@given(FLEETS)
def test_compiled_fleets_are_their_iterations(scenario: Scenario) -> None:
    """Routers see the same loads, and hence choose the same replicas."""
    chosen = replace(scenario, mode="continuous" if scenario.mode in ("pearl", "dsi") else
                     scenario.mode)  # fmt: skip
    run = simulate(SMALL, GRID, Fixed(3), chosen)
    assert_alike(run, simulate(SMALL, GRID, Fixed(3), chosen, by_iteration=True), rtol=1e-9)


def test_one_replica_needs_no_router() -> None:
    scenario = Scenario(Poisson(9.0), Limits(4), requests=50)
    run = simulate(SMALL, GRID, Fixed(3), scenario)
    row = run.row()
    assert (row["replicas"], row["router"], row["imbalance"]) == (1, None, 1.0)
    for router in ROUTERS.values():
        assert_alike(simulate(SMALL, GRID, Fixed(3), replace(scenario, router=router())), run)


@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
def test_the_shortest_queue_is_chosen(rate: float) -> None:
    scenario = Scenario(
        Poisson(rate), Limits(3), requests=150, replicas=4, router=LeastRequests(), warmup=0.0
    )
    frame = simulate(SMALL, GRID, Fixed(3), scenario).requests.sort_values("index")
    assert set(frame["replica"]) == set(range(4))
    for i, request in enumerate(frame.itertuples()):
        before = frame.iloc[:i]
        there = before[before["finish_s"] > request.arrival_s]["replica"]
        queues_ = np.bincount(there, minlength=4)
        assert queues_[request.replica] == queues_.min()


def test_the_fewest_tokens_spare_the_replica_with_the_long_prompt() -> None:
    prompts = replace(
        SMALL, requests=[replace(r, prompt_length=5000 if i == 0 else 10)
                         for i, r in enumerate(SMALL.requests)],
    )  # fmt: skip
    spared = 0
    for seed in range(8):
        scenario = Scenario(
            Poisson(50.0), Limits(8), requests=20, replicas=2, router=LeastTokens(), warmup=0.0,
            seed=seed,
        )  # fmt: skip
        frame = simulate(prompts, GRID, Fixed(3), scenario).requests
        [long] = frame[frame["prompt_tokens"] == 5000].to_dict("records")
        meanwhile = frame[
            (frame["arrival_s"] > long["arrival_s"]) & (frame["arrival_s"] < long["finish_s"])
        ]
        assert (meanwhile["replica"] != long["replica"]).all()
        spared += len(meanwhile)
    assert spared > 20


def test_more_replicas_never_serve_worse_and_share_the_work() -> None:
    means = []
    for replicas in (1, 2, 4, 8):
        scenario = Scenario(
            Poisson(40.0), Limits(4), requests=300, replicas=replicas, router=LeastRequests()
        )
        row = simulate(SMALL, GRID, Fixed(3), scenario).row()
        assert row["replicas"] == replicas
        assert row["utilisation"] <= 1
        assert row["mean_batch"] <= 4
        assert 1 <= row["imbalance"] <= replicas
        assert row["simulated_tokens"] == 300 * 40
        means.append(row["e2e_s"]["mean"])
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_served_by_fleets(mode: Any) -> None:
    for router in ROUTERS.values():
        scenario = Scenario(Poisson(9), requests=30, mode=mode, replicas=3, router=router())
        row = simulate(SMALL, GRID, Fixed(3), scenario).row()
        assert (row["requests"], row["router"]) == (30, describe_router(router()))


# --- theory -----------------------------------------------------------------------------

REPLICAS, LOAD = 4, 0.7


def waits(router: Router) -> np.ndarray:
    """Mean wait of each replication: exponential jobs of mean 1 on servers of one job each."""
    means = []
    for replication in range(12):
        jobs = exponential(np.random.default_rng(2000 + replication), 1600)
        trace = one_token_jobs(np.rint(jobs / PER_TOKEN_S).astype(int))
        scenario = Scenario(
            Poisson(LOAD * REPLICAS), Limits(max_batch=1, token_budget=1 << 30), requests=1600,
            warmup=0.2, seed=replication, replicas=REPLICAS, router=router,
        )  # fmt: skip
        run = simulate(trace, SERVICE, parse_serving_policy("autoregressive"), scenario)
        frame = run.requests
        kept = frame[frame["index"] >= run.recorder.skip]
        wait = kept["ttft_s"] - kept["prompt_tokens"] * PER_TOKEN_S
        assert wait.min() > -1e-9
        assert little_error(run) < 1e-9
        means.append(wait.mean())
    return np.array(means)


def error_of(means: np.ndarray) -> float:
    return float(np.std(means, ddof=1) / math.sqrt(len(means)))


@pytest.mark.invariant(7)
def test_a_stream_split_at_random_is_as_many_queues() -> None:
    means = waits(RandomSplit())
    expected = queues.pollaczek_khinchine(LOAD, 1.0, 2.0)
    assert error_of(means) < 0.1 * expected
    assert abs(means.mean() - expected) < 4 * error_of(means)


@pytest.mark.invariant(7)
def test_a_stream_dealt_in_turn_has_erlang_gaps() -> None:
    means = waits(RoundRobin())
    expected = queues.waiting_in_turn(LOAD * REPLICAS, 1.0, REPLICAS)
    assert error_of(means) < 0.1 * expected
    assert abs(means.mean() - expected) < 4 * error_of(means)


@pytest.mark.invariant(7)
def test_the_shortest_queue_waits_no_less_than_one_queue_for_all() -> None:
    means = waits(LeastRequests())
    bound = queues.waiting_in_mmc(LOAD * REPLICAS, 1.0, REPLICAS)
    assert means.mean() > bound - 4 * error_of(means)
    # It beats dealing in turn by more than chance allows, and that beats chance.
    in_turn = queues.waiting_in_turn(LOAD * REPLICAS, 1.0, REPLICAS)
    assert means.mean() < in_turn - 4 * error_of(means)
    assert in_turn < queues.pollaczek_khinchine(LOAD, 1.0, 2.0)


def test_queues_of_one_server_are_one_queue() -> None:
    for load in (0.1, 0.5, 0.9):
        single = queues.pollaczek_khinchine(load, 1.0, 2.0)
        assert queues.waiting_in_mmc(load, 1.0, 1) == pytest.approx(single)
        assert queues.waiting_in_turn(load, 1.0, 1) == pytest.approx(single)
    # Tabulated: two servers at a load of one wait with probability 1/3.
    assert queues.erlang_c(1.0, 2) == pytest.approx(1 / 3)
    with pytest.raises(DraftsimError, match="load is 1"):
        queues.erlang_c(2.0, 2)


# --- refusals -----------------------------------------------------------------------------


def test_impossible_fleets_are_refused() -> None:
    with pytest.raises(DraftsimError, match="replicas is 0, expected a positive number"):
        Scenario(Poisson(1.0), replicas=0)
    with pytest.raises(DraftsimError, match="router is 'best', expected one of random, round-"):
        parse_router("best")
