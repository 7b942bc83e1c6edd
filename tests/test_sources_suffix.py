"""Drafts of suffix decoding are found where they are asked for, in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import speculate
from policies.lengths.basic import Fixed
from tests.outputs import trace_of
from traces.acceptance.trace import Trace
from traces.sources import Suffix, replay_source
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.lookups.sources import served_before
from traces.sources.lookups.suffix import SuffixLookup


def recorded(seed: int, tokens: int = 4) -> Trace:
    rng = np.random.default_rng(seed)
    outputs = [rng.integers(tokens, size=28).tolist() for _ in range(4)]
    prompts = [rng.integers(tokens, size=rng.integers(1, 20)).tolist() for _ in range(4)]
    return trace_of(outputs, 28, prompts)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), cached=st.booleans(), tokens=st.integers(2, 6),
    asked=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1, exclude_max=True)), max_size=30),
    factor=st.sampled_from([0.5, 1.0, 2.0]), least=st.sampled_from([0.0, 0.1, 0.4]),
)  # fmt: skip
def test_a_draft_is_that_of_a_lookup_begun_there(
    seed: int, cached: bool, tokens: int, asked: list[tuple[int, float]], factor: float,
    least: float,
) -> None:  # fmt: skip
    trace = recorded(seed, tokens)
    source = Suffix(6, 8, factor, least, cached)
    decoder_of = source.open(trace, {}, 0)
    for request, share in asked:
        start, end = trace.request_starts[request : request + 2].tolist()
        position = int(share * (end - start))
        decoder = decoder_of(request)
        decoder.position = position
        lookup = source.lookup(frozenset(), lambda r=request: served_before(trace, r))
        lookup.extend(prompt_tokens(trace, request))
        lookup.extend(true_tokens(trace)[start : start + position])
        found = []
        while (token := decoder.draft(found)) is not None:
            found.append(token)
        assert [(t.token_id, t.prob) for t in found] == [(p[0], p[1]) for p in lookup.propose()]


@pytest.mark.invariant(9)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_rounds_are_those_of_the_loop(seed: int, lengths: list[int]) -> None:
    trace, source = recorded(seed), Suffix(6, 8, 2.0)
    for length in lengths:
        fresh = Suffix(6, 8, 2.0).open(trace, {}, trace.first)
        want = [
            [*round_]
            for i in range(len(trace.requests))
            for round_ in speculate(fresh(i), Fixed(length))
        ]
        rounds = replay_source(trace, source, Fixed(length)).rounds
        assert [[*r.tolist()[1:]] for r in rounds] == want


def test_who_goes_on_looks_up_where_rounds_begin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list(range(10, 30))
    trace = trace_of([said, said, said], 20, [[1, 2], [3, 4], [5, 6]])
    looked: list[int] = []
    propose = SuffixLookup.propose
    monkeypatch.setattr(SuffixLookup, "propose", lambda self: looked.append(1) or propose(self))
    source = Suffix()
    rounds = replay_source(trace, source, Fixed(24)).rounds
    positions = sum(r.tokens for r in trace.requests)
    assert len(looked) == np.count_nonzero(rounds["position"] < 19) < positions
    replay_source(trace, source, Fixed(24))
    assert len(looked) < positions
    # Another cap goes back; then every place is read once, and never again.
    replay_source(trace, source, Fixed(2))
    replay_source(trace, source, Fixed(1))
    assert len(looked) <= positions
