"""Other sources without the loop: its rounds and calls, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.registry import parse_policy
from policies.rules.base import VerifyRule
from policies.rules.registry import parse_rule
from tests.outputs import trace_of
from tests.random_sources import EOS, VOCABULARY, random_outputs, random_recordings
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, TailError
from traces.replay import run as run_loop
from traces.replay import vectorised
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.sources import replay as by_source
from traces.sources.as_draft import drafted_trace
from traces.sources.base import Source
from traces.sources.early_exit import EarlyExit, StandInExit
from traces.sources.found import find_recordings
from traces.sources.lookups import occurrences
from traces.sources.lookups.sources import REST
from traces.sources.recording import Recordings
from traces.sources.registry import SYSTEMS, parse_source
from traces.sources.replay import replay_source
from traces.store.recordings import find_trace

FIELDS = ("policy", "source", "drafter", "verify", "fidelity", "reads", "first")
STOPS = (
    "confidence:confidence_threshold=0.4", "svip", "oracle", "oracle:convention=run+1", "disco",
    "llama-cpp:gamma_min=2", "bild:threshold=0.5", "rate-optimal", "specdec-pp", "autoregressive",
)  # fmt: skip
LEARN = ("draft-and-verify", "gammatune", "hf-heuristic", "adaedl:keep_trigger_token=false", "ucb")
RECORDED = (
    "early-exit:tau=0.5,omega=0.3,depth=0.5", "early-exit:tau=0.3,omega=0,depth=1",
    "early-exit:tau=0,omega=0,depth=1,bonus=true", "early-exit:tau=0.9,omega=0,layers=[4]",
    "kangaroo", "medusa", "medusa:k=2", "hydra", "hydra:k=2", "space", "space:k=1", "layer-skip",
    "eagle:model=eagle",
    "eagle2:model=eagle,budget=7", "eagle2:model=eagle,depth=2,budget=9", "eagle:model=mtp",
    "medusa-tree:tops=[3,2]", "parallel:model=one", "parallel:k=2",
    "parallel:acceptance=[0.8,0.5,0.5],concentration=2",
)  # fmt: skip
LOOKUPS = (
    "pld", "pld:num_tokens=3,max_ngram=3", "ngram:k=4,min_n=1,max_n=3", "suffix",
    "ngram-simple:size_n=2,size_m=3",
    "suffix:depth=4,factor=2.0,min_prob=0.3", "suffix:cached=false", "rest",
    "rest:num_tokens=3,max_suffix=3,min_suffix=2", "lookahead", "lookahead:ngram=3,guesses=1",
)  # fmt: skip


def one_by_one(
    trace: Trace, policies: Mapping[str, DraftPolicy], rule: VerifyRule | None, first: int
) -> Iterator[RoundLog]:
    """Replay each policy by the loop."""
    for name, policy in policies.items():
        yield replay(trace, policy, rule, name=name, first=first)


def looped(*given: Any, **named: Any) -> RoundLog:
    with (
        patch.object(by_source, "plan_of", lambda *_: None),
        patch.object(by_source, "replay_many", one_by_one),
    ):
        return replay_source(*given, **named)


def walked(*given: Any, **named: Any) -> RoundLog:
    """Return the log without the loop, however few the requests."""
    with patch.object(vectorised, "FEWEST", 0):
        return replay_source(*given, **named)


def outcome(run: Callable[..., RoundLog], *given: Any, **named: Any) -> RoundLog | DraftsimError:
    """The log, or how asking for it failed."""
    try:
        return run(*given, **named)
    except DraftsimError as error:
        return error


def assert_alike(log: RoundLog, want: RoundLog) -> None:
    np.testing.assert_array_equal(log.rounds, want.rounds)
    for name in FIELDS:
        assert getattr(log, name) == getattr(want, name), name
    assert log.requests == want.requests
    assert (log.recorded_calls is None) == (want.recorded_calls is None)
    if want.recorded_calls is not None:
        np.testing.assert_array_equal(log.recorded_calls, want.recorded_calls)


def check(
    trace: Trace, source: Source, policy: DraftPolicy, recordings: Recordings, first: int = 1,
    requests: Sequence[int] | None = None,
) -> bool:  # fmt: skip
    """Return True if there were rounds to compare, and no mismatch in refusals."""
    given = trace, source, policy
    named: dict[str, Any] = {"recordings": recordings, "first": first, "requests": requests}
    want, log = (outcome(run, *given, **named) for run in (looped, walked))
    if isinstance(want, RoundLog) and isinstance(log, RoundLog):
        assert_alike(log, want)
        return True
    assert (type(log), str(log)) == (type(want), str(want))
    return False


POLICIES = st.one_of(
    st.integers(0, 6).map(Fixed),
    st.sampled_from([*STOPS, *LEARN]).map(lambda text: parse_policy(text, max_gamma=4)),
)
SUBSETS = st.sampled_from([None, None, [0, 2], [1, 2, 3], [3, 1], []])


@pytest.mark.invariant(9)
@pytest.mark.parametrize("text", RECORDED)
@example(seed=4, gamma_max=1, policy=Fixed(0), first=3, requests=[0, 2])  # no round at all
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), gamma_max=st.integers(1, 7), policy=POLICIES,
    first=st.sampled_from([1, 1, 3]), requests=SUBSETS,
)  # fmt: skip
def test_recorded_sources(
    text: str, seed: int, gamma_max: int, policy: DraftPolicy, first: int,
    requests: list[int] | None,
) -> None:  # fmt: skip
    trace = random_outputs(seed)
    exits = text.startswith(("early-exit", "kangaroo"))  # they take longest to make up
    recordings = random_recordings(trace, seed, gamma_max, exits=exits)
    check(trace, parse_source(text), policy, recordings, first, requests)


@pytest.mark.invariant(9)
@pytest.mark.parametrize("text", LOOKUPS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000), policy=POLICIES, first=st.sampled_from([0, 1, 3]),
    requests=SUBSETS,
)  # fmt: skip
def test_lookups(
    text: str, seed: int, policy: DraftPolicy, first: int, requests: list[int] | None
) -> None:
    check(random_outputs(seed), parse_source(text), policy, {}, first, requests)


@pytest.mark.invariant(9)
def test_retrieval_from_a_file(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    for seed in range(12):
        rng = np.random.default_rng(seed)
        served = (rng.integers(0, VOCABULARY, rng.integers(0, 20)).tolist() for _ in range(seed))
        corpus.write_text("".join(f"{ids}\n" for ids in served), encoding="utf-8")
        for held in (1, 1 << 20):
            with patch.object(occurrences, "HELD", held):
                source = REST(str(corpus), num_tokens=4, max_suffix=3, min_suffix=1 + seed % 3)
                check(random_outputs(seed), source, Fixed(3), {})


@pytest.mark.invariant(9)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), tau=st.sampled_from([0.0, 0.3, 0.6]), gamma=st.integers(0, 12),
    requests=SUBSETS,
)  # fmt: skip
def test_settings_that_no_recording_followed(
    seed: int, tau: float, gamma: int, requests: list[int] | None
) -> None:
    trace = random_outputs(seed)
    recordings = random_recordings(trace, seed, 2)
    assert check(trace, StandInExit(tau, 0.0, 1.0), Fixed(gamma), recordings, 1, requests)


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_of_the_bundled_pair(name: str) -> None:
    trace = find_trace("bundled")
    recordings = find_recordings("bundled", trace)
    source = parse_source(SYSTEMS[name].source)
    policy = parse_policy(SYSTEMS[name].policy, max_gamma=trace.max_gamma)
    recorded = check(trace, source, policy, recordings)
    assert recorded == (source.name not in ("eagle", "eagle2"))


@pytest.mark.parametrize("rule", [None, "exact", "csd"])
def test_the_draft_model_is_a_source(rule: str | None) -> None:
    """Its recording is the trace itself, and any rule may verify what it drafts."""
    trace = find_trace("bundled")
    rules = [None if rule is None else parse_rule(rule) for _ in range(2)]
    for requests in (None, [0, 3]):
        part = trace if requests is None else trace.select(requests)
        want = replay(part, Fixed(4), rules[0], name="four")
        log = replay_source(
            trace, parse_source("draft-model"), Fixed(4), rules[1], name="four", requests=requests
        )
        assert_alike(log, want)
        assert (log.mismatched is None) == (want.mismatched is None) == (rule != "csd")


def test_what_goes_without_the_loop_asks_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above compare the loop with itself."""
    trace = random_outputs(1)
    recordings = random_recordings(trace, 1, missing=0.0)

    def asked(*_: Any) -> Any:
        raise AssertionError("asked before every token")

    def run(text: str, policy: DraftPolicy) -> None:
        walked(trace, parse_source(text), policy, recordings=recordings)

    for module in (by_source, run_loop):
        monkeypatch.setattr(module, "speculate", asked)
    for text in (*RECORDED, *(lookup for lookup in LOOKUPS if not lookup.startswith("suffix"))):
        run(text, Fixed(2))
    for text in (*RECORDED, "pld"):
        if text == "pld" or text.startswith("eagle2"):
            with pytest.raises(AssertionError, match="asked"):
                run(text, parse_policy("oracle:gamma_max=2"))
        else:
            run(text, parse_policy("oracle:gamma_max=2"))
    with pytest.raises(AssertionError, match="asked"):
        run("kangaroo", parse_policy("ucb"))


def test_a_draft_that_leaves_the_recording_is_refused_where_it_does() -> None:
    trace = random_outputs(3)
    with pytest.raises(TailError, match="past what was recorded after its wrong exit"):
        replay_source(
            trace, EarlyExit(0.0, 0.0, 1.0), Fixed(9), recordings=random_recordings(trace, 3, 2)
        )


def test_a_draft_is_right_as_long_as_its_own_output_goes_on_so() -> None:
    """The tokens of another request follow its end, and none of them accept anything."""
    for seed in range(20):
        outputs = random_outputs(seed)
        recordings = random_recordings(outputs, seed)
        said = recordings["medusa"]["token"]
        trace = drafted_trace(outputs, parse_source("medusa"), recordings)
        bounds, true = outputs.request_starts.tolist(), outputs.columns["token"].tolist()
        drafts, accepted = [], []
        for begin, end in pairwise(bounds):
            # The first token comes with the prompt: the draft of the second, if any, stands there.
            for row in [min(begin + 1, end - 1), *range(begin + 1, end)]:
                drafts.append(said[row, 0])
                right = (a == b for a, b in zip(said[row], true[row:end], strict=False))
                accepted.append(sum(takewhile(bool, right)))
        assert trace.columns["accepted"][trace.on_path].tolist() == accepted
        assert trace.columns["draft_token"][trace.on_path].tolist() == drafts


@pytest.mark.invariant(9)
@pytest.mark.parametrize("text", ["pld", "ngram:k=4,min_n=1,max_n=3", "suffix", "rest"])
def test_what_a_lookup_finds_behind_an_output_s_end_accepts_nothing(text: str) -> None:
    """Even where the next request's output goes on as it says."""
    prompts = [(7, 8, 9, EOS, 5, 6), (3,), (7, 8, 9, EOS, 5, 6)]
    outputs = [[7, 8, 9, EOS], [5, 6, 7, EOS], [7, 8, 9, EOS]]
    trace = trace_of(outputs, 24, prompts, [EOS])
    for policy in (Fixed(4), Fixed(2)):
        assert check(trace, parse_source(text), policy, {})
