"""Policies that set a length: fixed, oracle, GammaTune; and parameters out of bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    CMASD,
    AdaEDL,
    Autoregressive,
    Confidence,
    Fixed,
    GammaTune,
    GammaTunePlus,
    HFHeuristic,
    IsotonicAcceptance,
    Load,
    LogisticAcceptance,
    Oracle,
    UCBSpec,
)
from tests.policy_rounds import Token, one_round, sent


def test_reference_policies() -> None:
    assert sent(Autoregressive(), [3, 0]) == [0, 0]
    assert sent(Fixed(3), [9, 0, 1]) == [3, 3, 3]
    assert sent(Fixed(0), [9]) == [0]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 30))
def test_oracle_stops_at_or_after_the_run(runs: list[int], longest: int) -> None:
    assert sent(Oracle(), runs) == runs
    assert sent(Oracle("run+1"), runs) == [r + 1 for r in runs]
    assert sent(Oracle(gamma_max=longest), runs) == [min(r, longest) for r in runs]


def test_oracle_needs_a_recording() -> None:
    with pytest.raises(ValueError, match="only a recording"):
        Oracle().begin_round(Load(1, 10, None))


def test_gammatune_vector() -> None:
    """Worked by hand from equations 7 and 8: eta .3, delta 2, bounds [1, 16], start 4."""
    policy = GammaTune(gamma=4, eta=0.3, delta=2, gamma_min=1, gamma_max=16)
    seen = []
    for run in (4, 6, 1, 0, 5, 9):
        _, drafted, accepted = one_round(policy, run)
        seen.append((drafted, accepted, policy._mean))
    expected = [
        (4, 4, 4.6), (5, 5, 5.32), (6, 1, 4.024), (5, 0, 2.8168), (3, 3, 3.4718), (4, 4, 4.2302)
    ]  # fmt: skip
    for got, want in zip(seen, expected, strict=True):
        assert got[:2] == want[:2]
        assert got[2] == pytest.approx(want[2], abs=5e-5)
    assert sent(policy, [0]) == [5]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(5, 12))
def test_gammatune_stays_within_its_bounds(runs: list[int], low: int, high: int) -> None:
    policy = GammaTune(gamma=5, gamma_min=low, gamma_max=high)
    assert all(low <= n <= high for n in sent(policy, runs))


def test_gammatune_grows_to_the_bound_on_full_acceptance_only_through_delta() -> None:
    assert sent(GammaTune(gamma=4, delta=2, gamma_max=10), [99] * 100)[-1] == 10
    assert sent(GammaTune(gamma=4, delta=0, gamma_max=10), [99] * 100) == [4] * 100


def test_gammatune_readings_of_full_acceptance_differ_on_a_cut_draft() -> None:
    generous, strict = (
        GammaTune(gamma=6, eta=1, delta=2, full_accept_means=m) for m in ("sent", "budget")
    )
    for policy in (generous, strict):
        assert one_round(policy, run=9, limit=3) == (3, 3, 3)
    assert sent(generous, [0]) == [5]
    assert sent(strict, [0]) == [3]


def test_gammatune_plus_keeps_the_token_that_stops_it() -> None:
    tokens = [Token(top_prob=0.9), Token(top_prob=0.39), Token(top_prob=0.9)]
    assert sent(GammaTunePlus(gamma=5, threshold=0.4), [0], tokens=tokens) == [2]
    tokens[1].top_prob = 0.4
    assert sent(GammaTunePlus(gamma=5, threshold=0.4), [0], tokens=tokens) == [5]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(-1), "gamma is -1, expected >= 0"),
        (lambda: Fixed(2.5), "gamma is 2.5, expected an integer >= 0"),  # type: ignore[arg-type]
        (lambda: Oracle("run+2"), "convention is 'run\\+2', expected one of"),  # type: ignore[arg-type]
        (lambda: Confidence(confidence_threshold=1.5), "is 1.5, expected between 0 and 1"),
        (lambda: Confidence(confidence_threshold=math.nan), "expected a finite number"),
        (lambda: HFHeuristic(gamma=9, gamma_max=8), "gamma is 9, expected <= gamma_max = 8"),
        (lambda: HFHeuristic(persist="persistent", roc_update="in_call"), "roc_update is"),
        (lambda: GammaTune(eta=2), "eta is 2, expected between 0 and 1"),
        (lambda: GammaTune(gamma_min=5, gamma_max=4), "gamma_min is 5, expected <= gamma_max"),
        (lambda: AdaEDL(keep_trigger_token=1), "keep_trigger_token is 1"),  # type: ignore[arg-type]
        (lambda: CMASD(weights=(1, 1, 0)), "weights is \\[1, 1, 0\\], expected three numbers"),
        (lambda: CMASD(vocab_size=1), "vocab_size is 1, expected >= 2"),
        (lambda: UCBSpec(gammas=()), "one or more distinct lengths"),
        (lambda: UCBSpec(gammas=(1, 10**40)), "expected at most 4096"),
        (lambda: IsotonicAcceptance("prob", [0.1, 0.1], [0, 1]), "strictly rising"),
        (lambda: LogisticAcceptance(["prob"], [1.0], 0.0), "expected one more"),
    ],
)
def test_impossible_parameters_are_named_with_their_bound(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
