"""Rules that toss coins: the shares they accept, and their seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from policies.rules.ratio import Ensemble, Lenience
from tests.rule_positions import Position, V, accept, acceptance_probability, leading, positions


def z_of(hits: int, trials: int, share: float) -> float:
    return (hits - trials * share) / math.sqrt(trials * share * (1 - share))


def draws(x: Position, rule: Any, trials: int = 4000) -> tuple[int, int]:
    """Accepted of `trials` tokens drawn from the draft at one position, with fresh coins."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(trials):
        x.d = int(rng.choice(V, p=x.q))
        x.match = bool(rng.random() < acceptance_probability(x.p[x.d], x.q[x.d]))
        hits += accept(rule, [x])
    return hits, trials


@pytest.mark.parametrize("weight", [0.3, 0.8])
def test_sampled_ensemble_accepts_with_its_ratio(weight: float) -> None:
    # min(1, 1 - w + w p/q) averaged over q.
    x = Position(np.random.default_rng(5))
    share = np.minimum(1, 1 - weight + weight * x.p / x.q) @ x.q
    assert abs(z_of(*draws(x, Ensemble(weight, "sample", seed=1)), share)) < 4


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0])
def test_sampled_lenience_accepts_with_its_ratio(factor: float) -> None:
    x = Position(np.random.default_rng(6))
    share = np.minimum(x.q, x.p / factor).sum()
    assert abs(z_of(*draws(x, Lenience(factor, "sample", seed=2)), share)) < 4


def test_full_lenience_keeps_every_lossless_verdict_coin_for_coin() -> None:
    rule = Lenience(1, "sample")
    for seed in range(20):
        drafted = positions(seed, greedy=False)
        assert accept(rule, drafted) == leading([x.match for x in drafted])


@pytest.mark.invariant(6)
def test_stochastic_rules_repeat_with_their_seed_and_accept_a_generator() -> None:
    drafted = [positions(seed, 1, greedy=False) for seed in range(200)]

    def run(seed: int | np.random.Generator) -> list[int]:
        rule = Ensemble(0.5, "sample", seed=seed)
        return [accept(rule, x) for x in drafted]

    assert run(3) == run(np.random.default_rng(3))
    assert run(3) != run(4)
