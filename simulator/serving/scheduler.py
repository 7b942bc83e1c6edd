"""The scheduler: it decides which requests run in the next iteration, and computes no seconds.

`Continuous` is iteration-level continuous batching as vLLM's V1 scheduler does it: first
come first served, running requests before waiting ones, a token budget that prompts share
in chunks, paged memory with look-ahead slots, and pre-emption of the youngest by
recomputation.  `StaticBatches` forms one batch and runs it to the end of its slowest.

Memory is paged: a fixed pool of blocks and how many each request holds.  Blocks are
interchangeable, so counting them is enough: what an engine decides from a paged cache (admit,
grow, pre-empt) depends on numbers of blocks and never on which.  Free blocks are taken in the order
in which they became free.  A pre-empted request's blocks keep what they hold until they are taken,
its last block first, and the request finds the rest again (vLLM's prefix caching,
`KVCacheManager.free`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from simulator.serving.cost import Chunk
from simulator.serving.sequence import Slot
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

MOST_BLOCKS = 2**24
"""Blocks of a pool; more than 10 TB of cache are taken for a mistake."""


class BlockPool:
    """A pool of `blocks` blocks of `block_size` tokens; None means it never runs out.

    Raises DraftsimError if a size is below one, or there are more than `MOST_BLOCKS`.
    """

    def __init__(self, blocks: int | None = None, block_size: int = 16) -> None:
        if blocks is not None and not 1 <= blocks <= MOST_BLOCKS:
            raise DraftsimError(
                f"kv_blocks is {blocks}, expected 1 to {MOST_BLOCKS:,} (or none for no limit)"
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
        """Return the number of blocks that a pre-empted `owner` would find again."""
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


MOST_BATCH = 65_536
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """The limits of an engine's configuration.

    Parameters
    ----------
    max_batch:
        Requests running at a time.
    token_budget:
        Tokens of one iteration: look-ahead + 1 per decoding request, and prompt chunks.
    kv_blocks, block_size:
        Blocks of the pool (None: never runs out) and tokens of a block.
    async_scheduling:
        True if an iteration is planned while the one before it runs (vLLM's option of this name).
        A plan then does not see the requests that arrive during that iteration, and the requests
        that end in it still hold their seats and blocks.
    lookahead:
        Draft slots reserved per decoding request, also the longest draft; None takes the
        policy's own maximum.
    """

    max_batch: int = 64
    token_budget: int = 8192
    kv_blocks: int | None = None
    block_size: int = 16
    async_scheduling: bool = False
    lookahead: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_batch", MOST_BATCH), ("token_budget", MOST_TOKENS)):
            if getattr(self, name) < 1:
                raise DraftsimError(f"{name} is {getattr(self, name)}, expected at least 1")
            if getattr(self, name) > most:
                raise DraftsimError(f"{name} is {getattr(self, name)}, expected at most {most}")
        if self.lookahead is not None and self.lookahead < 0:
            raise DraftsimError(f"lookahead is {self.lookahead}, expected at least 0")
        BlockPool(self.kv_blocks, self.block_size)

    @classmethod
    def of_engine(
        cls, latency: LatencyTable, max_batch: int | None = None, token_budget: int | None = None,
        kv_blocks: int | None = None, async_scheduling: bool = False,
    ) -> Limits:  # fmt: skip
        """Return the limits that `latency`'s engine was measured under, where none are given."""
        own = latency.meta.get("engine") or {}
        return cls(
            own.get("max_batch", cls.max_batch) if max_batch is None else max_batch,
            own.get("token_budget", cls.token_budget) if token_budget is None else token_budget,
            kv_blocks,
            async_scheduling=async_scheduling,
        )


class Iteration(NamedTuple):
    """The next iteration: requests that decode, and prompt chunks."""

    decode: list[Slot]
    chunks: list[Chunk]


class Scheduler(ABC):
    """Holds the waiting and the running; `next` plans an iteration."""

    drafts_ahead: ClassVar[bool] = False
    """True if an iteration ends with the drafts of the next (`policies.core.Load.scheduled`)."""

    def __init__(self, limits: Limits, lookahead: int) -> None:
        if limits.token_budget < lookahead + 1:
            raise DraftsimError(
                f"token_budget is {limits.token_budget}, expected at least look-ahead + 1 = "
                f"{lookahead + 1}: raise it, or draft less"
            )
        self.limits = limits
        self.lookahead = lookahead
        self.pool = BlockPool(limits.kv_blocks, limits.block_size)
        self.waiting: deque[Slot] = deque()
        self.running: list[Slot] = []
        self._held_back = False
        self._unseen = 0
        self._left: list[Slot] = []

    def admissible(self, prompt_tokens: Any, output_tokens: Any) -> Any:
        """Return True if a request could finish if it were alone; both may be arrays."""
        return self.pool.fits(prompt_tokens + output_tokens + self.lookahead)

    @abstractmethod
    def next(self, more_to_come: bool) -> Iteration:
        """Return the next iteration; empty if no request can run before another one arrives."""

    def arrive(self, slot: Slot, busy: bool) -> None:
        """Queue `slot`; `busy` if it arrives while an iteration runs."""
        self.waiting.append(slot)
        self._unseen += busy and self.limits.async_scheduling

    def finish(self, slot: Slot) -> None:
        """Free the blocks of a finished `slot`; with `async_scheduling` after the next plan."""
        self.running.remove(slot)
        if self.limits.async_scheduling:
            self._left.append(slot)
        else:
            self.pool.release(slot)

    def _see_all(self) -> bool:
        """Show the next plan all that has happened by now; return True if there was anything."""
        late = bool(self._unseen or self._left)
        for slot in self._left:
            self.pool.release(slot)
        self._left.clear()
        self._unseen = 0
        return late

    def _preempt(self, slot: Slot) -> None:
        # The last emitted token is in no cache yet.
        computed = slot.prefilled if slot.prefill_left else slot.context - 1
        if full := computed // self.limits.block_size:
            self.pool.preempt(slot, full)
        else:
            self.pool.release(slot)
        self.running.remove(slot)
        slot.capacity = slot.prefilled = 0
        # All but the last emitted token, which no cache holds yet, is computed again.
        slot.prefill_left = slot.context - (1 if slot.tokens else 0)
        slot.preemptions += 1
        self._held_back = True
        self.waiting.appendleft(slot)

    def _room(self, slot: Slot, tokens: int) -> bool:
        """Make `slot` hold `tokens`, pre-empting the youngest; False if it went itself."""
        while True:
            slot.capacity = self.pool.grow(slot, tokens)
            if slot.capacity:
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is slot:
                return False


class Continuous(Scheduler):
    """Iteration-level continuous batching, first come first served."""

    drafts_ahead = True

    def next(self, more_to_come: bool) -> Iteration:
        """Return running requests in order of admission, then waiting ones, within the budget."""
        del more_to_come
        plan = self._plan()
        # With nothing to run, the engine waits for what runs and plans again.
        if self._see_all() and not (plan.decode or plan.chunks):
            plan = self._plan()
        return plan

    def _plan(self) -> Iteration:
        limits, running = self.limits, self.running
        budget, need = limits.token_budget, self.lookahead + 1
        self._held_back = False
        decode: list[Slot] = []
        chunks: list[Chunk] = []
        at = 0
        while at < len(running):
            slot = running[at]
            at += 1
            if slot.prefill_left:
                budget -= self._chunk(slot, budget, chunks)
                continue
            if budget < need:
                self._held_back = True
                break
            # The last emitted token is not cached yet: its slot is one of the context's.
            peak = slot.context + self.lookahead
            if peak > slot.capacity and not self._room(slot, peak):
                break
            budget -= need
            decode.append(slot)
        # Nobody new while one that was admitted has to wait.
        if not self._held_back:
            self.admit(budget, chunks)
        return Iteration(decode, chunks)

    def admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Admit waiting requests while tokens of `budget`, places and blocks last."""
        limits, running = self.limits, self.running
        seats = limits.max_batch - len(self._left)
        while len(self.waiting) > self._unseen and len(running) < seats and budget > 0:
            slot = self.waiting[0]
            found = self._found(slot)
            left = slot.prefill_left - found
            tokens = min(left, budget)
            # All of the prompt has to fit, as with vLLM's ``scheduler_reserve_full_isl``.
            if not self.pool.has(slot.prefill_left):
                return
            if slot.preemptions and self.pool.keeps:
                self.pool.find(slot, found // limits.block_size)
            slot.prefilled, slot.prefill_left = slot.prefilled + found, left
            slot.capacity = self.pool.grow(slot, slot.prefilled + tokens)
            running.append(self.waiting.popleft())
            chunks.append(Chunk(slot, tokens))
            budget -= tokens

    def _found(self, slot: Slot) -> int:
        """Return tokens that a pre-empted request need not process again; one is always left."""
        if not slot.preemptions or not self.pool.keeps:
            return 0
        size = self.limits.block_size
        return min(self.pool.kept(slot), (slot.prefill_left - 1) // size) * size

    def _chunk(self, slot: Slot, budget: int, chunks: list[Chunk]) -> int:
        tokens = min(slot.prefill_left, budget)
        if tokens <= 0:
            return 0
        wanted = slot.prefilled + tokens
        if wanted > slot.capacity and not self._room(slot, wanted):
            return 0
        chunks.append(Chunk(slot, tokens))
        return tokens


class StaticBatches(Scheduler):
    """One batch at a time: filled from the queue when the last one has ended.

    A batch starts when it is full, or with what waits once no more requests will come.
    Its prompts are processed together.  Requests that finish leave the passes, and their places
    stay empty.
    """

    def next(self, more_to_come: bool) -> Iteration:
        """Return every running request, or a new batch's prompts."""
        if not self.running:
            size = self.limits.max_batch
            if not self.waiting or (more_to_come and len(self.waiting) < size):
                return Iteration([], [])
            while self.waiting and len(self.running) < size:
                slot = self.waiting[0]
                peak = slot.job.prompt_tokens + slot.job.output_tokens + self.lookahead
                if not (capacity := self.pool.grow(slot, peak)):
                    break
                slot.capacity = capacity
                self.running.append(self.waiting.popleft())
            return Iteration([], [Chunk(slot, slot.prefill_left) for slot in self.running])
        return Iteration(list(self.running), [])
