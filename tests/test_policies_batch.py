"""Policies that decide for a whole batch, driven as an engine drives them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    AdaptiveVerification,
    BatchPolicy,
    BatchTable,
    ConfidenceFreeze,
    DisableByBatchSize,
    Goodput,
    Load,
    SGLangAdaptive,
    SingleStream,
    TextbookCost,
)
from tests.batch_rounds import drafts, loads, outcomes
from tests.policy_rounds import Token


def test_defaults_of_the_interface() -> None:
    class Three(BatchPolicy):
        def plan(self, loads: Sequence[Load]) -> int:
            return 3

    policy = Three()
    assert list(policy.plan_each(("a", "b"), loads(2))) == [3, 3]
    assert policy.keep_drafting([[], []])
    assert list(policy.allot(drafts([0.1], [0.1, 0.2]))) == [1, 2]
    policy.observe(outcomes(3, [1, 2]))


def test_fresh_shares_the_cost_and_nothing_else() -> None:
    class Heavy:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a profiled cost must not be copied")

        def __call__(
            self, batch: int, draft_length: int, verify_tokens: int, context: float
        ) -> float:
            return 1.0

    policy = Goodput(gamma_max=2, warmup=0, cost=Heavy())
    copy = policy.fresh()
    assert copy.cost is policy.cost
    copy.observe(outcomes(2, [2]))
    assert copy.plan(loads(1)) == 2
    assert policy.plan(loads(1)) == 0


def test_single_stream_drives_a_batch_policy_as_a_batch_of_one() -> None:
    policy = SingleStream(ConfidenceFreeze(gamma=3, threshold=0.5))
    assert policy.reads == ("top_prob",)
    policy.begin_round(Load(1, 10))
    draft: list[Token] = []
    for p in (0.9, 0.4, 0.9, 0.9):
        if policy.keep_drafting(draft):
            draft.append(Token(p))
    assert (len(draft), policy.submit(draft)) == (3, 2)


# --- tables ---------------------------------------------------------------------------


def test_batch_table_lookup() -> None:
    policy = BatchTable([[1, 4, 5], [8, 16, 3], [17, 32, 0]])
    lengths = {b: policy.plan(loads(b)) for b in (1, 4, 5, 7, 8, 16, 17, 32, 500)}
    assert lengths == {1: 5, 4: 5, 5: 5, 7: 5, 8: 3, 16: 3, 17: 0, 32: 0, 500: 0}


def test_at_0_the_draft_model_reads_along() -> None:
    draft = [[object()], [object()], []]
    for in_step, passes in ((True, 1), (False, 0)):
        policy = BatchTable([[1, 2, 3], [3, 9, 0]], in_step)
        assert policy.plan_each("abc", loads(3)) == [passes] * 3
        assert policy.allot(draft) == [0, 0, 0]
        assert policy.plan_each("ab", loads(2)) == [3, 3]
        assert policy.allot([[object()] * 3, [object()]]) == [3, 1]
    for never in (BatchTable([[1, 9, 0]]), SGLangAdaptive({"1": {"candidate_steps": [0]}})):
        # A draft model that is loaded reads along, even if nothing is ever drafted.
        assert never.longest == 1
        assert never.plan_each("abc", loads(3)) == [1, 1, 1]
        assert never.allot(draft) == [0, 0, 0]
    assert BatchTable([[1, 9, 0]], in_step=False).plan_each("abc", loads(3)) == [0, 0, 0]
    probing = SGLangAdaptive({"1": {"candidate_steps": [0, 2]}}, initial_steps=0)
    assert probing.longest == 2
    assert probing.plan_each("a", loads(1)) == [1]
    assert probing.allot([[object()]]) == [0]
    with pytest.raises(ValueError, match="in_step is 1, expected true or false"):
        BatchTable(in_step=1)  # type: ignore[arg-type]


def test_batch_table_by_context() -> None:
    table = [[1, 4, 0, 999, 5], [1, 4, 1000, 2000, 7], [5, 8, 0, 9999, 1]]
    policy = BatchTable(table)
    cases = {(1, 0): 5, (4, 999): 5, (4, 1000): 7, (4, 99999): 7, (5, 5000): 1, (90, 1): 1}
    assert {(b, c): policy.plan(loads(b, c)) for b, c in cases} == cases


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "table is empty"),
        ([[2, 4, 5]], "must start at batch size 1"),
        ([[1, 4, 5], [4, 8, 3]], "batch size 4 overlaps"),
        ([[1, 4, 5], [3, 2, 3]], "batch range 3..2 is empty"),
        ([[1, 4]], "all be \\[lo, hi, K\\]"),
        ([[1, 4, 5], [5, 6, 0, 10, 2]], "all be \\[lo, hi, K\\]"),
        ([[1, 4, -1]], "is -1, expected >= 0"),
        ([[1, 4, 0, 99, 5], [1, 4, 50, 200, 5]], "contexts overlap"),
        ([[1, 4, 99, 9, 5]], "contexts 99..9 are empty"),
    ],
)
def test_batch_table_refuses_a_malformed_table(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchTable(table)


def test_disable_by_batch_size_is_forever_in_v0() -> None:
    policy = DisableByBatchSize(gamma=4, threshold=3)
    assert list(policy.plan_each("ab", loads(2))) == [4, 4]
    assert list(policy.plan_each("abc", loads(3))) == [0, 0, 0]
    assert list(policy.plan_each("ad", loads(2))) == [0, 4]
    stepwise = DisableByBatchSize(gamma=4, threshold=3, forever=False)
    stepwise.plan_each("abc", loads(3))
    assert list(stepwise.plan_each("ad", loads(2))) == [4, 4]


# --- confidence -----------------------------------------------------------------------


def test_confidence_freeze_at_the_batch_mean() -> None:
    """Means .8, .5, .3 (the second sequence ended after two): frozen at the third token."""
    rows = drafts([0.9, 0.6, 0.3, 0.9], [0.7, 0.4])
    assert list(ConfidenceFreeze(gamma=4, threshold=0.4).allot(rows)) == [3, 2]
    assert list(ConfidenceFreeze(gamma=4, threshold=0.55).allot(rows)) == [2, 2]
    assert list(ConfidenceFreeze(gamma=4, threshold=0.1).allot(rows)) == [4, 2]
    assert ConfidenceFreeze(gamma=4, threshold=0.99).keep_drafting(rows)
    early = ConfidenceFreeze(gamma=4, threshold=0.55, stop_early=True)
    assert not early.keep_drafting([row[:2] for row in rows])
    assert early.keep_drafting([row[:1] for row in rows])
    assert early.keep_drafting([[], []])


@pytest.mark.parametrize("context", [0, 7, 200, 300, 4000])
def test_adaptive_verification_asks_what_iterations_cost_near_its_context(context: int) -> None:
    asked: list[float] = []

    def cost(batch: int, draft_length: int, verify_tokens: int, context: float) -> float:
        asked.append(context)
        return 1.0

    policy = AdaptiveVerification(gamma=3, cost=cost)
    policy.plan([Load(2, context)] * 2)
    assert sum(policy.allot(drafts([0.9, 0.9], [0.9]))) == 3, "verifying is free"
    assert asked
    assert all(abs(one - context) <= 128 for one in asked)


probabilities = st.lists(st.floats(0.01, 0.99), max_size=3)


@settings(max_examples=60)
@given(
    st.lists(probabilities, min_size=1, max_size=3).filter(any),
    st.floats(0.0, 0.6),
    st.one_of(st.none(), st.integers(1, 10)),
)
def test_adaptive_verification_is_the_best_allotment(
    rows: list[list[float]], per_token: float, budget: int | None
) -> None:
    """Against every possible allotment under the same budget and cost."""
    cost = TextbookCost(target=1.0, draft=0.1, per_token=per_token)
    policy = AdaptiveVerification(gamma=3, budget=budget, cost=cost)
    batch, steps = len(rows), max(map(len, rows))
    policy.plan(loads(batch))

    def goodput(lengths: Sequence[int]) -> float:
        tokens = sum(1 + np.cumprod(r)[:n].sum() for r, n in zip(rows, lengths, strict=True))
        return float(tokens / cost(batch, steps, batch + sum(lengths), 100.0))

    room = 99 if budget is None else max(0, budget - batch)
    options = product(*(range(len(r) + 1) for r in rows))
    best = max(goodput(lengths) for lengths in options if sum(lengths) <= room)
    chosen = policy.allot(drafts(*rows))
    assert sum(chosen) <= room
    assert all(0 <= n <= len(r) for n, r in zip(chosen, rows, strict=True))
    assert goodput(chosen) == pytest.approx(best)
