"""Paged key-value memory: a fixed pool of blocks and how many each request holds.

Blocks are interchangeable, so counting them is enough: what an engine decides from a
paged cache (admit, grow, pre-empt) depends on numbers of blocks and never on which.
"""

from __future__ import annotations

from collections.abc import Hashable

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

    def fits(self, tokens: int) -> bool:
        """Whether a request of this many tokens fits into the empty pool."""
        return self.blocks is None or -(-tokens // self.block_size) <= self.blocks

    def grow(self, owner: Hashable, tokens: int) -> int:
        """Let `owner` hold `tokens` tokens; returns its capacity in tokens, 0 if refused.

        A refused request leaves the pool as it was; holding more than asked is kept.
        """
        held = self._held.get(owner, 0)
        wanted = max(held, -(-tokens // self.block_size))
        if self.blocks is not None and self.used + wanted - held > self.blocks:
            return 0
        self.used += wanted - held
        self._held[owner] = wanted
        return wanted * self.block_size

    def held(self, owner: Hashable) -> int:
        """Blocks that `owner` holds."""
        return self._held.get(owner, 0)

    def growth(self, owner: Hashable, tokens: int) -> int:
        """Blocks that `owner` lacks for `tokens` tokens."""
        return max(-(-tokens // self.block_size) - self.held(owner), 0)

    def room_for(self, owner: Hashable, blocks: int, more: int) -> bool:
        """Whether `owner` could hold `blocks` blocks, and others `more` than now."""
        return self.blocks is None or self.used + blocks - self.held(owner) + more <= self.blocks

    def hold(self, owner: Hashable, blocks: int) -> None:
        """Let `owner` hold `blocks` blocks, more or fewer than now; there must be room."""
        self.used += blocks - self._held.pop(owner, 0)
        if blocks:
            self._held[owner] = blocks

    def release(self, owner: Hashable) -> None:
        """Take back every block of `owner`."""
        self.used -= self._held.pop(owner, 0)

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
