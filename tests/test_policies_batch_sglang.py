"""SGLang's adaptive steps: slots, tiers and thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies import SGLangAdaptive
from policies.batch.sglang import Tiers
from tests.batch_rounds import loads, outcomes


def steps_of(policy: SGLangAdaptive, batch: int, accepted: float, iterations: int) -> list[int]:
    """Steps before each iteration in which every sequence has `accepted`, as far as drafted."""
    seen = []
    for _ in range(iterations):
        steps = policy.plan(loads(batch))
        seen.append(steps)
        policy.observe(outcomes(steps, [min(int(accepted), steps)] * batch))
    return seen


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
