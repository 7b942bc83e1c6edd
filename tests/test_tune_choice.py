"""How a draft length is chosen: beyond chance, and judged on prompts held back."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bootstrap import resamples
from simulator.tune.gains import (
    Objective,
    choose,
    cross_fitted,
    folds,
    resampled,
    shared_by_neighbours,
)
from tests.tuning import iid


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=2),
            min_size=n, max_size=n,
        )
    )
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_neighbours_share_the_fewest_ranges(sets: list[list[set[int]]]) -> None:
    allowed = np.array([[[o in cell for o in range(4)] for cell in row] for row in sets])
    merged = shared_by_neighbours(allowed)
    assert (merged <= allowed).all()
    assert merged.any(axis=2).all()
    # Fewest runs by brute force over all ways to cut.
    n = len(sets)
    fewest = n
    for cuts in product([False, True], repeat=n - 1):
        groups: list[Any] = []
        start = 0
        for i, cut in enumerate([*cuts, True], start=1):
            if cut:
                groups.append(allowed[start:i].all(axis=0))
                start = i
        if all(g.any(axis=1).all() for g in groups):
            fewest = min(fewest, len(groups))
    found = 1 + sum(not np.array_equal(merged[i], merged[i - 1]) for i in range(1, n))
    assert found <= fewest


def objective(seconds: list[list[float]], draws: int = 400) -> Objective:
    s = np.array(seconds)
    return Objective(np.ones_like(s), s, resamples(s.shape[1], draws, 0))


def test_fewer_drafts_win_unless_more_are_better_beyond_the_interval() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.3, 40)
    plain = np.full(40, 2.0)
    equal, better = plain + noise - noise.mean() - 0.01, plain - 0.5 + noise / 10
    assert choose(objective([plain.tolist(), equal.tolist()])) == 0
    assert choose(objective([plain.tolist(), better.tolist()])) == 1
    assert choose(objective([[2.0], [1.9]])) == 1  # one prompt has no interval


def test_a_gain_is_that_of_prompts_held_back() -> None:
    # The first half of the prompts likes option 0, the second option 1.
    second = np.array([False, True] * 4)
    likes = [[1.0 if not half else 2.0 for half in second], [2.0 if not half else 1.0
             for half in second]]  # fmt: skip
    o = objective(likes)
    plain = (np.ones(8), np.full(8, 1.5))
    halves = choose(o.on(~second)), choose(o.on(second))
    assert halves == (0, 1)
    fitted = cross_fitted(o, second, plain, 0, halves)
    # Chosen elsewhere, both are the wrong ones: 2 s a prompt, where 1.5 s is the default.
    assert fitted[0] == pytest.approx(0.75)
    in_sample = cross_fitted(o, second, plain, 0)
    assert in_sample[0] == pytest.approx(1.0)
    assert in_sample[1] <= in_sample[0] <= in_sample[2]


def test_folds_split_every_category() -> None:
    second = folds(["a", "b", "a", "b", "a", "b", "a"])
    names = np.array(["a", "b", "a", "b", "a", "b", "a"])
    for name in "ab":
        assert abs(second[names == name].sum() - (~second[names == name]).sum()) <= 1
    assert folds(["a", "b", "c", "d"]).sum() == 2


def test_no_two_seeds_share_a_resample() -> None:
    trace = iid(0.7, 20, 20)
    second = folds([request.category for request in trace.requests])
    drawn = [
        tuple(request.id for request in one.requests)
        for seed in (0, 1, 2) for one in resampled(trace, second, 8, seed).traces
    ]  # fmt: skip
    assert len(set(drawn)) == 3 * 8
    again = resampled(trace, second, 8, 0).traces
    assert [tuple(request.id for request in one.requests) for one in again] == drawn[:8]
