"""The cost of an iteration, pass by pass, against its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from policies.core import Round
from simulator.serving.cost import Coverage, EngineCost
from tests.compiled import ALONG
from tests.serving import CONSTANT, GRID
from traces.errors import DraftsimError
from traces.replay.calls import drafting_always

LONG, SHORT = 90, 50
SLOTS: list[Any] = [SimpleNamespace(context=LONG), SimpleNamespace(context=SHORT)]
# Position, drafted, accepted, emitted, draft passes, tokens caught up on.
ROUNDS = [Round(0, 2, 1, 2, 2, 3), Round(0, 4, 4, 5, 4, 1)]
PLAIN = [Round(0, 0, 0, 1, 0, 1)] * 2


def draft_s(batch: int, context: float) -> float:
    return float(GRID.seconds("draft", "forward", batch=batch, context=context))


def first_s(batch: int, width: float, context: float) -> float:
    return float(GRID.seconds("draft", "catch_up", batch=batch, new_tokens=width, context=context))


def target_s(batch: int, width: float, context: float) -> float:
    return float(GRID.seconds("target", "forward", batch=batch, new_tokens=width, context=context))


def test_rectangles_are_as_wide_as_the_widest_and_as_long_as_the_longest() -> None:
    cost = EngineCost(GRID, passes="padded")(SLOTS, ROUNDS, [])
    drafts = first_s(2, 3, LONG - 3) + draft_s(2, LONG)
    drafts += draft_s(2, SHORT + 1) + draft_s(2, SHORT + 2)
    assert cost.draft_s == pytest.approx(drafts, rel=1e-12)
    assert cost.target_s == pytest.approx(target_s(2, 5, LONG + 2 - 5), rel=1e-12)
    # Of the host: the round, four draft steps, and what leaves the target's cache.
    assert cost.host_s == pytest.approx(7e-4 + 4 * 3e-4 + 2e-4, rel=1e-12)


def test_ragged_passes_are_read_at_their_means() -> None:
    cost = EngineCost(GRID)(SLOTS, ROUNDS, [])
    mean = (LONG + SHORT) / 2
    first = first_s(2, 2, mean - 2)
    assert cost.draft_s == pytest.approx(first + sum(draft_s(2, mean + k) for k in range(3)))
    assert cost.target_s == pytest.approx(target_s(2, 4, mean - 1), rel=1e-12)


def test_who_drafts_nothing_is_no_part_of_the_drafts_means() -> None:
    resting = [*SLOTS, SimpleNamespace(context=10)]
    rounds = [*ROUNDS, Round(0, 0, 0, 1, 0, 7)]
    mean = (LONG + SHORT) / 2
    padded = first_s(3, 2, mean - 2) + sum(draft_s(3, mean + k) for k in range(3))
    cost = EngineCost(GRID)(resting, rounds, [])
    assert cost.draft_s == pytest.approx(padded, rel=1e-12)
    assert cost.target_s == pytest.approx(target_s(3, 3, (LONG + SHORT + 10) / 3 - 1), rel=1e-12)


@pytest.mark.parametrize("passes", ["ragged", "padded"])
def test_plain_iterations_pay_no_draft_and_drafts_need_a_drafter(
    passes: Literal["ragged", "padded"],
) -> None:
    for speculates in (True, False):
        cost = EngineCost(GRID, speculates=speculates, passes=passes)
        plain = cost(SLOTS, PLAIN, [])
        assert (plain.draft_s, plain.host_s) == (0, 7e-4)
    with pytest.raises(DraftsimError, match="told it never would"):
        EngineCost(GRID, speculates=False)(SLOTS, ROUNDS, [])


def test_what_was_read_is_counted_with_its_sizes() -> None:
    cost = EngineCost(CONSTANT)
    assert cost.coverage == []
    cost(SLOTS, ROUNDS, [])
    assert cost.coverage == [
        Coverage("target", "forward", "measured", 1, (2, 2), (4, 4), (69, 69)),
        Coverage("draft", "forward", "measured", 4, (2, 2), (1, 2), (68, 72)),
    ]


@pytest.mark.parametrize("always", [None, 1, 2])
def test_a_drafter_that_runs_along_takes_that_pass_alone_unless_it_drafts_on(
    always: int | None,
) -> None:
    cost = EngineCost(drafting_always(ALONG, always))(SLOTS, PLAIN, [])
    mean = (LONG + SHORT) / 2
    if always == 2:
        # A draft of two, whose first token leaves the drafter's cache again.
        assert cost.draft_s == pytest.approx(first_s(2, 1, mean - 1) + draft_s(2, mean), rel=1e-12)
        assert cost.host_s == pytest.approx(7e-4 + 2 * 3e-4 + 1e-4, rel=1e-12)
    else:
        along = ALONG.seconds("draft", "along", batch=2, context=mean - 1)
        assert cost.draft_s == pytest.approx(float(along), rel=1e-12)
        assert cost.host_s == 7e-4


def test_drafts_that_are_not_verified_are_paid() -> None:
    unverified = [r._replace(draft_forwards=3, catch_up=1) for r in PLAIN]
    cost, mean = EngineCost(ALONG)(SLOTS, unverified, []), (LONG + SHORT) / 2
    drafts_s = first_s(2, 1, mean - 1) + draft_s(2, mean) + draft_s(2, mean + 1)
    assert cost.draft_s == pytest.approx(drafts_s, rel=1e-12)
    # The tokens also leave the drafter's cache.
    assert cost.host_s == pytest.approx(7e-4 + 3 * 3e-4 + 1e-4, rel=1e-12)


def test_what_has_no_cells_is_named() -> None:
    assert EngineCost(GRID).unpriced == []
    assert EngineCost(GRID, {"signal"}).unpriced == ["signal"]
    assert EngineCost(CONSTANT).unpriced == ["target prefill", "draft prefill", "host_round"]
    assert EngineCost(CONSTANT, speculates=False).unpriced == ["target prefill", "host_round"]
