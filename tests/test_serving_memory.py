"""Paged memory against a set of numbered blocks, which the pool only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.serving.scheduler import BlockPool, Continuous, Limits
from simulator.serving.sequence import Slot
from tests.serving import assert_no_block_is_lost
from traces.errors import DraftsimError


class Blocks:
    """Blocks with numbers, of which each request holds a list."""

    def __init__(self, blocks: int | None, size: int) -> None:
        self.size = size
        self.free = list(range(10_000 if blocks is None else blocks))
        self.held: dict[int, list[int]] = {}

    def need(self, tokens: int) -> int:
        count = 0
        while count * self.size < tokens:
            count += 1
        return count

    def grow(self, owner: int, tokens: int) -> int:
        mine = self.held.get(owner, [])
        more = max(self.need(tokens) - len(mine), 0)
        if more > len(self.free):
            return 0
        self.held[owner] = mine + [self.free.pop() for _ in range(more)]
        return len(self.held[owner]) * self.size

    def release(self, owner: int) -> None:
        self.free += self.held.pop(owner, [])


@given(
    blocks=st.one_of(st.none(), st.integers(1, 12)), size=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(["grow", "release"]), st.integers(0, 3), st.integers(0, 20)),
        max_size=25,
    ),
)  # fmt: skip
def test_counting_blocks_is_handing_them_out(
    blocks: int | None, size: int, steps: list[tuple[str, int, int]]
) -> None:
    pool, real = BlockPool(blocks, size), Blocks(blocks, size)
    total = len(real.free)
    for kind, owner, amount in steps:
        assert pool.fits(amount) == (real.need(amount) <= total)
        if kind == "grow":
            assert pool.grow(owner, amount) == real.grow(owner, amount)
        else:
            pool.release(owner)
            real.release(owner)
        assert_no_block_is_lost(pool)
        assert pool.used == total - len(real.free)
        assert len(pool._held) == len(real.held)


def test_the_smallest_pool_is_one_block_of_one_token() -> None:
    assert BlockPool(1, 1).grow("a", 1) == 1
    with pytest.raises(DraftsimError, match="kv_blocks is 0, expected 1 to"):
        BlockPool(0)
    with pytest.raises(DraftsimError, match="block_size is 0, expected at least 1 token"):
        BlockPool(1, 0)


def test_a_preempted_request_finds_its_blocks_until_they_are_taken() -> None:
    pool = BlockPool(10, 4)
    pool.grow("old", 12)
    pool.grow("young", 20)  # 5 blocks, 4 of them full
    assert pool.used == 8
    assert not pool.keeps
    pool.preempt("young", 4)
    assert (pool.used, pool.kept("young"), pool.keeps) == (3, 4, True)
    # Free in this order: two that never were anybody's, its last one, and its four, the last first.
    pool.grow("old", 24)
    assert pool.kept("young") == 4
    pool.grow("old", 32)
    assert pool.kept("young") == 2
    pool.release("old")
    assert pool.kept("young") == 2
    pool.find("young", 1)
    assert (pool.used, pool._held, pool.keeps) == (1, {"young": 1}, False)
    assert pool.grow("old", 36) == 36
    assert pool.grow("young", 8) == 0


def test_a_preempted_request_reads_only_what_was_taken_again() -> None:
    limits = Limits(max_batch=4, kv_blocks=8, block_size=4)
    scheduler = Continuous(limits, lookahead=0)
    jobs: list[Any] = [SimpleNamespace(prompt_tokens=n, output_tokens=20) for n in (12, 16)]
    slots = [Slot(i, job, 0.0, None) for i, job in enumerate(jobs)]
    scheduler.waiting.extend(slots)
    for _ in range(2):
        for slot, tokens in scheduler.next(False).chunks:
            slot.prefilled, slot.prefill_left = slot.prefilled + tokens, 0
            slot.tokens, slot.context = 1, slot.context + 1
    slots[0].context = 17  # needs a fifth block, which only the younger one has
    scheduler.next(False)
    assert slots[1].preemptions == 1
    assert slots[1].prefill_left == 16
    scheduler.finish(slots[0])
    [(slot, tokens)] = scheduler.next(False).chunks
    # Four full blocks were its own: one was taken, and one token at the least is read again.
    assert (slot, slot.prefilled, tokens) == (slots[1], 12, 4)


def test_a_prompt_that_does_not_fit_whole_waits() -> None:
    for blocks, begun in ((3, []), (4, [8])):
        scheduler = Continuous(Limits(token_budget=8, kv_blocks=blocks, block_size=4), lookahead=0)
        job: Any = SimpleNamespace(prompt_tokens=16, output_tokens=2)
        scheduler.waiting.append(Slot(0, job, 0.0, None))
        assert [chunk.tokens for chunk in scheduler.next(False).chunks] == begun
