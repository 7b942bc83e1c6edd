"""Adaptive rules of engines: SGLang by throughput, the gate of TensorRT-LLM, filled graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import SGLangAdaptive
from policies.batch.confidence import CAPTURED
from policies.batch.engines import GraphAware, SGLangThroughput, TensorRTLLM
from policies.batch.sglang import Tiers
from policies.checks import check_policy
from policies.core import Load, Round
from tests.batch_rounds import loads, outcomes


class Cost:
    """A verified token costs `each`, a draft step `draft`; asked contexts are kept."""

    def __init__(self, each: float, draft: float = 0.1) -> None:
        self.each, self.draft, self.contexts = each, draft, set[float]()

    def __call__(self, batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        self.contexts.add(context)
        return 1 + self.draft * draft_length + self.each * verify_tokens


def steps_of(
    policy: SGLangAdaptive | SGLangThroughput, batch: int, accepted: float, iterations: int
) -> list[int]:
    """Steps before each iteration in which every sequence has `accepted`, as far as drafted."""
    seen = []
    for _ in range(iterations):
        steps = policy.plan(loads(batch))
        seen.append(steps)
        policy.observe(outcomes(steps, [min(int(accepted), steps)] * batch))
    return seen


def test_steps_stay_until_every_window_is_full() -> None:
    policy = SGLangThroughput(cost=Cost(0.0))
    seen = steps_of(policy, 1, 9, 40)
    # Windows of 20, looked at every 5th iteration: full after the 20th.
    assert seen[:20] == [3] * 20
    assert seen[20] == 7


def test_acceptance_and_cost_decide() -> None:
    config = {"1": {"candidate_steps": [1, 3, 5, 7]}, "window_size": 5}
    assert steps_of(SGLangThroughput(config, cost=Cost(0.0)), 8, 7, 60)[-1] == 7
    # Verifying is dear: a draft of three accepts no more than one of one does.
    assert steps_of(SGLangThroughput(config, cost=Cost(1.0)), 8, 1, 60)[-1] == 1
    # Nothing is accepted: one step costs least.
    assert steps_of(SGLangThroughput(config, cost=Cost(0.0)), 8, 0, 60)[-1] == 1


def test_a_small_advantage_does_not_switch() -> None:
    cost = Cost(0.0, draft=0.24)
    config = {"1": {"candidate_steps": [3, 4]}, "window_size": 5}
    # Scores with everything accepted: 4 / 1.72 and 5 / 1.96, which is 1.097 times as much.
    assert steps_of(SGLangThroughput(config, cost=cost), 1, 9, 60)[-1] == 3
    eager = {**config, "switch_hysteresis": 0.05}
    assert steps_of(SGLangThroughput(eager, cost=cost), 1, 9, 60)[-1] == 4
    assert cost.contexts == {128.0}, "the profile is made once, at one context"


def test_a_batch_of_another_slot_takes_one_of_its_candidates() -> None:
    config = {"1": {"candidate_steps": [3, 5]}, "8": {"candidate_steps": [1, 2]}}
    policy = SGLangThroughput(config)
    assert policy.plan(loads(1)) == 3
    policy.observe(outcomes(3, [0]))
    assert policy.plan(loads(8)) == 1
    assert policy.plan(loads(4)) in (3, 5)


@pytest.mark.parametrize(
    ("config", "said"),
    [({}, "no slot"), ({"x": 1}, "neither"), ({"1": {"candidate_steps": [0]}}, "candidate_steps"),
     ({"1": {}}, "expected a list"), ({"1": {"candidate_steps": [1]}, "window_size": 0}, "window")],
)  # fmt: skip
def test_an_impossible_configuration_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SGLangThroughput(config)


def plan_of(policy: TensorRTLLM, ids: list[str]) -> list[int]:
    return list(policy.plan_each(ids, loads(len(ids))))


def test_the_schedule_ends_at_its_last_batch_size() -> None:
    policy = TensorRTLLM({"4": 4, "8": 2, "32": 1})
    for batch, k in ((1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (32, 1), (33, 0)):
        assert policy.plan(loads(batch)) == k
    with pytest.raises(ValueError, match="smallest batch size must have the longest draft"):
        TensorRTLLM({"4": 1, "8": 2})


def test_the_gate_closes_for_good_after_a_window_of_completed_requests() -> None:
    policy = TensorRTLLM({"4": 4}, window=2, threshold=1.0)
    # Four requests, one after another, that accept 3, 0, 1 and 4 tokens an iteration.
    seen = []
    for name, accepted in zip("abcde", (3, 0, 1, 4, 4), strict=True):
        for _ in range(3):
            seen.append(plan_of(policy, [name])[0])
            policy.observe([Round(0, seen[-1], min(accepted, seen[-1]), 1, seen[-1], 1)])
    # Means over two requests: 1.5 keeps it open, 0.5 closes it when the third is gone.
    assert seen == [4] * 9 + [0] * 6
    assert policy.disabled


def test_no_window_is_no_gate() -> None:
    policy = TensorRTLLM({"4": 4})
    for name in "abcdef":
        assert plan_of(policy, [name]) == [4]
        policy.observe([Round(0, 4, 0, 1, 4, 1)])
    assert not policy.disabled


def test_a_draft_fills_the_graph_that_it_is_padded_to() -> None:
    policy = GraphAware(gamma=3, gamma_max=8)
    for batch in (1, 2, 3, 5, 7, 8, 20, 64, 100, 128):
        k = policy.plan([Load(batch, 10)] * batch)
        padded = next(size for size in CAPTURED if size >= min(batch * 4, CAPTURED[-1]))
        assert batch * (k + 1) <= padded
        assert k == 8 or batch * (k + 2) > padded
        assert k >= 3 or batch * 4 > CAPTURED[-1]
    # 7 requests: 28 tokens are padded to 32, which 3 drafts leave four tokens of.
    assert policy.plan([Load(7, 10)] * 7) == 3
    assert GraphAware(3, 8, [64]).plan([Load(8, 10)] * 8) == 7
    assert GraphAware(3, 8, [64]).plan([Load(100, 10)] * 100) == 0


@pytest.mark.parametrize("policy", [SGLangThroughput(), TensorRTLLM(window=3), GraphAware()])
def test_they_keep_the_contract(policy: Any) -> None:
    from policies.batch.base import SingleStream

    check_policy(SingleStream(policy))


def test_sglang_tiers_start_and_move_on_schedule() -> None:
    policy = SGLangAdaptive(initial_steps=3)
    seen = steps_of(policy, 1, 99, 40)
    # Average from 2 towards 3, past 3 - 0.5 in 4 iterations; looked at after the 15th.
    assert seen[:15] == [3] * 15
    assert seen[15] == 5
    assert seen[-1] == 7
    # Towards 0: below 1 - 0.5 - 0.25 before long, hence the lowest candidate.
    assert steps_of(SGLangAdaptive(initial_steps=3), 1, 0, 40)[-1] == 1


def test_sglang_hysteresis_by_hand() -> None:
    """Down to 3 needs an average of 3 - 0.5 - 0.25 or less in slot 1."""
    for average, then in ((2.25, 3), (2.26, 5), (4.5, 5), (4.51, 7), (0.25, 1)):
        policy = SGLangAdaptive(initial_steps=5)
        policy.plan(loads(1))
        policy._slot.average = average
        assert policy._slot._choose() == then


@pytest.mark.parametrize("ceiling", [0.0, 1.2])
def test_many_slots_move_as_each_by_itself(ceiling: float) -> None:
    config = {"1": {"candidate_steps": [0, 1, 3, 5, 7]}, "8": {"candidate_steps": [2, 4]}}
    settings = {**config, "ceiling_coeff": ceiling}
    batches = [1, 1, 1, 1, 8]
    policies = [SGLangAdaptive(settings, initial_steps=n) for n in (0, 3, 5, 7, 2)]
    plans = [
        policy.vectorised(batch).state for policy, batch in zip(policies, batches, strict=True)
    ]
    many = Tiers.stacked([state for state in plans if isinstance(state, Tiers)], 1)
    seen = set()
    for mean in np.repeat([9, 0, 2, 7, 1, 9], 40).tolist():
        each = zip(policies, batches, strict=True)
        steps = [policy.plan(loads(batch)) for policy, batch in each]
        assert many.sent().tolist() == steps
        assert many.caps().tolist() == [max(n, 1) for n in steps]
        accepted = [min(mean, n) for n in steps]
        for policy, n, taken in zip(policies, steps, accepted, strict=True):
            policy.observe(outcomes(n, [taken]))
        many.observe(np.array(steps), np.array(accepted))
        seen |= set(steps)
    assert seen == {0, 1, 2, 3, 4, 5, 7}


def test_sglang_slots_and_padding() -> None:
    policy = SGLangAdaptive()
    assert [policy.plan(loads(b)) for b in (1, 7, 8, 31, 32, 63, 64, 900)] == [
        3, 3, 3, 3, 1, 1, 0, 0
    ]  # fmt: skip
    padded = SGLangAdaptive(graph_batches=[1, 8, 64])
    assert [padded.plan(loads(b)) for b in (1, 2, 9, 65)] == [3, 3, 0, 0]


def test_sglang_probes_from_zero_and_falls_back() -> None:
    """Slot 32 (0 or 1 step): no history at 0, so a probe starts from a neutral average."""
    policy = SGLangAdaptive(initial_steps=0)
    seen = steps_of(policy, 32, 0, 25)
    assert seen[:15] == [0] * 15
    assert seen[15:20] == [1] * 5
    assert seen[20] == 0


def test_sglang_ceiling_caps_without_blocking_a_rise() -> None:
    config = {"1": {"candidate_steps": [1, 3, 5]}, "ceiling_coeff": 1.0, "down_hysteresis": -9.0}
    policy = SGLangAdaptive(config, initial_steps=5)
    policy._slot.average = 2.4  # no drop threshold is met, but ceil(2.4) = 3
    assert policy._slot._choose() == 3
    policy = SGLangAdaptive(config, initial_steps=1)
    policy._slot.average = 1.2  # rises past 1 - 0.5 to 3, though the ceiling is 2
    assert policy._slot._choose() == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"candidate": []}, "config key 'candidate'"),
        ({"ema_alpha": 0.1}, "config has no slot"),
        ({"1": {"candidate_steps": []}}, "slot 1: candidate_steps is"),
        ({"1": {"candidate_steps": [-1]}}, "is -1, expected >= 0"),
    ],
)
def test_sglang_refuses_a_malformed_config(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangAdaptive(config)
