"""The latency stage: what it measures first, cuts, keeps and goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler.latency.table import Grid
from profiler.machine import NoTimeError
from profiler.models.architectures import PAIRS
from profiler.suite import MODES, latency_stage
from profiler.suite import pair as pair_latency
from profiler.suite.checks import MORE_POLICIES, POLICIES, planned_policies
from profiler.suite.environment import Workplace
from profiler.suite.forced_stage import ForcedUnit, forced_trace
from profiler.suite.pair import (
    BATCHED,
    FULL,
    QUICK,
    SINGLE,
    PairMeasurement,
    held_out,
    points_between,
)
from tests.suite_results import SMALL
from traces.latency.table import LatencyTable, as_cells
from traces.replay.run import replay


@pytest.fixture
def measured(place: Workplace) -> PairMeasurement:
    pair = PAIRS[SMALL].miniature()
    models = latency_stage.build_pair(place, pair)
    return PairMeasurement(place, pair, "eager", models, QUICK, float("inf"))


def test_what_predictions_need_comes_before_all_else(measured: PairMeasurement) -> None:
    ranks = [part.rank for part in measured._left]
    assert ranks == sorted(ranks)
    by_rank = [[p.name for p in measured._left if p.rank == rank] for rank in (SINGLE, BATCHED)]
    assert by_rank == [
        [f"passes at batch {batch}", f"the host at batch {batch}"] for batch in (1, 4)
    ]


def test_a_target_alone_is_measured_layer_by_layer_before_its_batches(place: Workplace) -> None:
    pair = PAIRS["codellama-7b"].miniature()
    alone = PairMeasurement(place, pair, "eager", (object(), None), QUICK, 0.0)
    assert [(p.name, p.rank) for p in alone._left[:2]] == [
        ("passes at batch 1", SINGLE), ("target, layer by layer", BATCHED)
    ]  # fmt: skip


def test_both_modes_have_what_is_needed_before_either_is_complete(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int | None]] = []

    def run(self: PairMeasurement, rank: int | None = None) -> None:
        order.append((self.mode, rank))

    monkeypatch.setattr(PairMeasurement, "run", run)
    latency_stage.run_latency(place, [SMALL])
    assert order == [(mode, rank) for rank in range(3) for mode in MODES]


def test_no_host_time_without_the_passes_it_is_told_from(
    measured: PairMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends within the first sweep over the passes at batch 4."""
    real = pair_latency.pass_cells

    def late(place: Any, runners: Any, grid: Grid, batch: int, **more: Any) -> Any:
        if batch == 4:
            calls = iter(range(3))

            def check() -> None:
                if next(calls, None) is None:
                    raise NoTimeError("no time left")

            more["check"] = check
        return real(place, runners, grid, batch, **more)

    with monkeypatch.context() as patch:
        patch.setattr(pair_latency, "pass_cells", late)
        measured.run(SINGLE)
        measured.run(BATCHED)
    assert {"passes at batch 4", "the host at batch 4"} <= set(measured.unfinished)
    assert {row[2] for row in measured.cells} == {1}
    again = PairMeasurement(
        measured.place, measured.pair, "eager",
        (measured.models["target"], measured.models["draft"]), QUICK, float("inf"),
        measured.unit(),
    )  # fmt: skip
    again.run()
    assert not again.unfinished
    assert [row[2] for row in again.cells if row[1] == "host_round"] == [1, 4]
    assert again.cells[: len(measured.cells)] == measured.cells


def test_no_host_time_where_the_passes_cannot_be_had(
    measured: PairMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair_latency.runner_of_mode

    def full(mode: str, model: Any, slots: int, batch: int = 1) -> Any:
        if batch == 4 and model is measured.models["draft"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(mode, model, slots, batch)

    monkeypatch.setattr(pair_latency, "runner_of_mode", full)
    measured.run(SINGLE)
    measured.run(BATCHED)
    assert measured.limits == [
        "passes at batch 4: out of memory", "the host at batch 4: no passes at batch 4"
    ]  # fmt: skip
    assert not {"passes at batch 4", "the host at batch 4"} & set(measured.unfinished)


def test_sweeps_end_with_the_time_but_not_before_the_first(
    measured: PairMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = pair_latency.replace(QUICK, grid=pair_latency.replace(QUICK.grid, repeats=3))
    measured.plan = three
    measured.run(SINGLE)
    assert {row[7] for row in measured.cells if row[1] == "forward"} == {3}
    measured.deadline = float("-inf")
    cells, _ = measured.passes(1)
    assert {row[7] for row in cells} == {1}


def test_batches_have_points_between_and_are_as_wide_as_drafts_are() -> None:
    assert max(FULL.grid.batch_widths) >= (forced_trace(False).max_gamma or 0) + 1
    for seed in range(20):
        points = points_between((1, 3, 9), (16, 48, 64), 8, seed)
        assert len(points) > 4
        assert all(1 <= width <= 9 and 16 < context < 64 for width, context in points)
        assert not {context for _, context in points} & {16, 48, 64}
    assert points_between((1, 3), (16,), 8, 0) == []


def test_held_out_errors_are_those_of_reading_the_table() -> None:
    def rows(widths: tuple[int, ...], contexts: tuple[int, ...], factor: float) -> list[list[Any]]:
        return [
            ["target", "forward", 4, w, c, factor * (1e-3 * w + 1e-6 * c), 0.0, 1]
            for w in widths for c in contexts
        ]  # fmt: skip

    table = LatencyTable(as_cells(rows((1, 9), (16, 64), 1.0)))
    for factor in (1.0, 0.8):
        [found] = held_out(as_cells(rows((5,), (40,), factor)), table)
        assert found["error"] == pytest.approx(1 / factor - 1)
        assert (found["batch"], found["width"], found["context"]) == (4, 5, 40)


def test_every_policy_can_be_dictated_by_the_forced_trace() -> None:
    trace = forced_trace(True)
    for run in planned_policies(trace, (*POLICIES, *MORE_POLICIES)):
        assert len(replay(trace, run.policy, name=run.name)) > 0
    assert not set(POLICIES) & set(MORE_POLICIES)


def test_units_share_the_time_by_what_they_cost() -> None:
    small, large = PAIRS[SMALL], PAIRS["qwen2.5-32b+0.5b"]
    assert ForcedUnit(large, "eager", 1).cost > 5 * ForcedUnit(small, "eager", 1).cost
    assert ForcedUnit(large, "eager", 16).cost > ForcedUnit(large, "eager", 4).cost
    assert latency_stage.weight(PAIRS["codellama-7b"]) < latency_stage.weight(
        PAIRS["vicuna-7b+68m"]
    )
