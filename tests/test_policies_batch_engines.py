"""Adaptive rules of engines: SGLang by throughput, the gate of TensorRT-LLM, filled graphs."""

from __future__ import annotations

from typing import Any

import pytest

from policies.batch.confidence import CAPTURED
from policies.batch.engines import GraphAware, SGLangThroughput, TensorRTLLM
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


def steps_of(policy: SGLangThroughput, batch: int, accepted: int, iterations: int) -> list[int]:
    seen = []
    for _ in range(iterations):
        steps = policy.plan(loads(batch))
        seen.append(steps)
        policy.observe(outcomes(steps, [min(accepted, steps)] * batch))
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
