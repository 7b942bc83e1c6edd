"""The latency stage: what it measures first, cuts, keeps and goes on with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from profiler.checks.spot_check import Arm
from profiler.machine import Clock, Stopwatch
from profiler.models.architectures import PAIRS
from profiler.suite.environment import NoTimeError, Workplace
from profiler.suite.latency import pair as pair_latency
from profiler.suite.latency import passes
from profiler.suite.latency import stage as latency_stage
from profiler.suite.latency.pair import BATCHED, SINGLE, Grids, PairMeasurement
from profiler.suite.latency.passes import LONG_REPEATS, MODES, Timer, cell, summary
from profiler.suite.latency.points import Passes, PassGrid, Point, Refiner, read_again
from profiler.suite.runs.arms import ARMS, MORE_ARMS, arms_of, more_arms_of, sweeps
from profiler.suite.runs.forced_stage import Unit, forced_trace
from traces.replay.run import replay

SMALL = "cm-asd-12+3"
PASSES = Passes("target", "forward", 4)


@pytest.fixture
def measured(place: Workplace) -> PairMeasurement:
    pair = PAIRS[SMALL].miniature()
    models = latency_stage.build_pair(place, pair)
    return PairMeasurement(place, pair, "eager", models, Grids(True), float("inf"))


def test_what_predictions_need_comes_before_all_else(measured: PairMeasurement) -> None:
    ranks = [piece.rank for piece in measured._left]
    assert ranks == sorted(ranks)
    assert [p.name for p in measured._left if p.rank == SINGLE] == [
        "target, batch 1", "draft, batch 1", "first draft passes, batch 1", "the host at batch 1"
    ]  # fmt: skip
    assert [p.name for p in measured._left if p.rank == BATCHED] == [
        "target, batch 4", "draft, batch 4", "first draft passes, batch 4", "the host at batch 4"
    ]  # fmt: skip


def test_a_target_alone_is_measured_layer_by_layer_before_its_batches(place: Workplace) -> None:
    pair = PAIRS["codellama-7b"].miniature()
    alone = PairMeasurement(place, pair, "eager", (object(), None), Grids(True), 0.0)
    assert [(p.name, p.rank) for p in alone._left[:2]] == [
        ("target, batch 1", SINGLE), ("target, layer by layer", BATCHED)
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
    """The time ends within the draft's passes at batch 4."""
    real = PairMeasurement._check

    def check(self: PairMeasurement, ahead: float = 0.0) -> None:
        if self._now is not None and self._now.name == "draft, batch 4":
            raise NoTimeError("no time left")
        real(self, ahead)

    with monkeypatch.context() as patch:
        patch.setattr(PairMeasurement, "_check", check)
        measured.run(SINGLE)
        measured.run(BATCHED)
    assert {"draft, batch 4", "the host at batch 4"} <= set(measured.unfinished)
    assert [row[2] for row in measured.cells if row[1] == "host_round"] == [1]
    again = PairMeasurement(
        measured.place, measured.pair, "eager",
        (measured.models["target"], measured.models["draft"]), Grids(True), float("inf"),
        measured.unit(),
    )  # fmt: skip
    again.run()
    assert not again.unfinished
    assert [row[2] for row in again.cells if row[1] == "host_round"] == [1, 4]
    assert again.cells[: len(measured.cells)] == measured.cells


def test_no_host_time_where_the_passes_cannot_be_had(
    measured: PairMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pair_latency.make_runner

    def full(mode: str, model: Any, slots: int, batch: int = 1) -> Any:
        if batch == 4 and model is measured.models["draft"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(mode, model, slots, batch)

    monkeypatch.setattr(pair_latency, "make_runner", full)
    measured.run(SINGLE)
    measured.run(BATCHED)
    assert measured.skipped == [
        "draft, batch 4: out of memory", "first draft passes, batch 4: out of memory",
        "the host at batch 4: no forward passes of the draft at batch 4",
    ]  # fmt: skip
    assert not {"draft, batch 4", "the host at batch 4"} & set(measured.unfinished)


def test_points_between_batches_wait_for_both_sides(measured: PairMeasurement) -> None:
    measured.run(SINGLE)
    with pytest.raises(NoTimeError):
        measured.between(2)
    assert {row[2] for row in measured.cells} == {1}
    measured.run(BATCHED)
    measured.between(2)
    assert any(h["batch"] == 2 for h in measured.held_out) or any(
        row[2] == 2 for row in measured.cells
    )


def test_gaps_not_looked_into_leave_their_piece_unfinished(
    measured: PairMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.run(SINGLE)
    name = "finer: target, forward, batch 1"
    cells = len(measured.cells)
    with monkeypatch.context() as patch:
        patch.setattr(pair_latency, "FINER_SHARE", float("-inf"))
        measured.deadline = pair_latency.time.monotonic() + 60
        measured.run()
        assert name in measured.unfinished
        assert len(measured.cells) >= cells
    measured.deadline = float("inf")
    measured.run()
    assert not measured.unfinished
    assert any(h["width"] == 3 for h in measured.held_out) or any(
        row[:4] == ["target", "forward", 1, 3] for row in measured.cells
    )


def test_batches_have_points_at_random_and_as_wide_as_drafts_are() -> None:
    grids = Grids(False)
    widths, _ = grids.points("target", "forward", 16)
    assert max(widths) >= (forced_trace(False).max_gamma or 0) + 1
    rows = [cell(*PASSES, w, c, summary([1e-3 * w + 1e-7 * w * c]))
            for w in (1, 9) for c in (128, 1024)]  # fmt: skip

    def measure(at: Point) -> list[Any]:
        return cell(*PASSES, *at, summary([1e-3 * at.width + 1e-7 * at.width * at.context]))

    grid = PassGrid(PASSES, (1, 9), (128, 1024), measure, tolerance=0.02, least_gap=128,
                    known=rows, booked=[])  # fmt: skip
    assert grid.coarse(lambda: None) == []
    found = grid.at_random(3, lambda: None)
    assert {h["batch"] for h in found} == {4}
    assert all(h["random"] and abs(h["error"]) < 1e-9 for h in found)


def test_refinement_goes_on_where_it_stopped() -> None:
    def cost(at: Point) -> float:
        return 1e-3 + (4e-4 if at.context > 3000 else 0.0) + 1e-6 * at.width

    def rows_of(refiner: Refiner) -> dict[Point, float]:
        return {at: refiner.seconds[at] for at in refiner.grid()}

    whole = Refiner((1, 9), (128, 8192))
    while (at := whole.next()) is not None:
        whole.tell(cost(at))
    part = Refiner((1, 9), (128, 8192))
    for _ in range(9):
        asked = part.next()
        assert asked is not None
        part.tell(cost(asked))
    again = Refiner((1, 9), (128, 8192), seconds=rows_of(part), held_out=dict(part.held_out))
    while (at := again.next()) is not None:
        assert at not in part.grid()
        again.tell(cost(at))
    assert again.unchecked == 0
    for width in (1, 9):  # the step is enclosed as closely as in one go
        low, high = (
            [p.context for p in again.grid() if p.width == width and (p.context > 3000) is above]
            for above in (False, True)
        )
        assert min(high) - max(low) < 2 * 128


def test_errors_at_random_are_those_of_the_final_table() -> None:
    def row(width: int, seconds: float) -> list[Any]:
        return cell("target", "forward", 1, width, 128, summary([seconds]))

    apart = {"model": "target", "phase": "forward", "batch": 1, "width": 5, "context": 128,
             "seconds": 2.0, "error": 0.25, "random": True}  # fmt: skip
    middle = {**apart, "width": 4, "random": False, "error": 0.01}
    cells = [row(1, 1.0), row(9, 4.0)]
    assert read_again([apart], cells)[0]["error"] == pytest.approx(0.25)
    finer = [*cells, row(6, 2.2)]
    assert read_again([apart], finer)[0]["error"] == pytest.approx((1 + 0.8 * 1.2) / 2 - 1)
    assert read_again([apart, middle], [*finer, row(5, 2.0)]) == [middle]


def test_long_calls_are_timed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(passes.time, "perf_counter", lambda: clock[0])
    told = Clock(lambda: clock[0], lambda: clock[0], lambda: 0)
    monkeypatch.setattr(passes, "Stopwatch", partial(Stopwatch, clock=told))
    for seconds, calls, repeats in ((0.02, 2 + 2 * LONG_REPEATS, LONG_REPEATS),
                                    (0.004, 2 + 3 * 5, 5)):  # fmt: skip
        made = [0]

        def run(made: list[int] = made, seconds: float = seconds) -> None:
            made[0] += 1
            clock[0] += seconds

        sample = Timer(torch.device("cpu")).time(run)
        assert sample.median_s == pytest.approx(seconds)
        assert (made[0], sample.repeats) == (calls, repeats)


def test_arms_beyond_those_needed_run_where_the_time_allows() -> None:
    now = [0.0]

    def run(*_: Any) -> tuple[float, int]:
        now[0] += 1.0
        return 1.0, 1

    own = [Arm(name, None) for name in "abcd"]  # type: ignore[arg-type]
    for left, count in ((7.0, 2), (10.5, 3), (13.5, 4)):
        now[0] = 0.0
        ends = partial(lambda end: end - now[0], left)
        rows = sweeps(own, [0], run, repeats=3, needed=2, left=ends, check_time=lambda: None)
        assert len({row[0] for row in rows}) == count
        assert len(rows) == 3 * count


def test_every_arm_can_be_dictated_by_the_forced_trace() -> None:
    trace = forced_trace(True)
    for arm in (*arms_of(trace, False), *more_arms_of(trace, False)):
        assert len(replay(trace, arm.policy, name=arm.name)) > 0
    assert not set(ARMS) & set(MORE_ARMS)


def test_units_share_the_time_by_what_they_cost() -> None:
    small, large = PAIRS[SMALL], PAIRS["qwen2.5-32b+0.5b"]
    assert Unit(large, "eager", 1).cost > 5 * Unit(small, "eager", 1).cost
    assert Unit(large, "eager", 16).cost > Unit(large, "eager", 4).cost
    assert latency_stage.weight(PAIRS["codellama-7b"]) < latency_stage.weight(
        PAIRS["vicuna-7b+68m"]
    )
