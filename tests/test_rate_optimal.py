"""The rate-optimal stopping rule against closed forms, dynamic programming, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    ConstantAcceptance,
    DraftPolicy,
    IsotonicAcceptance,
    RateOptimal,
    TextbookCost,
    check_policy,
)
from policies.core import Load, Round, speculate
from policies.lengths.rate_optimal import CONTEXT_BUCKET
from simulator.formulas.leviathan import optimal_gamma
from simulator.formulas.leviathan import speedup as leviathan_speedup
from tests.policy_rounds import Token
from traces.acceptance.synthetic import synthetic_trace
from traces.replay.decoder import RecordedToken, ReplayDecoder


def length(policy: DraftPolicy, probs: Sequence[float]) -> int:
    """Tokens that `policy` drafts and submits where the signals are `probs`."""
    policy.begin_round(Load(1, 0))
    draft: list[Any] = []
    while len(draft) < len(probs) and policy.keep_drafting(draft):
        draft.append(Token(probs[len(draft)]))
    return policy.submit(draft)


@pytest.mark.parametrize(
    "policy",
    [
        RateOptimal(),
        RateOptimal(recalibrate=0.2),
        RateOptimal(rate=[[1, 1.8], [8, 1.1]], trim=False, gamma_max=3),
        RateOptimal(estimator=ConstantAcceptance(0.8), acceptance=0.8),
        RateOptimal(cost=TextbookCost(per_token=0.05)),
        RateOptimal(following=IsotonicAcceptance("entropy", [0.0, 1.0], [0.9, 0.4])),
    ],
)
def test_keeps_the_contract(policy: RateOptimal) -> None:
    check_policy(policy)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rate": -1.0}, "rate is -1"),
        ({"rate": [[None, 1.0]]}, "rate is None"),
        ({"rate": [[1.0]]}, "expected rows"),
        ({"rate": [[4, 1.0], [1, 2.0]]}, "rising batch"),
        ({"gamma_max": 0}, "gamma_max is 0, expected >= 1"),
        ({"acceptance": 1.5}, "acceptance is 1.5"),
        ({"recalibrate": 2.0}, "recalibrate is 2"),
        ({"trim": 1}, "trim is 1"),
    ],
)
def test_impossible_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RateOptimal(**parameters)


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(0.05, 0.97), c=st.floats(0.02, 0.9))
def test_iid_length_is_the_closed_form_argmax(alpha: float, c: float) -> None:
    # The rate of the best fixed length is the fixed point, and the rule at it must stop there.
    best = optimal_gamma(alpha, c, max_gamma=60)
    others = sorted(leviathan_speedup(alpha, g, c) for g in range(61))
    if others[-1] - others[-2] < 1e-9:
        return  # two lengths are equally good: either is right
    rate = leviathan_speedup(alpha, best, c)
    policy = RateOptimal(
        rate, 60, alpha, estimator=ConstantAcceptance(alpha), cost=TextbookCost(draft=c)
    )
    assert length(policy, [0.5] * 60) == best


def brute_force(
    values: Sequence[float], chances: Sequence[float], c: float, gamma_max: int
) -> float:
    """The largest rate over all stopping rules, by dynamic programming and bisection.

    Every token's acceptance is drawn from `values` with `chances`, seen once drafted.
    """
    mean = float(np.dot(values, chances))

    def worth(rate: float) -> float:
        def onward(survival: float, drafted: int) -> float:
            if drafted == gamma_max:
                return 0.0
            ahead = sum(
                q * onward(survival * v, drafted + 1) for v, q in zip(values, chances, strict=True)
            )
            return max(0.0, survival * mean - rate * c + ahead)

        return 1.0 - rate + onward(1.0, 0)

    low, high = 0.0, gamma_max + 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(middle) > 0 else (low, middle)
    return low


def rate_of(policy: RateOptimal, values: Sequence[float], chances: Sequence[float], c: float,
            gamma_max: int) -> float:  # fmt: skip
    """Exact tokens per unit of time of `policy` on that process, over every signal path."""
    tokens = seconds = 0.0
    weights = dict(zip(values, chances, strict=True))
    for path in itertools.product(values, repeat=gamma_max):
        chance = math.prod(weights[v] for v in path)
        n = length(policy.fresh(), path)
        tokens += chance * (1 + sum(math.prod(path[:k]) for k in range(1, n + 1)))
        seconds += chance * (1 + c * n)
    return tokens / seconds


@pytest.mark.parametrize(
    ("values", "chances", "c"),
    [
        ((0.2, 0.95), (0.4, 0.6), 0.1),
        ((0.0, 0.5, 0.99), (0.2, 0.3, 0.5), 0.15),
        ((0.6, 0.7), (0.5, 0.5), 0.3),
        ((0.1, 0.3), (0.5, 0.5), 0.4),
        ((0.5, 1.0), (0.3, 0.7), 0.05),
    ],
)
def test_no_stopping_rule_is_faster_by_dynamic_programming(
    values: tuple[float, ...], chances: tuple[float, ...], c: float
) -> None:
    gamma_max = 6
    best = brute_force(values, chances, c, gamma_max)
    mean = float(np.dot(values, chances))
    policy = RateOptimal(best, gamma_max, mean, cost=TextbookCost(draft=c))
    assert rate_of(policy, values, chances, c, gamma_max) == pytest.approx(best, rel=1e-9)
    # The comparison tells rules apart: one that never stops is slower.
    endless = RateOptimal(0.0, gamma_max, mean, cost=TextbookCost(draft=c))
    assert rate_of(endless, values, chances, c, gamma_max) < best


def test_a_steeper_price_of_verification_shortens_drafts() -> None:
    probs = [0.9] * 12
    flat = RateOptimal(2.0, 12, 0.9, cost=TextbookCost(draft=0.05))
    steep = RateOptimal(2.0, 12, 0.9, cost=TextbookCost(draft=0.05, per_token=0.1))
    assert length(steep, probs) < length(flat, probs)


class Step:
    """A target pass that is dearer as soon as it verifies anything, and flat from there."""

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        return 0.05 * draft_length + (1.4 if verify_tokens > batch else 1.0)


def test_looks_past_a_jump_of_the_cost() -> None:
    # The first draft alone does not pay (0.9 < 2.2 x 0.45), several together do.
    assert length(RateOptimal(2.2, 1, 0.9, cost=Step()), [0.9]) == 0
    assert length(RateOptimal(2.2, 12, 0.9, cost=Step()), [0.9] * 12) > 1


def test_estimates_are_told_the_place_of_the_token_they_read() -> None:
    """Both the token's own and that of the one after it: its offset in the draft, from 0."""
    asked: list[tuple[str, float, int]] = []

    class Noting(ConstantAcceptance):
        reads = ("prob",)

        def __init__(self, name: str) -> None:
            super().__init__(0.9)
            self.name = name

        def __call__(self, token: Any, offset: int) -> float:
            asked.append((self.name, token.prob, offset))
            return super().__call__(token, offset)

    policy = RateOptimal(1.5, 6, 0.9, estimator=Noting("own"), following=Noting("next"))
    probs = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert length(policy, probs) > 2
    for name in ("own", "next"):
        places = {(p, offset) for n, p, offset in asked if n == name}
        assert len(places) > 2
        assert all(probs[offset] == p for p, offset in places)


def test_drops_drafts_not_worth_verifying() -> None:
    dear = TextbookCost(draft=0.01, per_token=0.2)
    kept = RateOptimal(2.0, 4, 0.9, cost=dear)
    assert length(kept, [0.9, 0.05, 0.9, 0.9]) == 1
    assert length(kept, [0.05, 0.05]) == 0, "not even the first"
    whole = RateOptimal(2.0, 4, 0.9, trim=False, cost=dear)
    assert length(whole, [0.9, 0.05, 0.9, 0.9]) == 2


def test_recalibration_follows_what_is_observed() -> None:
    policy = RateOptimal(1.8, 10, 0.9, recalibrate=0.3, cost=TextbookCost(draft=0.2))
    before = length(policy, [0.9] * 10)
    for _ in range(20):
        length(policy, [0.9] * 10)
        policy.observe(Round(0, 3, 0, 1, 3, 1), [Token(0.9)] * 3)
    assert length(policy, [0.9] * 10) < before


def test_rate_depends_on_the_batch() -> None:
    policy = RateOptimal([[1, 1.5], [8, 9.0]], 10, 0.8, cost=TextbookCost())
    drafted = []
    for batch in (1, 7, 8, 64):
        policy.begin_round(Load(batch, 0))
        draft: list[Any] = []
        while policy.keep_drafting(draft):
            draft.append(Token(0.8))
        drafted.append(len(draft))
    assert drafted[0] == drafted[1] > drafted[2] == drafted[3] == 0


def test_prices_a_context_within_the_bucket_that_holds_it() -> None:
    """Neighbouring contexts share one price, which is at most a bucket away from their own."""
    asked: list[float] = []

    class Noting(TextbookCost):
        def __call__(
            self, batch: int, draft_length: int, verify_tokens: int, context: float
        ) -> float:
            asked.append(context)
            return super().__call__(batch, draft_length, verify_tokens, context)

    for context in (0, 31, 32, 100, 1000):
        asked.clear()
        policy = RateOptimal(1.8, 10, 0.9, cost=Noting(draft=0.2))
        policy.begin_round(Load(1, context))
        policy.keep_drafting([])
        first = context // CONTEXT_BUCKET * CONTEXT_BUCKET
        assert asked
        assert all(first <= at < first + CONTEXT_BUCKET for at in asked)
        # In its middle, so that prices are off by half a bucket at most.
        assert set(asked) == {first + CONTEXT_BUCKET / 2}


class Counting(ReplayDecoder):
    """Counts the tokens it is asked to draft."""

    calls = 0

    def draft(self, so_far: Sequence[Any]) -> RecordedToken:
        self.calls += 1
        return super().draft(so_far)


def test_real_loop_runs_it_with_one_decoder_call_per_token() -> None:
    decoder = Counting(synthetic_trace(0.8, requests=1, tokens=50, concentration=5.0), 0)
    # Dear to verify, so that some drafted tokens are dropped: they were drafted all the same.
    policy = RateOptimal(2.0, cost=TextbookCost(draft=0.01, per_token=0.2))
    rounds = list(speculate(decoder, policy.fresh()))
    assert sum(r.emitted for r in rounds) == 49
    assert decoder.calls == sum(r.draft_forwards for r in rounds)
    assert decoder.calls > sum(r.drafted for r in rounds)
