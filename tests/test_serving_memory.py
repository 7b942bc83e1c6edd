"""Paged memory against a set of numbered blocks, which the pool only counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.serving.kv import BlockPool
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
        st.tuples(st.sampled_from(["grow", "release", "hold"]), st.integers(0, 3),
                  st.integers(0, 20)),
        max_size=25,
    ),
)  # fmt: skip
def test_counting_blocks_is_handing_them_out(
    blocks: int | None, size: int, steps: list[tuple[str, int, int]]
) -> None:
    pool, real = BlockPool(blocks, size), Blocks(blocks, size)
    total = len(real.free)
    for kind, owner, amount in steps:
        held = len(real.held.get(owner, []))
        lacking = max(real.need(amount) - held, 0)
        assert pool.growth(owner, amount) == lacking
        assert pool.fits(amount) == (real.need(amount) <= total)
        for more in (0, 2):
            assert pool.room_for(owner, amount, more) == (amount - held + more <= len(real.free))
        if kind == "grow":
            assert pool.grow(owner, amount) == real.grow(owner, amount)
        elif kind == "release":
            pool.release(owner)
            real.release(owner)
        elif amount - held <= len(real.free):
            pool.hold(owner, amount)
            real.release(owner)
            if amount:
                real.grow(owner, amount * size)
        pool.audit()
        assert pool.used == total - len(real.free)
        assert pool.held(owner) == len(real.held.get(owner, []))
        assert pool.holders == len(real.held)


def test_the_smallest_pool_is_one_block_of_one_token() -> None:
    assert BlockPool(1, 1).grow("a", 1) == 1
    with pytest.raises(DraftsimError, match="kv_blocks is 0, expected at least 1"):
        BlockPool(0)
    with pytest.raises(DraftsimError, match="block_size is 0, expected at least 1 token"):
        BlockPool(1, 0)


def test_an_audit_notices_blocks_lost_or_made() -> None:
    pool = BlockPool(2, 4)
    pool.hold("a", 2)
    pool.audit()
    for used, message in ((1, "lost count"), (3, "lost count")):
        pool.used = used
        with pytest.raises(AssertionError, match=message):
            pool.audit()
    for held, message in ((3, "more blocks in use than exist"), (-1, "came back than were taken")):
        pool.hold("a", 0)
        pool.used = 0
        pool.hold("a", held)
        with pytest.raises(AssertionError, match=message):
            pool.audit()
