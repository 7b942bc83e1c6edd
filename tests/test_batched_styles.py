"""Batches whose sequences wait for each other: cut to the minimum, stopped at the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from policies import DraftPolicy, Fixed
from policies.together import TruncateToMinimum, together_of
from profiler.checks.batch_runs import groups_of
from profiler.checks.differences import output_of
from profiler.decoding.batch import BatchedDecoder, Stream, speculate_batch
from profiler.decoding.single import greedy
from profiler.models.runner import Runner
from tests.batched import END, LENGTHS, NEW, SLOTS, pair, prompts, runners, trace
from tests.batched_decoding import decode_batch
from traces.acceptance.trace import MATCH, Trace


def synchronised(
    trace: Trace, group: Sequence[int], gamma: int, style: str
) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of a fixed-length policy, looked up in the recording row by row."""
    names = ("request", "position", "offset", "draft_token", "match")
    rows = zip(*(trace.columns[n].tolist() for n in names), strict=True)
    proposals = {(i, at, k): (token, match == MATCH) for i, at, k, token, match in rows}
    position = dict.fromkeys(group, 1)
    tokens = [r.tokens for r in trace.requests]
    out: dict[int, list[tuple[int, int]]] = {i: [] for i in group}
    while going := [i for i in group if position[i] < tokens[i]]:
        drafted, accepted = {}, {}
        for i in going:
            matched, count, wrong = 0, 0, None
            while count < min(gamma, NEW - position[i] - 1):
                on_path = (i, position[i] + count, 0)
                token, match = proposals[on_path if wrong is None else (i, wrong, count - matched)]
                if wrong is None and not match:
                    wrong = position[i] + count
                matched, count = matched + (wrong is None), count + 1
                if token in END:
                    break
            drafted[i], accepted[i] = count, matched
        if style == "minimum":
            on = [a for i, a in accepted.items() if position[i] + a + 1 < tokens[i]]
            floor = min(on) if on else max(accepted.values())
            accepted = {i: min(a, floor) for i, a in accepted.items()}
        for i in going:
            out[i].append((drafted[i], accepted[i]))
            position[i] += accepted[i] + 1
    return [out[i] for i in group]


@pytest.mark.parametrize("style", ["ragged", "minimum"])
def test_truncation_against_matches_alone(style: Any) -> None:
    done = decode_batch(*runners(5), prompts(), NEW, END, Fixed(4), synchronise=style)
    assert done.outputs == [output_of(trace(), i) for i in range(len(prompts()))]
    for group in groups_of(len(prompts()), 5):
        real = [[(r.drafted, r.accepted) for r in done.rounds[i]] for i in group]
        assert real == synchronised(trace(), group, 4, style)


class Alternate(DraftPolicy):
    """Wants one token, and `more` in all if its context is even: votes that disagree."""

    def __init__(self, more: int) -> None:
        self.more = more
        self._even = False

    def begin_round(self, load: Any) -> None:
        self._even = load.context % 2 == 0

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < (self.more if self._even else 1)


@pytest.mark.parametrize("chosen", [range(len(LENGTHS)), (0, 6)])
def test_stopping_at_the_mean_is_a_vote(chosen: Sequence[int]) -> None:
    decoder, style = BatchedDecoder(*runners(9)), together_of(Alternate(5), "mean")
    streams = [Stream(i, prompts()[i], NEW) for i in chosen]
    outcomes, ties = set(), 0
    for iteration in speculate_batch(decoder, style, streams):
        if any(NEW - r.position - 1 <= 5 for _, r in iteration):
            continue
        # Everybody has room and nothing is EOS: all draft alike, so all votes are one vote.
        even = [(int(s.prompt.shape[0]) + r.position) % 2 == 0 for s, r in iteration]
        expected = 5 if 2 * sum(even) >= len(even) else 1
        assert [r.drafted for _, r in iteration] == [expected] * len(iteration)
        outcomes.add(expected)
        ties += 2 * sum(even) == len(even)
    assert outcomes == {1, 5}
    assert ties or len(chosen) % 2
    alone = Runner(pair().target, SLOTS)
    none: frozenset[int] = frozenset()
    assert [s.output for s in streams] == [greedy(alone, prompts()[i], NEW, none) for i in chosen]


def test_a_sequence_that_ends_holds_nobody_back() -> None:
    """The minimum is over those that go on; if all end, each keeps its own."""
    keep = TruncateToMinimum(Fixed(4)).keep
    assert keep([3, 1, 2], [False, True, False]) == [2, 1, 2]
    assert keep([3, 1], [True, True]) == [3, 1]
