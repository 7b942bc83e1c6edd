"""Passes soon after a round's first: measured by place, and priced everywhere alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from policies.core import Round
from policies.lengths.basic import Fixed
from simulator.pricing import price
from simulator.serving import ClosedLoop, Limits, Scenario, simulate
from simulator.serving.cost import EngineCost, TableCost
from simulator.whatif.batching import InBatches
from simulator.whatif.rate import LatencyCost
from tests.serving import table_of
from tests.tuning import batched
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.store.files import read_latency, write_latency

BEYOND = (4e-4, 2e-4, 1e-4)
"""The extra time of the first, second and third pass after a round's first."""


def table(batches: tuple[int, ...] = (1,), beyond: tuple[float, ...] = BEYOND) -> LatencyTable:
    rows = []
    for batch in batches:
        for context in (8, 400):
            later = 2e-3 * (1 + context / 1000)
            rows += [("target", "forward", batch, n, context, 2e-2, 0.0, 9) for n in (1, 9)]
            rows.append(("draft", "forward", batch, 1, context, later, 0.0, 9))
            rows += [("draft", "catch_up", batch, n, context, 3e-3, 0.0, 9) for n in (1, 4)]
            rows += [
                ("draft", "settling", batch, place, context, later + batch * more, 0.0, 9)
                for place, more in enumerate(beyond, start=1)
            ]
    return table_of(rows)


def trace() -> Trace:
    return synthetic_trace(0.6, requests=6, tokens=30)


def test_the_sums_are_those_of_the_cells_at_the_nearest_batch(tmp_path: Path) -> None:
    write_latency(table((1, 4)), tmp_path / "latency.parquet")
    latency = read_latency(tmp_path / "latency.parquet")
    assert latency.settling_sums("draft", 1) == pytest.approx([0, 4e-4, 6e-4, 7e-4])
    assert latency.settling_sums("draft", 7) == pytest.approx(4 * latency.settling_sums("draft", 1))
    found = latency.settling_s("draft", 1, [0, 1, 2, 3, 4, 24])
    assert found == pytest.approx([0, 4e-4, 6e-4, 7e-4, 7e-4, 7e-4])
    # Tables made before hold no such cells: nothing is added.
    assert batched().settling_s("draft", 4, [0, 1, 9]).tolist() == [0, 0, 0]


def by_place(log: RoundLog) -> float:
    """Return the extra cost of a log for the cells, by the definition: place after place."""
    return sum(sum(BEYOND[: max(int(n) - 1, 0)]) for n in log.rounds["draft_forwards"])


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
def test_a_log_pays_for_the_places_that_its_rounds_reach(gamma: int) -> None:
    log = replay(trace(), Fixed(gamma))
    with_cells, without = (price(log, table(beyond=b)).total_s for b in (BEYOND, ()))
    assert with_cells - without == pytest.approx(by_place(log))
    assert (with_cells > without) == (gamma > 1)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_serving_one_stream_costs_what_pricing_says(gamma: int) -> None:
    log, latency = replay(trace(), Fixed(gamma)), table()
    scenario = Scenario(ClosedLoop(1), Limits(max_batch=1), requests=6, warmup=0.0)
    busy_s = simulate(trace(), latency, Fixed(gamma), scenario).recorder.busy_s
    assert busy_s == pytest.approx(price(log, latency).total_s, rel=1e-3)
    without = simulate(trace(), table(beyond=()), Fixed(gamma), scenario).recorder.busy_s
    assert busy_s - without == pytest.approx(by_place(log))


@pytest.mark.parametrize("passes", ["ragged", "padded"])
def test_batches_pay_once_for_all_their_sequences(passes: Literal["ragged", "padded"]) -> None:
    rounds = [Round(0, n, 0, 1, n, 1) for n in (4, 2)]
    slots: list[Any] = [SimpleNamespace(context=c) for c in (50, 60)]
    seconds = [
        EngineCost(table((1, 2), beyond), passes=passes)(slots, rounds, []).total_s
        for beyond in (BEYOND, ())
    ]
    assert seconds[0] - seconds[1] == pytest.approx(2 * sum(BEYOND))


def test_steps_of_a_batch_pay_as_the_longest_draft_does() -> None:
    log = replay(trace(), Fixed(5))
    rates = [
        InBatches(log, 2, resamples=2).at_latency(table((1, 2), beyond)).wall_s
        for beyond in (BEYOND, ())
    ]
    assert np.all(rates[0] > rates[1])


def test_policies_are_told_of_it() -> None:
    for gamma in (0, 1, 2, 6):
        expected = sum(BEYOND[: max(gamma - 1, 0)])
        for cost in (TableCost, LatencyCost):
            full, bare = cost(table()), cost(table(beyond=()))
            sizes = (1, gamma, gamma + 1, 50.0)
            assert full(*sizes) - bare(*sizes) == pytest.approx(expected)
