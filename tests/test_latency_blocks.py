"""Timing passes in blocks: which cells, how often, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from profiler.latency.passes import SETTLING, decoding_blocks, signal_block  # noqa: E402
from profiler.latency.table import FIRST_WIDTHS, Block, Grid, Step, Sweeps, swept  # noqa: E402
from profiler.machine import NoTimeError, Timing  # noqa: E402
from traces.errors import DraftsimError  # noqa: E402 - needs torch
from traces.store.checkpoint import Checkpoint  # noqa: E402 - needs torch

CPU = torch.device("cpu")
Key = tuple[str, int, int]


class Log:
    """Calls that only record that they were made, instead of a model's passes."""

    def __init__(self) -> None:
        self.calls: list[Key] = []

    def passes(self, name: str) -> Callable[[int, int], Callable[[], object]]:
        return lambda width, context: lambda: self.calls.append((name, width, context))


def test_a_block_decodes_as_a_round_does() -> None:
    log = Log()
    blocks = list(decoding_blocks(log.passes("target"), log.passes("draft"), (1, 4), (8,)))
    for steps in blocks[-2].rounds:
        for step in steps:
            step.run()
    assert len(log.calls) == 4 * len(blocks[-2].rounds)  # three draft passes and a target pass
    for start in range(0, len(log.calls), 4):
        models = [name for name, _, _ in log.calls[start : start + 4]]
        assert models == ["draft", "draft", "draft", "target"]
        assert [w for _, w, _ in log.calls[start + 1 : start + 4]] == [1, 1, 4]
    # What soon follows the first is told apart by its place.
    wide, _ = decoding_blocks(log.passes("target"), log.passes("draft"), (9,), (8,))
    drafts = wide.rounds[0][:-1]
    cells = [(step.phase, step.new_tokens) for step in drafts]
    settling = [("settling", place) for place in range(1, SETTLING + 1)]
    assert cells == [("catch_up", 1), *settling, *[("forward", 1)] * (7 - SETTLING)]
    # Plain decoding drafts nothing.
    assert {step.model for steps in blocks[0].rounds for step in steps} == {"target"}


def test_no_round_drafts_further_than_the_longest_draft() -> None:
    log = Log()
    made = [*decoding_blocks(log.passes("target"), log.passes("draft"), (5, 17), (8,), longest=6)]
    drafts = [[s for s in block.rounds[0] if s.model == "draft"] for block in made[:2]]
    assert [len(own) for own in drafts] == [4, 6]
    assert made[1].rounds[0][-1].new_tokens == 17


@pytest.mark.parametrize("untimed", [0, 1, 2, 3])
def test_every_cell_is_timed(untimed: int) -> None:
    log = Log()
    made = decoding_blocks(log.passes("target"), log.passes("draft"), (1, 3), (8, 9), 2, untimed)
    for block in made:
        seen = {step.cell for steps in block.rounds for step in steps}
        timed = {step.cell for steps in block.rounds[block.untimed :] for step in steps}
        assert timed == seen
        caught_up = {c[3] for c in timed if c[1] == "catch_up"}
        assert caught_up in (set(), set(FIRST_WIDTHS))


def test_short_rounds_have_two_draft_passes_and_the_same_cells() -> None:
    log = Log()
    passes = log.passes("target"), log.passes("draft")
    made = list(decoding_blocks(*passes, (1, 2, 9), (8,), short=True))
    assert len(made) == 4  # plain decoding is not repeated
    for width, block in zip((1, 2, 9), made, strict=False):
        assert block.untimed == 1
        for steps in block.rounds:
            phases = [step.phase for step in steps]
            drafting = ["catch_up", "forward"][: min(width - 1, 2)]
            assert phases == [*drafting, "forward"]
    cells = {step.cell for block in made for steps in block.rounds for step in steps}
    usual = {
        step.cell for block in decoding_blocks(*passes, (1, 2, 9), (8,))
        for steps in block.rounds for step in steps
    }  # fmt: skip
    assert cells == {cell for cell in usual if cell[1] != "settling"}


def test_a_target_alone_drafts_nothing() -> None:
    log = Log()
    for short in (False, True):
        made = list(decoding_blocks(log.passes("target"), None, (1, 3), (8,), short=short))
        models = {step.model for block in made for steps in block.rounds for step in steps}
        assert models == {"target"}


def test_sweeps_end_between_two_blocks_and_only_whole_ones_count() -> None:
    log = Log()
    blocks = list(decoding_blocks(log.passes("target"), log.passes("draft"), (1, 2), (8,)))
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > most:
            raise NoTimeError("no time left")

    cells = len({step.cell for block in blocks for steps in block.rounds for step in steps})
    most = cells + 2 * len(blocks) + 1  # warms up, two sweeps, and a part of the third
    found = swept(blocks, CPU, 3, warmup=1, check=check)
    assert set(found["repeats"]) == {2}
    assert len(calls) == most + 1
    calls.clear()
    most = cells + 1
    with pytest.raises(NoTimeError):
        swept(blocks, CPU, 3, warmup=1, check=check)
    found = swept(blocks, CPU, 3, warmup=0, late=lambda: True)
    assert set(found["repeats"]) == {1}


@pytest.mark.parametrize("widths", [(1,), (1, 3), (1, 2, 3, 4, 5, 7), (7, 9)])
def test_signals_are_read_token_after_token_at_a_width_of_the_grid(widths: tuple[int, ...]) -> None:
    log = Log()
    block = signal_block(log.passes("target"), log.passes("draft"), lambda: None, widths, 8)
    phases = [step.phase for step in block.rounds[-1]]
    drafted = max(phases.count("signal"), 1)
    assert phases[1:-1:2] == ["signal"] * drafted
    assert phases[0] == "catch_up"
    assert phases[-1] == "forward"
    verified = block.rounds[-1][-1].new_tokens
    assert verified in widths
    assert drafted == max(verified - 1, 1)


def test_batch_sizes_take_turns_whole() -> None:
    ran: list[tuple[int, int]] = []

    def block(batch: int, number: int) -> Block:
        return Block([[Step("target", "forward", number, 8, lambda: ran.append((batch, number)),
                            batch)]])  # fmt: skip

    blocks = [block(batch, number) for number in range(1, 9) for batch in (1, 4, 16)]
    sweeps = Sweeps(blocks, CPU, warmup=0)
    orders = []
    for _ in range(4):
        ran.clear()
        sweeps.run()
        assert sorted(ran) == sorted((b, n) for b in (1, 4, 16) for n in range(1, 9))
        batches = [batch for batch, _ in ran]
        assert sum(a != b for a, b in pairwise(batches)) == 2
        orders.append(list(ran))
    assert len({tuple(order) for order in orders}) > 1


def test_sweeps_time_the_last_rounds_only_and_pool_a_cell_over_blocks() -> None:
    clock = iter([5.0, 1.0, 2.0, 3.0] * 3)
    counts: Counter[str] = Counter()

    def run(name: str) -> Callable[[], object]:
        return lambda: counts.update([name])

    shared = Step("draft", "forward", 1, 8, run("shared"))
    blocks = [Block([[shared], [shared], [shared]], untimed=1), Block([[shared]])]
    sweeps = Sweeps(blocks, CPU, warmup=2)
    times: list[float] = []

    def measure(call: Callable[[], object]) -> tuple[Timing, object]:
        found = call()
        times.append(next(clock))
        return Timing(times[-1]), found

    sweeps._watch.measure = measure  # type: ignore[assignment, method-assign]
    sweeps.run()
    assert counts["shared"] == 2 + 4
    row = sweeps.cells().iloc[0]
    # The order of the two blocks is random: either the first call is untimed, or the second.
    assert row["median_s"] in (
        pytest.approx((sum(times) - times[0]) / 3),
        pytest.approx((sum(times) - times[1]) / 3),
    )
    assert row["repeats"] == 1


def test_sweeps_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    log = Log()
    blocks = list(decoding_blocks(log.passes("target"), log.passes("draft"), (1, 2), (8,)))
    first = Sweeps(blocks, CPU, checkpoint=Checkpoint(tmp_path / "kept", {}))
    first.run()
    first.run()
    again = Sweeps(blocks, CPU, checkpoint=Checkpoint(tmp_path / "kept", {}))
    assert len(again) == 2
    assert again.cells().equals(first.cells())
    again.run()
    assert (again.cells()["repeats"] == 3).all()


def test_kept_sweeps_over_other_cells_are_refused(tmp_path: Path) -> None:
    log = Log()
    for context in (8, 9):  # as many cells, of another grid
        blocks = decoding_blocks(log.passes("target"), log.passes("draft"), (1, 2), (context,))
        kept = Checkpoint(tmp_path / "kept", {})
        if context == 8:
            Sweeps(list(blocks), CPU, checkpoint=kept).run()
        else:
            with pytest.raises(DraftsimError, match="kept holds sweeps over other cells: remove"):
                Sweeps(list(blocks), CPU, checkpoint=kept)


def test_a_grid_reaches_to_the_longest_prompt_and_its_output() -> None:
    assert Grid().reaching(200, 128) == Grid()
    grid = Grid().reaching(1700, 128)
    assert grid.contexts == (32, 128, 256, 512, 1024, 2048)
    assert grid.prompts == (32, 64, 128, 256, 1024)
    assert grid.reaching(1700, 128) == grid


def test_a_grid_covers_what_a_recording_reaches_and_no_more() -> None:
    grid = Grid().drafting(5).covering(62, 32)  # 62 + 32 + 5 tokens
    assert (grid.contexts, grid.prompts) == ((32, 128), (32, 64))
    assert grid.widths == Grid().widths
    assert grid.narrow().widths == (1, 2, 3, 4, 5, 6)
    assert Grid().narrow() == Grid()
    # Points within are kept; further ones are added as for a whole grid.
    long = Grid().drafting(5).covering(240, 60)
    assert (long.contexts, long.prompts) == ((32, 128, 256, 320), (32, 64, 128, 256))
    longer = Grid().covering(1700, 128)
    assert longer.contexts == (32, 128, 256, 512, 1024, 1856)
    assert longer.prompts == Grid().reaching(1700, 128).prompts


def test_a_cut_grid_has_two_points_to_interpolate_between() -> None:
    grid = Grid().drafting(1).covering(3, 2).narrow()
    assert (grid.contexts, grid.prompts, grid.widths) == ((32, 128), (32, 64), (1, 2))
    assert Grid().drafting(1).covering(30, 20).contexts == (32, 64)


def test_a_covering_grid_goes_on_to_the_context_asked_for() -> None:
    assert Grid().covering(62, 32, 512) == Grid()
    grid = Grid().covering(62, 32, 1500)
    assert grid.contexts == (32, 128, 256, 512, 1024, 1504)
    assert grid.prompts == (32, 64, 128, 256, 1024)
    assert Grid().covering(62, 32, 10) == Grid().covering(62, 32)


def test_the_verification_of_the_longest_draft_is_timed() -> None:
    assert Grid().drafting(24) == Grid()
    longer = Grid().drafting(40)
    assert longer.widths == (*Grid().widths, 41)
    assert longer.batch_widths == (*Grid().batch_widths, 41)
    assert Grid().drafting(8).batch_widths == (1, 2, 3, 5, 9)
    assert Grid().drafting(6).batch_widths == (1, 2, 3, 5, 7)
