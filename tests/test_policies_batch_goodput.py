"""Lengths by goodput: scans by hand and closed forms, Goodput's and TurboSpec's."""

from __future__ import annotations

import numpy as np
import pytest

from policies import Goodput, TextbookCost, TurboSpec
from tests.batch_rounds import loads, outcomes


def test_goodput_against_a_scan_by_hand() -> None:
    cost = TextbookCost(target=1.0, draft=0.3)
    policy = Goodput(gamma_max=4, warmup=3, cost=cost)
    for accepted in ([4, 2], [1, 0], [3, 2]):
        assert policy.plan(loads(2)) == 4
        policy.observe(outcomes(4, accepted))
    survival = [5 / 6, 4 / 6, 2 / 6, 1 / 6]
    values = [(1 + sum(survival[:k])) / (1 + 0.3 * k) for k in range(5)]
    assert policy.plan(loads(2)) == int(np.argmax(values)) == 2


def test_goodput_breaks_ties_downwards_and_cannot_explore_upwards() -> None:
    free = TextbookCost(target=1.0, draft=0.0)
    policy = Goodput(gamma_max=4, warmup=1, cost=free)
    policy.observe(outcomes(2, [2, 2]))
    assert policy.plan(loads(2)) == 2
    never = Goodput(gamma_max=4, warmup=1, cost=free)
    never.observe(outcomes(4, [0, 0]))
    assert never.plan(loads(2)) == 0


@pytest.mark.parametrize(("a", "c"), [(0.6, 0.1), (0.7, 0.1), (0.8, 0.05), (0.8, 0.1), (0.9, 0.2)])
def test_turbospec_finds_the_closed_form_optimum(a: float, c: float) -> None:
    """With a constant acceptance rate the best k is the argmax of Leviathan's speedup."""
    speedup = [(1 - a ** (k + 1)) / ((1 - a) * (1 + k * c)) for k in range(17)]
    assert speedup[1] > 1.1  # so that the bonus on k = 0 does not decide
    policy = TurboSpec(gamma_max=16, acceptance=a, cost=TextbookCost(1.0, c))
    assert policy.plan(loads(8)) == int(np.argmax(speedup))


def test_turbospec_asks_a_tenth_more_before_it_speculates() -> None:
    """One draft per round gains 1.5 / 1.4 = 7 % or 1.5 / 1.3 = 15 % at acceptance .5."""
    for draft, then in ((0.4, 0), (0.3, 1)):
        policy = TurboSpec(acceptance=0.5, cost=TextbookCost(1.0, draft))
        assert policy.plan(loads(4)) == then


def test_turbospec_holds_its_length_between_scans_and_tracks_acceptance() -> None:
    policy = TurboSpec(gamma_max=6, acceptance=0.9, interval=3, cost=TextbookCost(1.0, 0.2))
    first = policy.plan(loads(2))
    assert first > 0
    for _ in range(3):
        assert policy.plan(loads(2)) == first
        policy.observe(outcomes(first, [0, 0]))
    assert policy._acceptance == pytest.approx(0.9 * 0.85**3)
    for _ in range(60):
        policy.plan(loads(2))
        policy.observe(outcomes(first, [0, 0]))
    assert policy.plan(loads(2)) == 0


def test_turbospec_batch_variant_never_turns_off_after_its_first_scan() -> None:
    policy = TurboSpec("batch-dsd", acceptance=0.0, interval=1)
    assert policy.plan(loads(4)) == 0
    for _ in range(5):
        policy.observe(outcomes(1, [0, 0]))
        assert policy.plan(loads(4)) == 1
