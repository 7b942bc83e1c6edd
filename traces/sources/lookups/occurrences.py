"""Where strings of a text occurred before, and what is copied from there, at all places at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from policies.arrays import Ints, ranges
from traces.acceptance.trace import Trace
from traces.sources.base import prompt_tokens, true_tokens

BETWEEN = -1
"""The id before, between and after the sequences of a text, and after what is proposed."""


class Text(NamedTuple):
    """Prompts and outputs of a trace in one text; a place for every output position."""

    ids: Ints
    begins: Ints
    """Where the place's own sequence begins, (places,)."""
    places: Ints
    """Index of the last token known there, (places,)."""


def text_of(trace: Trace, before: Sequence[int] = (BETWEEN,)) -> Text:
    """Return the text of `trace` after another; DraftsimError if tokens were not recorded."""
    output, starts = true_tokens(trace), trace.request_starts
    text, begins, first = list(before), [], []
    for i in range(len(trace.requests)):
        begins.append(len(text))
        text += prompt_tokens(trace, i)
        first.append(len(text) - 1)
        text += [*output[int(starts[i]) : int(starts[i + 1])], BETWEEN]
    tokens = np.diff(starts)
    return Text(np.array(text), np.repeat(begins, tokens), ranges(tokens, np.array(first)))


def strings(ids: Ints, length: int) -> Ints:
    """Return equal numbers where equal strings of `length` end; BETWEEN if one begins too early."""
    found, size = ids, 1
    while size < length:
        # Two strings that overlap make a longer one.
        step = min(size, length - size)
        before = np.concatenate([np.full(step, BETWEEN), found[:-step]])
        whole = (before >= 0) & (found >= 0)
        pairs = before[whole] * (int(found.max()) + 1) + found[whole]
        found = np.full(len(ids), BETWEEN)
        found[whole] = np.unique(pairs, return_inverse=True)[1]
        size += step
    return found


def first_ends(text: Text, shortest: int, longest: int) -> Ints:
    """Return where the longest string that each place ends with first ended; BETWEEN if nowhere."""
    chosen = np.full(len(text.places), BETWEEN)
    for length in range(shortest, longest + 1):
        numbers = strings(text.ids, length)
        ranked, own = _ranked(numbers), numbers[text.places]
        found = ranked[ranked.searchsorted(own * len(numbers) + text.begins)] - own * len(numbers)
        before = (own >= 0) & (found < text.places)
        if not before.any():
            break  # nor did a longer one
        chosen[before] = found[before]
    return chosen


def last_end(numbers: Ints, text: Text, since: Ints, until: Ints) -> Ints:
    """Return where each place's string last ended from `since` to `until`; else BETWEEN."""
    ranked, own = _ranked(numbers), numbers[text.places]
    at = ranked.searchsorted(own * len(numbers) + until, side="right") - 1
    found = ranked[at] - own * len(numbers)
    return np.where((own >= 0) & (found >= since), found, BETWEEN)


def _ranked(numbers: Ints) -> Ints:
    """Return strings by number, then by place, between two that are none."""
    ends = np.flatnonzero(numbers >= 0)
    limits = np.iinfo(np.int64)
    ranked = np.sort(numbers[ends] * len(numbers) + ends)
    return np.concatenate([[limits.min // 2], ranked, [limits.max // 2]])


def copied(ids: Ints, end: Ints, last: Ints, most: int) -> Ints:
    """Return the ids after index `end` up to index `last`, (places, `most`), else BETWEEN."""
    at = end[:, None] + np.arange(1, most + 1)
    there = (end[:, None] >= 0) & (at <= last[:, None])
    return np.where(there, ids.take(at, mode="clip"), BETWEEN)


def until_eos(tokens: Ints, eos: Collection[int], *, proposed: bool) -> Ints:
    """Return `tokens` up to the first end of a sequence, which may be `proposed` itself or not."""
    over = np.logical_or.accumulate(np.isin(tokens, sorted(eos)), axis=1)
    if proposed:
        over = np.column_stack([np.zeros(len(over), bool), over[:, :-1]])
    return np.where(over, BETWEEN, tokens)


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
    for which, ends in _parts(low, high, order):
        owner, at = which, ends
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
    """Yield some places at a time, by number, and where the longest string they end with ended.

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
        yield np.repeat(np.arange(begin, end), each), order[ranges(each, low[begin:end])] + 1
        begin = end


HELD = 1 << 20
"""Occurrences that are followed at a time."""
