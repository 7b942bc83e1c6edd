"""Lengths by goodput: scans by hand and closed forms, Goodput's and TurboSpec's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from policies import Goodput, Load, Round, TextbookCost, TurboSpec
from tests.batch_rounds import loads, outcomes


def test_goodput_against_a_scan_by_hand() -> None:
    cost = TextbookCost(target=1.0, draft=0.3)
    # Configured rates of 1 make the warm-up draft all it may.
    policy = Goodput(gamma_max=4, warmup=3, acceptance=1.0, cost=cost)
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


def test_goodput_warms_up_on_the_configured_rates() -> None:
    rates = [0.68, 0.39, 0.20, 0.10, 0.06, 0.03, 0.02]
    cost = TextbookCost(target=1.0, draft=0.15)
    policy = Goodput(gamma_max=7, acceptance=rates, cost=cost)
    values = [(1 + sum(rates[:k])) / (1 + 0.15 * k) for k in range(8)]
    chosen = int(np.argmax(values))
    assert 0 < chosen < 7
    for _ in range(10):
        assert policy.plan(loads(3)) == chosen
        policy.observe(outcomes(chosen, [0, 0, 0]))
    assert policy.plan(loads(3)) == 0, "from the eleventh iteration on what was measured counts"
    with pytest.raises(ValueError, match="acceptance has 7 rates, expected one for each"):
        Goodput(gamma_max=8, acceptance=rates)


def test_goodput_keeps_the_draft_in_step_at_zero() -> None:
    for in_step in (True, False):
        policy = Goodput(gamma_max=4, acceptance=0.0, in_step=in_step)
        assert policy.plan_each(["a", "b"], loads(2)) == [int(in_step)] * 2
        assert policy.allot([[None], []]) == [0, 0]


def test_goodput_prices_zero_with_the_draft_pass_that_keeps_step() -> None:
    # A draft pass that runs anyway is better verified: 1.5 tokens in 1.9 against 1 in 1.9.
    cost = TextbookCost(draft=0.9)
    for in_step, length in ((True, 1), (False, 0)):
        policy = Goodput(gamma_max=3, acceptance=0.5, cost=cost, in_step=in_step)
        assert policy.plan(loads(2)) == length
    # Its fork skips the draft model.
    assert TurboSpec(acceptance=0.5, cost=cost).plan(loads(2)) == 0


@pytest.mark.parametrize(("a", "c"), [(0.6, 0.1), (0.7, 0.1), (0.8, 0.05), (0.8, 0.1), (0.9, 0.2)])
def test_turbospec_finds_the_closed_form_optimum(a: float, c: float) -> None:
    """With a constant acceptance rate the best k is the argmax of Leviathan's speedup."""
    speedup = [(1 - a ** (k + 1)) / ((1 - a) * (1 + k * c)) for k in range(17)]
    assert speedup[1] > 1.1  # so that the bonus on k = 0 does not decide
    policy = TurboSpec(gamma_max=16, acceptance=a, cost=TextbookCost(1.0, c))
    assert policy.plan(loads(8)) == int(np.argmax(speedup))


def test_turbospec_stops_at_the_first_length_that_does_not_improve() -> None:
    def cost(batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        return (1.0, 9.0, 0.1)[draft_length]  # the best of all follows a bad one

    assert TurboSpec(gamma_max=2, acceptance=0.9, cost=cost).plan(loads(2)) == 0


def test_turbospec_asks_a_tenth_more_before_it_speculates() -> None:
    """One draft per round gains 1.5 / 1.4 = 7% or 1.5 / 1.3 = 15% at acceptance .5."""
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


@pytest.mark.parametrize(("variant", "every"), [("dsd", 20), ("batch-dsd", 200)])
def test_turbospec_scans_as_often_as_its_variant_does(variant: Any, every: int) -> None:
    policy = TurboSpec(variant, acceptance=0.9)
    scans: list[int] = []
    for step in range(2 * every + 1):
        policy._scan = lambda seconds, step=step: scans.append(step) or 3  # type: ignore[misc, func-returns-value]
        policy.plan(loads(2))
        policy.observe(outcomes(3, [1, 1]))
    assert scans == [0, every, 2 * every]


def test_the_batch_variant_takes_the_mean_of_the_last_hundred_iterations() -> None:
    policy = TurboSpec("batch-dsd", acceptance=0.9)
    for accepted in [0] * 50 + [3] * 99:
        policy.observe(outcomes(3, [accepted]))
    assert policy._acceptance == pytest.approx(0.99)
    policy.observe(outcomes(3, [3]))
    assert policy._acceptance == 1


def test_turbospec_batch_variant_never_turns_off_after_its_first_scan() -> None:
    policy = TurboSpec("batch-dsd", acceptance=0.0, interval=1)
    assert policy.plan(loads(4)) == 0
    for _ in range(5):
        policy.observe(outcomes(1, [0, 0]))
        assert policy.plan(loads(4)) == 1


@pytest.mark.parametrize(
    ("variant", "draft", "then"),
    # 1.5 / (1 + draft) against 1.1 for dsd; against 1, with 5% overhead, for batch-dsd.
    [("dsd", 0.35, 1), ("dsd", 0.37, 0), ("batch-dsd", 0.44, 1), ("batch-dsd", 0.47, 0)],
)
def test_only_the_batch_variant_charges_an_overhead(variant: str, draft: float, then: int) -> None:
    cost = TextbookCost(1.0, draft)
    policy = TurboSpec(variant, gamma_max=1, acceptance=0.5, cost=cost)  # type: ignore[arg-type]
    assert policy.plan(loads(4)) == then


class Worker:
    """The fork's worker, step by step: which requests draft how much, and does the draft run."""

    def __init__(self, scans: Sequence[int], every: int) -> None:
        self.scans, self.every = iter(scans), every
        self.tokens: dict[str, int] = {}
        self.close_at: float = float("inf")
        self.close_steps = self.sd_steps = self.proposed = 0

    def step(self, requests: Sequence[str], queue: int) -> tuple[list[int], bool]:
        for request in requests:
            self.tokens.setdefault(request, 9)
        if queue >= self.close_at:
            self.close_steps += 1
        if self.close_steps % 100 == 0:
            self.close_at, self.close_steps = float("inf"), 0
        if queue >= self.close_at:
            self.tokens.update(dict.fromkeys(requests, 0))
            return [0] * len(requests), False
        if not any(self.tokens[r] for r in requests):
            return [0] * len(requests), True
        if self.sd_steps % self.every == 0:
            self.proposed = next(self.scans)
        self.sd_steps += 1
        if self.proposed == 0:
            self.tokens.update(dict.fromkeys(requests, 0))
            self.close_at = queue
            return [0] * len(requests), False
        return [self.proposed if self.tokens[r] else 0 for r in requests], True


@pytest.mark.parametrize("seed", range(12))
def test_turbospec_switches_off_as_its_fork_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scans = rng.choice([0, 0, 2, 3], 400).tolist()
    worker = Worker(scans, 4)
    policy = TurboSpec(interval=4)
    given = iter(scans)
    policy._scan = lambda seconds: next(given)  # type: ignore[method-assign]
    active: list[str] = []
    born = 0
    rested = passed = drafted = 0
    for _ in range(600):
        active = [r for r in active if rng.random() > 0.08]
        while len(active) < 1 or (len(active) < 5 and rng.random() < 0.2):
            active.append(f"r{born}")
            born += 1
        prefilling = int(rng.integers(0, 2))
        theirs, runs = worker.step(active, len(active) + prefilling)
        load = [Load(len(active), 50, None, len(active) + prefilling)] * len(active)
        caps = policy.plan_each(active, load)
        lengths = policy.allot([[None] * c for c in caps])
        assert list(lengths) == theirs
        assert any(caps) == runs
        policy.observe([Round(0, n, 0, 1, n, 1) for n in theirs])
        rested, passed = rested + (not runs), passed + (runs and not any(theirs))
        drafted += any(theirs)
    assert min(rested, passed, drafted) > 0


def test_turbospec_may_leave_requests_on() -> None:
    policy = TurboSpec(acceptance=0.0, interval=2, forever=False)
    assert policy.plan_each(["a"], loads(1)) == [0]
    policy.observe(outcomes(0, [0]))
    policy._acceptance = 0.9
    assert policy.plan_each(["a"], loads(1)) == [0]
    policy.observe(outcomes(0, [0]))
    assert policy.plan_each(["a"], loads(1))[0] > 0
