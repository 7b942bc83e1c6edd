"""Lookup drafts: against transformers' own, against brute force, and replayed against real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import speculate
from policies.lengths.basic import Fixed, Oracle
from policies.registry import parse_policy
from policies.rules.threshold import TypicalAcceptance
from tests.outputs import LIMIT, decoded, trace_of
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.sources.base import prompt_tokens, true_tokens
from traces.sources.lookups.sources import PLD, REST, Lookahead, Suffix, read_corpus, served_before
from traces.sources.lookups.suffix import SuffixLookup
from traces.sources.lookups.text import Datastore, NGramPool, PromptLookup, Retrieval
from traces.sources.registry import parse_source
from traces.sources.replay import replay_source

IDS = st.lists(st.integers(1, 4), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(IDS, st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup_is_transformers(ids: list[int], max_ngram: int, num_tokens: int) -> None:
    torch = pytest.importorskip("torch")
    generator = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = generator.PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([4]), num_output_tokens=num_tokens,
        max_matching_ngram_size=max_ngram, max_length=1000,
    )  # fmt: skip
    wanted = theirs.get_candidates(torch.tensor([ids]))[0][0, len(ids) :].tolist()
    lookup = PromptLookup(num_tokens, max_ngram, frozenset({4}))
    for token in ids:  # grown token by token, as decoding grows it
        lookup.extend([token])
    assert [p.token_id for p in lookup.propose()] == wanted


@settings(max_examples=150, deadline=None)
@given(st.lists(IDS, max_size=4), IDS, st.integers(1, 5), st.integers(1, 3))
def test_retrieval_is_brute_force(
    corpus: list[list[int]], ids: list[int], max_suffix: int, min_suffix: int
) -> None:
    max_suffix = max(max_suffix, min_suffix)
    lookup = Retrieval(Datastore(corpus), 4, max_suffix, min_suffix)
    lookup.extend(ids)
    following: list[list[int]] = []
    for n in range(min(max_suffix, len(ids)), 0, -1):
        following = [
            s[i + n :] for s in corpus for i in range(len(s) - n + 1) if s[i : i + n] == ids[-n:]
        ]
        if following:
            following = following if n >= min_suffix else []
            break
    wanted = []
    for _ in range(4):
        heads = [f[0] for f in following if f]
        if not heads:
            break
        best = min(set(heads), key=lambda t: (-heads.count(t), t))
        wanted.append((best, heads.count(best) / len(heads)))
        following = [f[1:] for f in following if f and f[0] == best]
    assert [(p.token_id, p.prob) for p in lookup.propose()] == wanted


def test_pool_drafts_the_newest_ngram_and_forgets_the_oldest() -> None:
    pool = NGramPool(ngram=3, guesses=2)
    pool.extend([1, 2, 3, 1, 4, 5, 1])
    assert [p.token_id for p in pool.propose()] == [4, 5]
    pool.extend([2, 3, 1])  # (1; 2, 3) again: now the newest
    assert [p.token_id for p in pool.propose()] == [2, 3]
    pool.extend([6, 7, 1, 8, 9, 1])
    assert len(pool._pool[1]) == 2


def test_repeating_output_is_copied_and_the_oracle_sees_the_run() -> None:
    period = [5, 6, 7, 8]
    trace = trace_of([period * 5], 20, [period * 2])
    fixed = replay_source(trace, PLD(num_tokens=10), Fixed(4))
    assert fixed.rounds["accepted"].tolist() == [4, 4, 4, 3]
    assert fixed.rounds["emitted"].sum() == 19  # the first token is the prefill's
    oracle = replay_source(trace, PLD(num_tokens=3), Oracle())
    assert (oracle.rounds["drafted"] == oracle.rounds["accepted"]).all()
    assert fixed.recorded_calls is not None
    assert fixed.recorded_calls["count"].sum() == len(fixed)  # one lookup a round


def test_rounds_without_a_match_are_plain_steps() -> None:
    trace = trace_of([[4, 5, 6, 7]], 4, [[1, 2, 3]])
    log = replay_source(trace, PLD(), Fixed(10))
    assert log.rounds["drafted"].tolist() == [0, 0, 0]
    assert log.rounds["emitted"].tolist() == [1, 1, 1]


def test_retrieval_serves_from_earlier_requests_only() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    trace = trace_of([text[2:]] * 2, 6, [text[:2]] * 2)
    log = replay_source(trace, REST(), Fixed(6))
    by_request = [log.rounds["accepted"][log.rounds["request"] == i].sum() for i in (0, 1)]
    assert by_request == [0, 4]


def test_signals_and_rules_that_a_lookup_cannot_serve_are_refused() -> None:
    trace = trace_of([[1, 2, 1, 2]], 4, [[1, 2]])
    with pytest.raises(SignalError, match=r"reads prob.*'pld' drafts do not have"):
        replay_source(trace, PLD(), parse_policy("confidence"))
    replay_source(trace, REST(), parse_policy("confidence"))
    with pytest.raises(DraftsimError, match="use --verify exact"):
        replay_source(trace, PLD(), Fixed(1), TypicalAcceptance())
    with pytest.raises(ValueError, match="did you mean 'max_ngram'"):
        parse_source("pld:max_ngrams=3")
    assert replay_source(trace, Lookahead(), Fixed(1)).fidelity == "approximate"


def test_corpus_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("[1, 2, 3]\n\n[4]\n")
    assert read_corpus(path) == [[1, 2, 3], [4]]
    path.write_text("[1, 2]\n[1, -2]\n")
    with pytest.raises(DraftsimError, match=r"corpus.jsonl line 2: is not a JSON list"):
        read_corpus(path)


@pytest.mark.invariant(1)
@pytest.mark.parametrize("num_tokens", [3, 10])
def test_real_prompt_lookup_is_the_replay_and_transformers_generate(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    from policies.core import speculate
    from profiler.sources.exits import Begin
    from profiler.sources.feature_decoder import LookupDecoder

    pair, runner, encoded, outputs, trace = decoded(256, 5)
    log = replay_source(trace, PLD(num_tokens), Fixed(num_tokens), first=0)
    sent: list[int] = []
    original = PromptLookupCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        found = original(self, input_ids, **kwargs)
        sent.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", spy)
    for i, ids in enumerate(encoded):
        decoder = LookupDecoder(
            runner, PromptLookup(num_tokens, 2, pair.eos), 5, Begin(ids, LIMIT, pair.eos), first=0
        )
        real = list(speculate(decoder, Fixed(num_tokens)))
        mine = log.rounds[log.rounds["request"] == i]
        assert decoder.output == outputs[i]
        assert [tuple(r) for r in real] == [tuple(row)[1:] for row in mine]
        sent.clear()
        theirs = pair.target.generate(
            input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False,
            max_new_tokens=LIMIT, prompt_lookup_num_tokens=num_tokens,
        )  # fmt: skip
        assert theirs[0, len(ids) :].tolist() == outputs[i]
        # transformers does not cap a draft by what remains of the limit; the loop does.
        capped = np.minimum(sent, LIMIT - mine["position"] - 1)
        assert mine["drafted"].tolist() == capped.tolist()


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
