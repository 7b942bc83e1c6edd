"""What the requests of a batch will do, added up iteration by iteration.

A decoding request takes part in every iteration until it ends, and its rounds are known:
so they are added once, when it joins, to the iterations to come, and an iteration's work
is read off whatever the size of the batch.
"""

from __future__ import annotations

import numpy as np

from simulator.serving.cost.work import Work, Works
from simulator.serving.spans.rounds import (
    CATCH_UP,
    CONTEXT,
    DRAFT_CONTEXT,
    DRAFTED,
    DRAFTING,
    EMITTED,
    FORWARDS,
    REJECTED,
    ROWS,
    UNREAD,
    Ints,
    ReplayedSequence,
)

LONGEST_DRAFT = ROWS + 1
"""A row more, behind the blocks: draft passes of the request that drafts most."""
WORK = [CONTEXT, DRAFTED, LONGEST_DRAFT, DRAFTING, CATCH_UP, DRAFT_CONTEXT, REJECTED, UNREAD]
"""Rows of the ledger in the order of the fields of `Work`."""


class Ledger:
    """Work of the coming iterations; ``now`` counts the iterations that have been.

    Parameters
    ----------
    lookahead, block_size:
        Of the cache blocks that a request holds in an iteration: those of its context and
        of its draft slots.
    """

    def __init__(self, lookahead: int, block_size: int) -> None:
        self.now = 0
        self._ahead = lookahead + block_size - 1
        self._block = block_size
        self._work: Ints = np.zeros((ROWS + 2, 1024), np.int64)
        self._at = self._end = 0

    def add(self, sequence: ReplayedSequence, prompt_tokens: int, after: int) -> int:
        """Enter the rounds still to come of a request, the first `after` so many iterations.

        Returns the iteration that ends it.
        """
        table, first, last = sequence.table, sequence.at, sequence.count
        count = after + last - first
        self.make_room(count)
        start, stop = self._at + after, self._at + count
        own = table.entered(prompt_tokens, self._ahead, self._block)[:, first:last]
        work = self._work
        work[: ROWS + 1, start:stop] += own
        longest = work[LONGEST_DRAFT, start:stop]
        np.maximum(longest, own[FORWARDS], out=longest)
        work[EMITTED, stop - 1] -= sequence.over
        self._end = max(self._end, stop)
        return self.now + count

    def coming(self, count: int) -> Ints:
        """(ROWS + 2, count): the work of the next iterations; a view, to be read at once."""
        return self._work[:, self._at : self._at + count]

    def advance(self, count: int) -> None:
        """`count` iterations have been."""
        self._work[:, self._at : self._at + count] = 0
        self._at += count
        self.now += count

    def clear(self) -> None:
        """Forget what was to come."""
        self._work[:, self._at : self._end] = 0

    def make_room(self, count: int) -> None:
        """Let `coming` show so many iterations."""
        needed = self._at + count
        size = self._work.shape[1]
        if needed <= size:
            return
        held = self._work[:, self._at : self._end]
        # Room for as much again, so that columns are seldom moved.
        room = max(size, 2 * max(count, held.shape[1]))
        moved = np.zeros((ROWS + 2, room), np.int64)
        moved[:, : held.shape[1]] = held
        self._work, self._at, self._end = moved, 0, held.shape[1]


def work_of_column(column: list[int]) -> Work:
    """One iteration's column as work."""
    return Work(*[column[row] for row in WORK])  # type: ignore[arg-type]


def works_of(columns: Ints) -> Works:
    """Columns as work."""
    return Works(*columns[WORK])
