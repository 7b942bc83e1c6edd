"""Policies that learn: estimators of acceptance, and bandits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from policies import (
    DraftPolicy,
    EXP3Spec,
    IsotonicAcceptance,
    Load,
    LogisticAcceptance,
    SpecDecPP,
    TextbookCost,
    UCBSpec,
)
from tests.policy_rounds import Token, sent


def test_specdec_pp_reads_its_estimate_one_token_late() -> None:
    tokens = [Token(prob=p) for p in (0.9, 0.7, 0.9, 0.9, 0.9)]
    # Products .9, .63: 1 - .63 > .3, seen after token 2 without the lag, 3 with it.
    assert sent(SpecDecPP(lag=False), [0], tokens=tokens) == [2]
    assert sent(SpecDecPP(lag=True), [0], tokens=tokens) == [3]
    doubt = [Token(prob=0.1)] * 9
    assert sent(SpecDecPP(gamma_min=4, lag=False), [0], tokens=doubt) == [4]


@pytest.mark.parametrize("rising", [True, False])
def test_isotonic_fit_is_the_least_squares_monotone_one(rising: bool) -> None:
    from sklearn.isotonic import IsotonicRegression  # type: ignore[import-untyped,unused-ignore]

    rng = np.random.default_rng(4)
    x = rng.random(300).round(2)
    y = (rng.random(300) < (x if rising else 1 - x)).astype(float)
    fit = IsotonicAcceptance.fit("entropy", x, y, rising=rising)
    reference = IsotonicRegression(increasing=rising).fit(x, y)
    got = [fit(Token(entropy=v), 0) for v in x]
    np.testing.assert_allclose(got, reference.predict(x), atol=1e-9)
    assert list(fit.reads) == ["entropy"]
    steps = [b >= a if rising else b <= a for a, b in pairwise(fit.values)]
    assert all(steps)


def test_logistic_fit_recovers_what_made_the_data() -> None:
    """Within 4 standard errors (inverse Fisher information) of the generating weights."""
    rng = np.random.default_rng(1)
    n = 6000
    x, offset = rng.normal(size=n), rng.integers(0, 8, n).astype(float)
    truth = np.array([1.5, -0.2, 0.4])
    z = np.column_stack([x, offset, np.ones(n)])
    p = 1 / (1 + np.exp(-z @ truth))
    y = (rng.random(n) < p).astype(float)
    fit = LogisticAcceptance.fit(["entropy"], x[:, None], offset, y, ridge=0.0)
    errors = np.sqrt(np.diag(np.linalg.inv((z.T * (p * (1 - p))) @ z)))
    got = np.array([*fit.weights, fit.bias])
    assert (np.abs((got - truth) / errors) < 4).all()
    expected = 1 / (1 + math.exp(-float(np.dot(got, [0.3, 2, 1]))))
    assert fit(Token(entropy=0.3), 2) == pytest.approx(expected)


def pulls(policy: DraftPolicy, accept: float, rounds: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return sent(policy, (rng.geometric(1 - accept, rounds) - 1).tolist())


def test_paper_ucb_drifts_to_the_longest_arm_and_the_cost_aware_one_to_the_best() -> None:
    """At acceptance .5 and a draft step worth .5 targets, 1 breaks even and 8 loses 60%."""
    cost = TextbookCost(target=1.0, draft=0.5)
    blind = pulls(UCBSpec("ucb_paper", (1, 8), cost=cost), 0.8, 3000)
    aware = pulls(UCBSpec("ucb_cost", (1, 8), cost=cost), 0.5, 3000)
    assert np.mean(np.array(blind[1500:]) == 8) > 0.5
    assert np.mean(np.array(aware[1500:]) == 1) > 0.5


def test_ucb_index_is_the_printed_one() -> None:
    policy = UCBSpec("ucb_paper", (2, 4), confidence=0.1)
    sent(policy, [2, 3])
    t, n = 3, 1
    bonus = 2 * math.sqrt((1 + n) / n**2 * (1 + 2 * math.log(2 * t**2 * math.sqrt(2) / 0.1)))
    assert policy._index(0, t, policy._spread()) == pytest.approx(3 + bonus)
    assert policy._index(1, t, policy._spread()) == pytest.approx(4 + bonus)


def test_greedy_code_rotates_seven_rounds_then_takes_the_best_mean() -> None:
    policy = UCBSpec("greedy_code", cost=TextbookCost(1.0, 0.1))
    lengths = sent(policy, [99] * 12)
    assert lengths[:7] == [1, 2, 3, 4, 1, 2, 3]
    assert lengths[7:] == [4] * 5


def test_exp3_weights_and_repeatability() -> None:
    policy = EXP3Spec((1, 4), seed=5)
    first = sent(policy, [0])[0]
    # A rejected draft of the longest arm loses L / L over a chance of 1/2; so does the shorter.
    assert policy._losses == [2.0 * (first == 1), 2.0 * (first == 4)]
    policy.begin_round(Load(1, 9, 0))
    rate = math.sqrt(math.log(2) / (2 * 2))
    odds = math.exp(-rate * 2.0)
    hit = 0 if first == 1 else 1
    assert policy._chances[hit] == pytest.approx(odds / (1 + odds))
    assert pulls(EXP3Spec(seed=5), 0.7, 50) == pulls(EXP3Spec(seed=5), 0.7, 50)
    assert pulls(EXP3Spec(seed=5), 0.7, 50) != pulls(EXP3Spec(seed=6), 0.7, 50)
