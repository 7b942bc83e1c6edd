"""The drafts of `traces.sources.lookups.text.Retrieval` at many places of a text at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policies.vectorised import Ints
from traces.sources.lookups.occurrences import BETWEEN


def retrieved(
    text: Ints, places: Ints, until: Ints, num_tokens: int, max_suffix: int, min_suffix: int,
    eos: Sequence[int],
) -> Ints:  # fmt: skip
    """Return the heaviest chains after some places of a text, (places, num_tokens).

    -1 where they end.  ``places`` are indices of the last tokens known; the text before ``until``
    is searched, (places,) each.
    """
    chosen = np.full((len(places), num_tokens), BETWEEN)
    for which, low, high, order in _matches(text, places, until, max_suffix, min_suffix):
        # Places of one sequence that end alike follow the same occurrences.
        found, of = np.unique(low * (len(text) + 1) + high, return_inverse=True)
        bounds = np.divmod(found, len(text) + 1)
        chosen[which] = _chains(text, *bounds, order, num_tokens, eos)[of]
    return chosen


def _chains(
    text: Ints, low: Ints, high: Ints, order: Ints, num_tokens: int, eos: Sequence[int]
) -> Ints:
    """Return the heaviest chain after each range of the places in `order`, (ranges, num_tokens)."""
    chosen = np.full((len(low), num_tokens), BETWEEN)
    width = int(text.max(initial=0)) + 1
    for which, behind in _parts(low, high, order):
        owner, at = which, behind
        for step in range(num_tokens):
            if not len(at):
                break
            following = text[at]
            going = following >= 0
            owner, at, following = owner[going], at[going], following[going]
            key, counts = np.unique(owner * width + following, return_counts=True)
            of, token = np.divmod(key, width)
            # Of equals the smallest token comes first.
            by_weight = np.lexsort((token, -counts, of))
            heaviest = by_weight[np.unique(of[by_weight], return_index=True)[1]]
            best = np.full(len(low), BETWEEN)
            best[of[heaviest]] = token[heaviest]
            best[np.isin(best, eos)] = BETWEEN
            chosen[of[heaviest], step] = best[of[heaviest]]
            same = following == best[owner]
            owner, at = owner[same], at[same] + 1
    return chosen


def _matches(
    text: Ints, places: Ints, until: Ints, longest: int, shortest: int
) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """Some places at a time, by number; and where the longest string that they end with ended.

    That is a range of the last of the four, from the second up to the third.
    """
    size = len(text)
    # Strings of one length that end alike have one number, those that occur once none.
    number = np.full(size, BETWEEN)
    ends = np.flatnonzero(text >= 0)
    key, width = text[ends], int(text.max(initial=0)) + 1
    waiting = np.arange(len(places))
    low = high = order = np.empty(0, dtype=np.int64)
    for length in range(1, longest + 1):
        _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
        repeated = counts[inverse] > 1
        ends, inverse = ends[repeated], inverse[repeated]
        number = np.full(size, BETWEEN)
        number[ends] = inverse
        # By number, then by place: what stands before a place is a range.
        ranked = np.sort(inverse * size + ends)
        own = number[places[waiting]]
        begin = np.searchsorted(ranked, own * size)
        end = np.searchsorted(ranked, own * size + until[waiting])
        found = (own >= 0) & (end > begin)
        if length > shortest:
            lost = ~found
            yield waiting[lost], low[lost], high[lost], order
        waiting, low, high = waiting[found], begin[found], end[found]
        order = ranked % size
        ends = ends[number[ends - 1] >= 0]
        key = number[ends - 1] * width + text[ends]
    if longest >= shortest:
        yield waiting, low, high, order


def _parts(low: Ints, high: Ints, order: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield ranges by number, and the index after each place of theirs; about `HELD` at a time."""
    many = high - low
    total = np.cumsum(many)
    begin = 0
    while begin < len(many):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + HELD, side="right")))
        each = many[begin:end]
        offset = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        yield (
            np.repeat(np.arange(begin, end), each),
            order[np.repeat(low[begin:end], each) + offset] + 1,
        )
        begin = end


HELD = 1 << 20
"""Occurrences that are followed at a time."""
