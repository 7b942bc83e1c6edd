"""Paged key-value memory: a fixed pool of blocks and how many each request holds.

Blocks are interchangeable, so counting them is enough: what an engine decides from a
paged cache (admit, grow, pre-empt) depends on numbers of blocks and never on which.

Free blocks are taken in the order in which they became free.  A pre-empted request's blocks keep
what they hold until they are taken, its last block first, and the request finds the rest again
(vLLM's prefix caching, `KVCacheManager.free`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from traces.errors import DraftsimError


class BlockPool:
    """A pool of `blocks` blocks of `block_size` tokens; None means it never runs out.

    Raises
    ------
    DraftsimError
        If a size is below one.
    """

    def __init__(self, blocks: int | None = None, block_size: int = 16) -> None:
        if blocks is not None and blocks < 1:
            raise DraftsimError(
                f"kv_blocks is {blocks}, expected at least 1 (or none for no limit)"
            )
        if block_size < 1:
            raise DraftsimError(f"block_size is {block_size}, expected at least 1 token")
        self.blocks = blocks
        self.block_size = block_size
        self.used = 0
        self._held: dict[Hashable, int] = {}
        # (whose they were, how many) in the order in which they are taken; empty if no free
        # block is anybody's.
        self._free: list[tuple[Hashable | None, int]] = []

    def fits(self, tokens: Any) -> Any:
        """Return True if a request of this many tokens fits into the empty pool; or an array."""
        return self.blocks is None or -(-tokens // self.block_size) <= self.blocks

    def grow(self, owner: Hashable, tokens: int) -> int:
        """Reserve blocks for `tokens` of `owner`; return its capacity in tokens, 0 if refused.

        A refused request leaves the pool as it was; holding more than asked is kept.
        """
        held = self._held.get(owner, 0)
        wanted = max(held, -(-tokens // self.block_size))
        if self.blocks is not None and self.used + wanted - held > self.blocks:
            return 0
        if self._free:
            self._take(wanted - held)
        self.used += wanted - held
        self._held[owner] = wanted
        return wanted * self.block_size

    def has(self, tokens: int) -> bool:
        """Return True if there are free blocks for this many tokens."""
        return self.blocks is None or self.used - (-tokens // self.block_size) <= self.blocks

    def release(self, owner: Hashable) -> None:
        """Take back every block of `owner`."""
        held = self._held.pop(owner, 0)
        self.used -= held
        if self._free and held:
            self._free.append((None, held))

    def preempt(self, owner: Hashable, full: int) -> None:
        """Take back every block of `owner`, which may find the first `full` again.

        Only blocks that are full of computed tokens can be found.
        """
        held = self._held.pop(owner, 0)
        if not self._free and self.blocks is not None:
            self._free.append((None, self.blocks - self.used))
        self.used -= held
        self._free += [(None, held - full), (owner, full)]
        self._take(0)

    @property
    def keeps(self) -> bool:
        """True if a free block still holds tokens of a pre-empted request."""
        return bool(self._free)

    def kept(self, owner: Hashable) -> int:
        """Blocks that a pre-empted `owner` would find again."""
        return sum(count for whose, count in self._free if whose is owner)

    def find(self, owner: Hashable, blocks: int) -> None:
        """Give a pre-empted `owner` back `blocks` of those it finds again, and free the others."""
        left = blocks
        for place, (whose, count) in enumerate(self._free):
            if whose is owner:
                own = min(left, count)
                left -= own
                self._free[place] = (None, count - own)
        self.used += blocks
        if blocks:
            self._held[owner] = blocks
        self._take(0)

    def _take(self, count: int) -> None:
        """Take `count` free blocks, those first that became free first."""
        free = self._free
        while free and (count or not free[0][1]):
            whose, there = free[0]
            taken = min(count, there)
            count -= taken
            if taken == there:
                del free[0]
            else:
                free[0] = (whose, there - taken)
        if not any(whose is not None and there for whose, there in free):
            free.clear()

    @property
    def holders(self) -> int:
        """Requests that hold blocks."""
        return len(self._held)

    def audit(self) -> None:
        """Check that no block is lost or held twice.

        Raises
        ------
        AssertionError
            If the count of used blocks and the holders disagree.
        """
        assert self.used == sum(self._held.values()), "the pool lost count of its blocks"
        assert self.used >= 0, "more blocks came back than were taken"
        assert self.blocks is None or self.used <= self.blocks, "more blocks in use than exist"
