"""Where strings of a text occurred before, and what is copied from there, at all places at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from policies.vectorised import Ints
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
    position = np.arange(len(output)) - np.repeat(starts[:-1], tokens)
    return Text(np.array(text), np.repeat(begins, tokens), np.repeat(first, tokens) + position)


def strings(ids: Ints, length: int) -> Ints:
    """A number for the string of `length` that ends at each index, equal for equal strings.

    BETWEEN where it would begin before its sequence.
    """
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
    """Where the longest string that each place ends with, and that ended before, first did.

    BETWEEN where none of these lengths did.
    """
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
    """Where the string that ends at each place last ended between `since` and `until`.

    (places,) each; BETWEEN where it did not.
    """
    ranked, own = _ranked(numbers), numbers[text.places]
    at = ranked.searchsorted(own * len(numbers) + until, side="right") - 1
    found = ranked[at] - own * len(numbers)
    return np.where((own >= 0) & (found >= since), found, BETWEEN)


def _ranked(numbers: Ints) -> Ints:
    """Strings by number, then by place, between two that are none."""
    ends = np.flatnonzero(numbers >= 0)
    limits = np.iinfo(np.int64)
    ranked = np.sort(numbers[ends] * len(numbers) + ends)
    return np.concatenate([[limits.min // 2], ranked, [limits.max // 2]])


def copied(ids: Ints, behind: Ints, last: Ints, most: int) -> Ints:
    """Return the ids after index `behind` up to index `last`, (places, `most`), else BETWEEN."""
    at = behind[:, None] + np.arange(1, most + 1)
    there = (behind[:, None] >= 0) & (at <= last[:, None])
    return np.where(there, ids.take(at, mode="clip"), BETWEEN)


def until_eos(tokens: Ints, eos: Collection[int], *, proposed: bool) -> Ints:
    """`tokens` up to the first end of a sequence, which may be `proposed` itself or not."""
    over = np.logical_or.accumulate(np.isin(tokens, sorted(eos)), axis=1)
    if proposed:
        over = np.column_stack([np.zeros(len(over), bool), over[:, :-1]])
    return np.where(over, BETWEEN, tokens)
