"""The work of an iteration: prompt chunks, and the sums of its rounds; no seconds yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.core import Round
from simulator.serving.sequence import Slot
from traces.replay.always import MOST_BEHIND


class Chunk(NamedTuple):
    """Prompt tokens of one request to process in this iteration."""

    slot: Slot
    tokens: int


class Work(NamedTuple):
    """Counts over one round per sequence."""

    context: float
    drafted: float
    longest: int
    """Draft passes of the sequence that drafted most."""
    drafting: int
    """Sequences that drafted at all; the next two are theirs alone."""
    catch_up: int
    draft_context: float
    rejected: bool
    """True if any drafted token leaves the target's cache."""
    unread: bool
    """True if any token that the draft model has read leaves its cache."""


def drafting_always(work: Work, batch: int, passes: int) -> Work:
    """`work` where every sequence of the batch runs at least `passes` draft passes.

    A drafter called in every iteration has at most `MOST_BEHIND` tokens to catch up on.
    """
    behind = min(work.catch_up, MOST_BEHIND * work.drafting) + batch - work.drafting
    return work._replace(
        longest=max(work.longest, passes), drafting=batch, catch_up=behind,
        draft_context=work.context, unread=work.unread or passes > 1,
    )  # fmt: skip


def work_of(slots: Sequence[Slot], rounds: Sequence[Round]) -> Work:
    """The work of `rounds`, one per slot; contexts are those from before the rounds."""
    context = drafted_all = longest = drafting = catch_up_all = draft_context = 0
    rejected = unread = False
    for slot, (_, drafted, accepted, _, forwards, catch_up) in zip(slots, rounds, strict=True):
        own = slot.context
        context += own
        drafted_all += drafted
        if accepted < drafted:
            rejected = True
        if forwards:
            drafting += 1
            catch_up_all += catch_up
            draft_context += own
            longest = forwards if forwards > longest else longest
            if accepted < forwards - 1:
                unread = True
    # As Work(...), without the Python function that a named tuple's constructor is.
    counts = context, drafted_all, longest, drafting, catch_up_all, draft_context, rejected, unread
    return tuple.__new__(Work, counts)
