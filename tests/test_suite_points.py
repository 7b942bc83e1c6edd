"""The points of a latency grid: which are measured, how they are timed, what is read of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import Fixed
from policies.core import Round
from profiler.machine import Clock, Stopwatch
from profiler.models.architectures import ARCHITECTURES
from profiler.suite.latency import passes
from profiler.suite.latency.passes import Timer, loop_trace, pass_seconds
from profiler.suite.latency.points import Point, Refiner, error_summary
from simulator.pricing import price
from traces.latency.table import LatencyTable
from traces.replay.run import replay


def refine(refiner: Refiner, cost: Any) -> int:
    asked = 0
    while (at := refiner.next()) is not None:
        refiner.tell(cost(at))
        asked += 1
    return asked


def table_of(refiner: Refiner) -> LatencyTable:
    import pandas as pd

    from traces.latency.schema import CELL_COLUMNS

    rows = [("m", "forward", 1, *at, s, 0.0, 1) for at, s in refiner.grid().items()]
    return LatencyTable(pd.DataFrame(rows, columns=list(CELL_COLUMNS)))


def test_a_linear_cost_needs_no_more_than_the_coarse_grid() -> None:
    refiner = Refiner((1, 9, 25), (128, 4096))
    refine(refiner, lambda at: 1e-3 + 1e-5 * at.width + 1e-7 * at.context)
    assert len(refiner.grid()) == 6
    assert max(map(abs, refiner.held_out.values())) < 1e-9
    assert refiner.unchecked == 0


def test_points_are_added_until_interpolation_is_good() -> None:
    """A step in the width (another kernel) and a bend in the context."""

    def cost(at: Point) -> float:
        step = 1.3e-3 if at.width > 16 else 1e-3
        return step + 4e-8 * max(0, at.context - 3000) + 1e-6 * at.width

    refiner = Refiner((1, 9, 25), (128, 8192))
    asked = refine(refiner, cost)
    table = table_of(refiner)
    for width in range(1, 26):
        for context in range(128, 8193, 61):
            read = float(table.seconds("m", "forward", new_tokens=width, context=context))
            # A kink inside an accepted gap: at most twice the tolerance, along either size.
            assert abs(read / cost(Point(width, context)) - 1) < 4 * 0.02, (width, context)
    assert asked < 80
    assert all(abs(e) <= 0.02 for e in refiner.held_out.values())
    assert not set(refiner.held_out) & set(refiner.grid())


def test_a_line_left_unfinished_is_not_used() -> None:
    refiner = Refiner((1, 5), (128, 1024))
    while not refiner.coarse_done:
        refiner.next()
        refiner.tell(1e-3)
    assert refiner.next() == Point(3, 128)
    refiner.tell(5e-3)
    assert Point(3, 128) in refiner.seconds
    assert set(refiner.grid()) == {Point(w, c) for w in (1, 5) for c in (128, 1024)}
    assert refiner.unchecked > 0


@given(seed=st.integers(0, 1000), count=st.integers(1, 20))
def test_points_at_random_had_no_part_in_the_grid(seed: int, count: int) -> None:
    refiner = Refiner((1, 2, 4), (16, 48))
    refine(refiner, lambda at: 1e-3 + 1e-5 * at.width**2 + 1e-7 * at.context)
    drawn = refiner.at_random(count, seed)
    assert len(drawn) == len(set(drawn)) <= count
    assert not set(drawn) & (set(refiner.seconds) | set(refiner.held_out))
    assert all(1 <= at.width <= 4 and 16 <= at.context <= 48 for at in drawn)


def test_error_summary_counts_both_signs() -> None:
    assert error_summary([0.01, -0.03, 0.02]) == {"points": 3, "median": 0.02, "largest": 0.03}
    assert error_summary([]) == {"points": 0}


def test_a_call_behind_another_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes(seconds: float) -> Any:
        def run() -> None:
            clock[0] += seconds

        return run

    monkeypatch.setattr(passes.time, "perf_counter", lambda: clock[0])
    told = Clock(lambda: clock[0], lambda: clock[0], lambda: 0)
    monkeypatch.setattr(passes, "Stopwatch", partial(Stopwatch, clock=told))
    sample = Timer(torch.device("cpu"), repeats=4).following(takes(8.0), takes(0.25))
    assert sample == (0.25, 0.0, 3)  # calls of seconds are not repeated more often than that


def test_rounds_are_priced_as_the_simulator_prices_them() -> None:
    """Host time is what the passes leave: both sides must mean the same passes."""
    rows = [("target", "forward", 1, w, c, 1e-2 + 1e-3 * w + 1e-6 * c, 0.0, 1)
            for w in (1, 9) for c in (16, 512)]  # fmt: skip
    rows += [("draft", phase, 1, w, c, 1e-3 * scale * w + 1e-7 * c, 0.0, 1)
             for phase, scale in (("forward", 1.0), ("catch_up", 1.7))
             for w in (1, 2) for c in (16, 512)]  # fmt: skip
    table = passes.table_of(rows)
    trace = loop_trace(2, 60, 40, 8)
    log = replay(trace, Fixed(3))
    per_request = price(log, table).decode_s
    assert (log.rounds["catch_up"] > 1).any()
    for i in range(2):
        rounds = [Round(*map(int, (r[n] for n in Round._fields)))
                  for r in log.rounds[log.rounds["request"] == i]]  # fmt: skip
        assert pass_seconds(rounds, 40, table) == pytest.approx(per_request[i])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_parameters_they_are_named_for(name: str) -> None:
    """On the meta device, so without memory: the formula and transformers agree."""
    shape = ARCHITECTURES[name]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(shape.config())
    counted = sum(p.numel() for p in model.parameters())
    # Norms and biases, which the formula leaves out.
    assert 0 <= counted - shape.parameters <= 0.002 * counted
    published = {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9, "vicuna-7b": 6.74e9,
                 "vicuna-13b": 13.02e9, "vicuna-68m": 68e6, "vicuna-160m": 162e6,
                 "qwen2.5-32b": 32.76e9, "qwen2.5-0.5b": 0.494e9, "codellama-7b": 6.74e9,
                 "codellama-13b": 13.02e9}  # fmt: skip
    if name in published:
        assert counted == pytest.approx(published[name], rel=0.01)
    tiny = shape.miniature()
    assert tiny.heads // tiny.kv_heads == shape.heads // shape.kv_heads
    assert tiny.parameters < 1e6
