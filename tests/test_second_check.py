"""A second, plain implementation of what is random: from the papers' formulas, round by round.

Bandits (BanditSpec, Algorithms 4 and 5), and rejection sampling (Leviathan et al. 2023,
Algorithm 1) against its reversal, which recordings of sampled text are made by.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from policies import EXP3Spec, Load, Round, TextbookCost, UCBSpec
from tests.rule_positions import acceptance_probability, residual


def play(policy: Any, rng: np.random.Generator, rounds: int) -> list[tuple[int, int]]:
    """(length drafted, tokens accepted) of each round; outcomes of a random world."""
    history = []
    alpha = rng.uniform(0.2, 0.95)
    for _ in range(rounds):
        policy.begin_round(Load(1, 64))
        draft: list[None] = []
        while policy.keep_drafting(draft):
            draft.append(None)
        n = len(draft)
        accepted = min(n, int(rng.geometric(1 - alpha)) - 1)
        policy.observe(Round(0, n, accepted, accepted + 1, n, 1), draft)
        history.append((n, accepted))
    return history


def paper_exp3(arms: tuple[int, ...], history: list[tuple[int, int]]) -> list[dict[int, float]]:
    """The chance of every arm in every round, given what was pulled before."""
    longest, count = max(arms), len(arms)
    estimate = dict.fromkeys(arms, 0.0)
    chances = []
    for t, (pulled, accepted) in enumerate(history, 1):
        eta = math.sqrt(math.log(count) / (t * count))
        weight = {arm: math.exp(-eta * estimate[arm]) for arm in arms}
        chance = {arm: w / sum(weight.values()) for arm, w in weight.items()}
        chances.append(chance)
        emitted = accepted + 1
        estimate[pulled] += (longest + 1 - emitted) / (longest * chance[pulled])
    return chances


@pytest.mark.parametrize("arms", [(1, 2, 3, 4), (2, 8), (1, 3, 5, 7, 12)])
def test_exp3_pulls_its_arms_with_the_papers_chances(arms: tuple[int, ...]) -> None:
    """Over all rounds, pulls less their chances is a martingale: within 4 standard errors."""
    surprise, variance = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    for seed in range(40):
        policy = EXP3Spec(arms, seed=seed)
        history = play(policy, np.random.default_rng([1, seed]), 250)
        chances = paper_exp3(arms, history)
        for (pulled, _), chance in zip(history, chances, strict=True):
            for arm in arms:
                surprise[arm] += (pulled == arm) - chance[arm]
                variance[arm] += chance[arm] * (1 - chance[arm])
        np.testing.assert_allclose(policy._chances, list(chances[-1].values()), rtol=1e-9)
    for arm in arms:
        assert variance[arm] > 100
        assert abs(surprise[arm]) / math.sqrt(variance[arm]) < 4


def paper_ucb(
    arms: tuple[int, ...], rewards: list[tuple[int, float]], delta: float, spread: float
) -> int:
    """The arm of largest upper confidence bound after these pulls (arm, reward)."""
    t = len(rewards) + 1
    best, best_index = arms[0], -math.inf
    for arm in arms:
        own = [reward for pulled, reward in rewards if pulled == arm]
        n = len(own)
        log = math.log(len(arms) * t**2 * math.sqrt(1 + n) / delta)
        index = sum(own) / n + spread / 2 * math.sqrt((1 + n) / n**2 * (1 + 2 * log))
        if index > best_index:
            best, best_index = arm, index
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", ["ucb_paper", "ucb_cost", "greedy_code"])
def test_ucb_pulls_the_papers_arm_in_every_round(variant: Any, seed: int) -> None:
    arms, delta = (1, 2, 4, 7), 0.1
    cost = TextbookCost(target=1.0, draft=0.12)
    policy = UCBSpec(variant, arms, delta, cost)
    history = play(policy, np.random.default_rng([2, seed]), 150)
    spread = max(arms)
    if variant == "ucb_cost":
        spread = max((g + 1) / (1 + 0.12 * g) for g in arms)
    rewards: list[tuple[int, float]] = []
    for t, (pulled, accepted) in enumerate(history):
        if t < (7 if variant == "greedy_code" else len(arms)):
            assert pulled == arms[t % len(arms)]
        elif variant == "greedy_code":
            mean = {a: np.mean([r for b, r in rewards if b == a]) for a in arms}
            assert mean[pulled] == pytest.approx(max(mean.values()))
        else:
            assert pulled == paper_ucb(arms, rewards, delta, spread)
        seconds = 1.0 if variant == "ucb_paper" else 1 + 0.12 * pulled
        rewards.append((pulled, (accepted + 1) / seconds))


def algorithm_1(
    target: np.ndarray, draft: np.ndarray, rng: np.random.Generator, trials: int
) -> dict[tuple[int, int], int]:
    """How often (token proposed, token emitted) came out of one drafted token."""
    counts: dict[tuple[int, int], int] = {}
    rest = np.maximum(0.0, target - draft)
    proposals = rng.choice(len(draft), size=trials, p=draft).tolist()
    corrections = rng.choice(len(rest), size=trials, p=rest / rest.sum()).tolist()
    for proposed, corrected, coin in zip(
        proposals, corrections, rng.random(trials).tolist(), strict=True
    ):
        rejected = coin > target[proposed] / draft[proposed]
        emitted = corrected if rejected else proposed
        counts[proposed, emitted] = counts.get((proposed, emitted), 0) + 1
    return counts


@pytest.mark.invariant(8)
@pytest.mark.parametrize("seed", range(4))
def test_rejection_sampling_and_its_reversal_are_algorithm_1(seed: int) -> None:
    torch = pytest.importorskip("torch")
    from profiler.models.sampling import coupled, draw

    rng = np.random.default_rng([3, seed])
    vocab, trials = 4, 20_000
    target, draft = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))
    plain = algorithm_1(target, draft, rng, trials)

    rest = residual(target, draft)
    exact = np.zeros((vocab, vocab))  # (proposed, emitted)
    for d in range(vocab):
        kept = acceptance_probability(target[d], draft[d])
        exact[d, d] += draft[d] * kept
        exact[d] += draft[d] * (1 - kept) * rest
    np.testing.assert_allclose(exact.sum(0), target, atol=1e-12)

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.tensor(p).float().repeat(trials, 1) for p in (draft, target)]
    emitted = draw(rows[1], generator)
    match, weights = coupled(*rows, emitted, torch.rand(trials, generator=generator))
    proposed = torch.where(match, emitted, draw(weights, generator))
    backwards = np.zeros((vocab, vocab))
    np.add.at(backwards, (proposed.numpy(), emitted.numpy()), 1)

    for d in range(vocab):
        for x in range(vocab):
            error = math.sqrt(trials * exact[d, x] * (1 - exact[d, x])) + 1e-9
            for counted in (plain.get((d, x), 0), backwards[d, x]):
                assert abs(counted - trials * exact[d, x]) < 4 * error + 1e-6
