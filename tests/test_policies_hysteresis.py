"""The table with hysteresis: when K changes, and that away from thresholds it is the table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batch.tables import BatchTable, BatchTableHysteresis
from policies.core import Load
from policies.registry import parse_serving_policy
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario, simulate
from tests.tuning import batched, iid

TABLE = [[1, 4, 3], [5, 16, 1], [17, 64, 0]]


def lengths(policy: BatchTable, batches: Sequence[int]) -> list[int]:
    """Return K of each iteration, given the number of decoding requests."""
    return [policy.plan([Load(batch=b, context=9)] * b) for b in batches]


def test_a_request_that_comes_and_goes_changes_nothing() -> None:
    wandering = [4, 5, 4, 5, 5, 4, 5, 4, 4, 5]
    table = lengths(BatchTable(TABLE), wandering)
    assert table == [3, 1, 3, 1, 1, 3, 1, 3, 3, 1]
    assert lengths(BatchTableHysteresis(TABLE), wandering) == [3] * 10
    # What is in force depends on where the batch came from.
    assert lengths(BatchTableHysteresis(TABLE), [6, 5, 4, 4, 4, 4, 4]) == [1] * 7


def test_one_prompt_does_not_end_speculation() -> None:
    policy = BatchTableHysteresis([[1, 4, 3], [5, 64, 0]])
    loads = [Load(batch=4, context=9, scheduled=n) for n in (4, 6, 4, 6, 4)]
    assert [policy.plan([load] * 4) for load in loads] == [3] * 5
    assert [BatchTable([[1, 4, 3], [5, 64, 0]]).plan([load] * 4) for load in loads] == [
        3, 0, 3, 0, 3,
    ]  # fmt: skip


def test_a_change_needs_margin_and_patience() -> None:
    policy = BatchTableHysteresis(TABLE, margin=2, patience=3)
    assert lengths(policy, [4, 6, 6, 6, 6]) == [3] * 5  # the row ends at 4: 6 is 2 beyond, not more
    assert lengths(policy, [7, 7, 6, 7, 7]) == [3] * 5  # the third did not agree
    assert lengths(policy, [7]) == [1]
    assert lengths(policy, [3, 3, 3, 3]) == [1] * 4
    assert lengths(policy, [2, 2, 2]) == [1, 1, 3]
    # A jump over a whole row goes where the batch is.
    assert lengths(policy, [40, 40, 40]) == [3, 3, 0]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60))
def test_without_margin_and_patience_it_is_the_table(batches: list[int]) -> None:
    plain = BatchTableHysteresis(TABLE, margin=0, patience=1)
    assert lengths(plain, batches) == lengths(BatchTable(TABLE), batches)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(0, 4), st.integers(1, 5))
def test_it_settles_where_the_table_is(batches: list[int], margin: int, patience: int) -> None:
    policy = BatchTableHysteresis(TABLE, margin, patience)
    lengths(policy, batches)
    far = [10] * (2 * patience)  # more than four requests from either end of its row
    assert lengths(policy, far)[-1] == 1


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(0, 4), st.integers(1, 5))
def test_it_never_changes_more_often_than_the_table(
    batches: list[int], margin: int, patience: int
) -> None:
    # Where K changes it becomes the table's, which must have changed since the last time.
    held, table = (
        sum(a != b for a, b in pairwise(lengths(policy, batches)))
        for policy in (BatchTableHysteresis(TABLE, margin, patience), BatchTable(TABLE))
    )
    assert held <= table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch-table-hysteresis:margin=-1", "margin is -1"),
        ("batch-table-hysteresis:patience=0", "patience is 0"),
    ],
)
def test_impossible_values(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_serving_policy(text)


def test_served_at_the_threshold() -> None:
    """K changes less, and what is served is the same; away from a threshold nothing differs."""
    trace, table = iid(0.7), [[1, 8, 3], [9, 64, 0]]
    rows = {}
    load = Scenario(Poisson(1.6), Limits(max_batch=32), requests=120, seed=1)
    for policy in (BatchTable(table), BatchTableHysteresis(table)):
        rows[type(policy).__name__] = simulate(trace, batched(2e-3), policy, load).row()
    plain, held = rows["BatchTable"], rows["BatchTableHysteresis"]
    assert 3 < plain["mean_batch"] < 20
    assert 0 < held["length_changes"] < plain["length_changes"] / 2
    assert held["simulated_tokens"] == plain["simulated_tokens"]
    quiet = Scenario(ClosedLoop(2), Limits(max_batch=2), requests=20)
    low = [
        simulate(trace, batched(2e-3), policy, quiet).row()
        for policy in (BatchTable(table), BatchTableHysteresis(table))
    ]
    assert low[0]["throughput_tok_s"] == low[1]["throughput_tok_s"]
    assert low[0]["length_changes"] == low[1]["length_changes"] == 0


class Halved(BatchTable):
    """A user's own policy: half of the table's length at long contexts."""

    def plan(self, loads: Sequence[Load]) -> int:
        length = super().plan(loads)
        return length // 2 if loads[0].context > 40 else length


@pytest.mark.parametrize("policy", [BatchTableHysteresis, Halved])
def test_a_table_that_plans_otherwise_is_asked_at_every_step(policy: type[BatchTable]) -> None:
    load = Scenario(Poisson(1.6), Limits(max_batch=32), requests=60, seed=1)
    table = [[1, 8, 3], [9, 64, 0]]
    either = [
        simulate(iid(0.7), batched(2e-3), policy(table), load, by_iteration=by).row()
        for by in (False, True)
    ]
    for key in ("throughput_tok_s", "length_changes", "wasted_drafts", "utilisation"):
        assert either[0][key] == pytest.approx(either[1][key])
