"""N-grams and suffix decoding as engines have them, against plain searches.

`tests/test_vllm.py` holds them against the engines' own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from tests.engine_lookups import NGRAMS, random_texts
from tests.outputs import decoded, trace_of
from traces.sources.lookups.sources import NGram, NGramSimple, ServedRequest, Suffix, served_before
from traces.sources.lookups.suffix import SuffixLookup, SuffixTree
from traces.sources.lookups.text import NGramLookup, NGramSimpleLookup
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source


def _searched(ids: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The longest n-gram at the end that ends earlier too, leftmost, by trying all."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[len(ids) - n :]:
                return ids[start + n : start + n + k]
    return []


@pytest.mark.parametrize(("k", "min_n", "max_n"), NGRAMS)
def test_ngrams_are_those_a_search_finds(k: int, min_n: int, max_n: int) -> None:
    found = 0
    for ids in random_texts(1, 300, 60, 3):
        lookup = NGramLookup(k, min_n, max_n)
        half = len(ids) // 2
        lookup.extend(ids[:half])
        lookup.extend(ids[half:])
        mine = [p.token_id for p in lookup.propose()]
        assert mine == _searched(ids, k, min_n, max_n)
        found += bool(mine)
    assert found >= (7 if min_n == 5 else 50)


def _copied(ids: list[int], size_n: int, size_m: int) -> list[int]:
    """Return what followed the latest n-gram like the last, by trying all from the end."""
    *before, _ = ids
    if len(before) > size_n + size_m + 1:
        for at in range(len(before) - size_n - 1, 0, -1):
            if ids[at : at + size_n] == ids[len(ids) - size_n :]:
                copied = before[at + size_n : at + size_n + size_m]
                return copied if len(copied) >= size_n else []
    return []


@pytest.mark.parametrize(("size_n", "size_m"), [(3, 8), (1, 1), (2, 5), (4, 4), (12, 48)])
def test_simple_ngrams_are_those_a_search_finds(size_n: int, size_m: int) -> None:
    found = 0
    for ids in random_texts(5, 400, 120, 2):
        lookup, steps = NGramSimpleLookup(size_n, size_m), np.random.default_rng(len(ids))
        at = 0
        while at < len(ids):
            step = int(steps.integers(1, 30))
            lookup.extend(ids[at : at + step])
            at += step
            mine = [p.token_id for p in lookup.propose()]
            assert mine == _copied(ids[:at], size_n, size_m)
            found += bool(mine)
    assert found >= (10 if size_n == 12 else 300)


class Plain:
    """Suffix decoding by strings in a dictionary, as slowly as it reads."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.counts: dict[tuple[int, ...], int] = {}
        self.follow: dict[tuple[int, ...], list[int]] = {}

    def add(self, sequence: Sequence[int], token: int) -> None:
        """`token` follows `sequence`."""
        end = tuple(sequence)
        for n in range(min(len(end), self.depth - 1), -1, -1):
            string = end[len(end) - n :]
            order = self.follow.setdefault(string, [])
            longer = (*string, token)
            before = self.counts.get(longer, 0)
            self.counts[longer] = before + 1
            if not before:
                order.append(token)
                continue
            level = [self.counts[(*string, t)] for t in order]
            at = order.index(token)
            level[at] = before
            if at and level[at - 1] in (before, before + 1):
                order.insert(level.index(level[at - 1]), order.pop(at))

    def draft(
        self, context: Sequence[int], most: int, factor: float, least: float
    ) -> tuple[list[int], float]:
        best: tuple[list[int], float] = ([], 0.0)
        for n in range(1, len(context)):
            string = tuple(context[len(context) - n :])
            if string not in self.counts:
                break
            tokens: list[int] = []
            share, score = 1.0, 0.0
            while len(tokens) < min(most, int(n * factor + 1e-6)) and self.follow.get(string):
                token = self.follow[string][0]
                share *= self.counts[(*string, token)] / self.counts[string]
                if share < least:
                    break
                tokens.append(token)
                score += share
                string = (*string, token)
            if score >= best[1] - 1e-6:
                best = tokens, score
        return best


def test_suffix_drafts_are_those_a_dictionary_gives() -> None:
    drafted = 0
    # One token over and over: no string is followed that would be longer than the tree is deep.
    for seed, tokens in ((5, 3), (6, 8), (7, 1)):
        own, all_, tree = Plain(8), Plain(8), SuffixTree(8)
        for served in random_texts(seed, 4, 40, tokens):
            tree.begin()
            tree.extend(served)
            for i, token in enumerate(served):
                all_.add(served[:i], token)
        prompt, output = list(random_texts(seed + 10, 2, 60, tokens))
        for i, token in enumerate(prompt):
            own.add(prompt[:i], token)
        lookup = SuffixLookup(tree, 6, 8, 1.5, 0.15)
        lookup.extend(prompt)
        for i, token in enumerate(output):
            own.add([*prompt, *output[:i]], token)
            all_.add(output[:i], token)
            lookup.extend([token])
            context = [*prompt, *output[: i + 1]][-8:]
            first, second = (p.draft(context, 6, 1.5, 0.15) for p in (own, all_))
            want = first if first[1] >= second[1] - 1e-6 else second
            mine = lookup.propose()
            assert [p.token_id for p in mine] == want[0]
            assert sum(p.prob or 0 for p in mine) == pytest.approx(want[1], abs=1e-5)
            drafted += len(mine)
    assert drafted > 40


def test_nothing_is_proposed_behind_the_end() -> None:
    end = frozenset({9})
    for lookup in (
        NGramLookup(5, 2, 3, end), NGramSimpleLookup(2, 4, end), Suffix().begin(None, end)
    ):  # fmt: skip
        lookup.extend([1, 2, 3, 9, 4, 1, 2, 3, 9, 4, 1])
        lookup.extend([2])
        assert [p.token_id for p in lookup.propose()] == [3, 9]


def test_what_is_not_said_is_as_vllm_has_it() -> None:
    """``suffix_decoding_max_tree_depth`` and its fellows of `vllm.config.SpeculativeConfig`."""
    plain = Suffix()
    assert (plain.num_tokens, plain.depth) == (24, 24)
    assert (plain.factor, plain.min_prob) == (1.0, 0.1)
    lookup = plain.begin(None, frozenset())
    # One token of two after a pair that occurred twice: a match of one allows one.
    for tokens, wanted in (([1, 2, 3, 1], [2]), ([2], [3, 1]), ([4, 5, 6], [])):
        lookup.extend(tokens)
        assert [p.token_id for p in lookup.propose()] == wanted
    # After 0 ten others followed, and one of eleven is less likely than a tenth.
    rare = plain.begin(None, frozenset())
    rare.extend([t for other in range(1, 12) for t in (0, other)] + [0])
    assert rare.propose() == []


def test_bad_parameters_are_named() -> None:
    for text, message in (
        ("ngram:min_n=4,max_n=3", "max_n is 3, expected >= 4"), ("ngram:k=0", "k is 0"),
        ("ngram-simple:size_n=0", "size_n is 0"), ("ngram-simple:size_m=0", "size_m is 0"),
        ("suffix:min_prob=2", "min_prob is 2"), ("suffix:factor=-1", "factor is -1"),
        ("suffix:depth=0", "depth is 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            parse_source(text)


def test_a_served_request_helps_the_next_but_not_itself_twice() -> None:
    said = list(range(10, 30))
    trace = trace_of([said, said, said], 20, [[1, 2], [3, 4], [5, 6]])
    rounds = {
        cached: replay_source(trace, Suffix(cached=cached), Fixed(24)).rounds
        for cached in (True, False)
    }
    assert rounds[False]["drafted"].sum() == 0  # no token recurs within a request
    assert rounds[True]["accepted"].sum() > 20
    source = Suffix()
    again = [replay_source(trace, source, Fixed(24)).rounds for _ in range(2)]
    np.testing.assert_array_equal(again[0], again[1])
    np.testing.assert_array_equal(again[0], rounds[True])
    lookup = source.lookup(frozenset(), lambda: served_before(trace, 1))
    lookup.extend([3, 4])
    lookup.extend([10, 11])
    assert [p.token_id for p in lookup.propose()] == [12, 13]  # a match of two allows two
    assert served_before(trace, 1) == [ServedRequest([1, 2], said)]


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
    "source",
    [NGram(4, 1, 3), NGram(), NGramSimple(2, 4), Suffix(), Suffix(factor=2.0, cached=False)],
)
def test_replayed_rounds_are_the_real_ones(source: NGram | NGramSimple | Suffix) -> None:
    case = decoded(256)
    from profiler.sources.run import SourceRunner
    from tests.replayed import run_as_replayed

    runner = SourceRunner(case.pair.target, case.trace)
    _, log = run_as_replayed(runner, source, Fixed(6), case.trace)
    assert log.fidelity == "exact"
