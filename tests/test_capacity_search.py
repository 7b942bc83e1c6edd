"""The searches of capacity: the fewest replicas and the highest rate, from any guess."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from simulator.capacity import fewest, highest


def answered(search: Any, answer: Any) -> tuple[Any, list[Any]]:
    """Return the result of a search, and the points that it asked for."""
    asked = []
    value = next(search)
    while True:
        asked.append(value)
        try:
            value = search.send(answer(value))
        except StopIteration as end:
            return end.value, asked


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_the_fewest_are_found_from_any_guess(needed: int, guess: int, most: int) -> None:
    found, asked = answered(fewest(guess, most), lambda count: count >= needed)
    assert found == (needed if needed <= most else None)
    assert all(1 <= count <= most for count in asked)
    distance = abs(needed - min(guess, most)) + 1
    assert len(asked) <= 2 * math.log2(distance) + 5
    # Nobody is believed who was not checked: both sides of the step were asked for.
    if found is not None:
        assert needed == 1 or needed - 1 in asked
        assert needed == most or needed + 1 in asked


@given(st.sets(st.integers(1, 30)), st.integers(1, 30))
def test_an_answer_that_is_chance_is_passed_over(bad: set[int], guess: int) -> None:
    """Whatever fails, what is found passes, and one more does too."""
    found, _ = answered(fewest(guess, 30), lambda count: count not in bad)
    if found is None:
        assert 30 in bad
    else:
        assert found not in bad
        assert found == 30 or found + 1 not in bad


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1.05, 4))
def test_the_highest_rate_is_found_from_any_start(limit: float, start: float, step: float) -> None:
    found, _ = answered(highest(start, step, 0.01, 1e-6, 1e6), lambda rate: rate <= limit)
    assert limit / 1.01 <= found <= limit
    assert answered(highest(start, step, 0.01, start / 50, 1e6), lambda rate: False)[0] == 0
    least, most = start / 50, start * 50
    found, asked = answered(highest(start, step, 0.01, least, most), lambda rate: True)
    assert (math.isinf(found), max(asked) < most * step) == (True, True)
