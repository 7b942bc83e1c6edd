"""Rules that judge every row of a recording at once: as one by one, to the last bit."""

from __future__ import annotations

import pickle
from functools import cached_property
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CMASD, Fixed
from policies.registry import parse_policy
from policies.rules.base import TokenRule
from policies.rules.checks import VOCAB, sample_round
from policies.rules.registry import RULES, parse_rule
from policies.rules.threshold import CMASDVerification, GlobalThreshold
from policies.vectorised import own_word
from tests.traces_of_kinds import random_trace
from traces.acceptance.trace import MATCH, UNKNOWN, Trace
from traces.errors import DraftsimError
from traces.replay import vectorised
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.sources.methods import mean_tau

EACH = (
    "spec-verification", "spec-verification:beta=2,tau=1", "cm-asd", "cm-asd:weights=[0,1,0]",
    "cm-asd:weights=[1,0,0],tau_sign=literal,entropy_sign=literal", "cm-asd:weights=[0,0,1]",
    "lossy-global", "lossy-global:tau=0.05", "typical", "typical:epsilon=0.5,delta=1",
    "typical:temperature=0", "bild", "bild:threshold=1", "csd-scg", "csd-scg:tau=0.3",
    "relaxed", "relaxed:topk=3,delta=0.2",
)  # fmt: skip
"""Rules without a memory, as text."""


def begun(text: str) -> TokenRule:
    rule = parse_rule(text)
    assert isinstance(rule, TokenRule)
    rule.begin_run(VOCAB, 0.0)
    return rule


@pytest.mark.parametrize("text", EACH)
def test_many_are_accepted_as_one_is(text: str) -> None:
    rule, rng = begun(text), np.random.default_rng(4)
    pairs = zip(*(sample_round(rng, 4000)), strict=True)
    every = [(SimpleNamespace(**t), SimpleNamespace(**s)) for t, s in pairs]
    tokens, scores = zip(*every, strict=True)

    def arrays(rows: Any, names: tuple[str, ...]) -> SimpleNamespace:
        return SimpleNamespace(**{n: np.array([getattr(row, n) for row in rows]) for n in names})

    found = own_word(rule, "accepts_each", arrays(tokens, rule.reads), arrays(scores, rule.needs))
    want = [rule.accepts(*pair) for pair in every]
    assert found.dtype == bool
    assert found.tolist() == want
    assert 0 < sum(want) < len(want)
    if isinstance(rule, CMASDVerification):
        taus = rule.threshold(arrays(tokens, rule.reads))
        assert taus.tolist() == [rule.threshold(token) for token in tokens]


def scored(seed: int, temperature: float) -> Trace:
    """A recording with target scores, on a coarse grid, so that thresholds are often met."""
    made, rng = random_trace("tails", seed, 8), np.random.default_rng(seed)
    rows = len(made)
    top1 = rng.integers(0, 9, rows) / 2
    match = made.columns["match"]
    match = np.where(match == UNKNOWN, rng.integers(0, 2, rows), match).astype(np.int8)
    gap = np.where(match == MATCH, 0, rng.integers(0, 8, rows) / 2)
    wanted: dict[str, Any] = {
        "target_token": rng.integers(0, 9, rows), "target_draft_rank": (2 * gap).astype(int),
        "target_top1": top1, "target_top2": top1 - 0.5, "target_draft_logit": top1 - gap,
        "target_logsumexp": top1 + rng.integers(0, 3, rows) / 2,
        "target_entropy": rng.integers(0, 5, rows) / 2,
    }  # fmt: skip
    columns = {**made.columns, "match": match}
    for name, values in wanted.items():
        columns[name] = values.astype(np.float32 if values.dtype.kind == "f" else np.int32)
    meta = {**made.meta, "sampling": {"temperature": temperature}, "vocab_size": 50}
    return Trace(columns, made.requests, made.max_gamma, meta)


def state(rule: Any) -> bytes:
    """A rule after a run, but for what it computes once from its own parameters, at first use."""
    # A run whose rounds judge no token never asks for it; judged all at once, every row does.
    kept = {
        k: v
        for k, v in vars(rule).items()
        if not isinstance(getattr(type(rule), k, 0), cached_property)
    }
    return pickle.dumps((type(rule), kept))


@pytest.mark.invariant(9)
@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(EACH), seed=st.integers(0, 10_000), first=st.sampled_from([0, 1, 3]),
    temperature=st.sampled_from([0.0, 1.0]), gamma=st.integers(1, 8),
)  # fmt: skip
def test_rounds_are_those_of_the_loop(
    text: str, seed: int, first: int, temperature: float, gamma: int
) -> None:
    trace, rule = scored(seed, temperature), parse_rule(text)
    policies = {
        "fixed": Fixed(gamma),
        "cm-asd": CMASD(gamma_max=8),
        "svip": parse_policy("svip:gamma_max=8"),
    }
    with patch.object(vectorised, "RuleReplayDecoder", side_effect=AssertionError("one by one")):
        logs = list(replay_many(trace, policies, rule=rule, first=first))
    for log, (name, policy) in zip(logs, policies.items(), strict=True):
        want = replay(trace, policy, rule, name=name, first=first)
        np.testing.assert_array_equal(log.rounds, want.rounds)
        assert log.mismatched is not None
        np.testing.assert_array_equal(log.mismatched, want.mismatched)
        assert (log.fidelity, log.verify) == (want.fidelity, want.verify)
        assert state(log.rule) == state(want.rule)


def test_what_is_not_known_or_not_its_own_is_judged_one_by_one() -> None:
    trace, policies = scored(3, 0.0), {"it": Fixed(4)}

    class Strict(GlobalThreshold):
        def accepts(self, token: Any, score: Any) -> bool:
            return super().accepts(token, score) and score.top1 > 1

    [log] = replay_many(trace, policies, rule=Strict())
    np.testing.assert_array_equal(log.rounds, replay(trace, Fixed(4), Strict()).rounds)
    with patch.object(vectorised, "_at_once", side_effect=AssertionError("at once")):
        for text in RULES:
            if text not in {each.partition(":")[0] for each in EACH}:
                list(replay_many(trace, policies, rule=parse_rule(text)))
    match = trace.columns["match"]
    hidden = np.where(trace.columns["offset"] > 0, UNKNOWN, match).astype(np.int8)
    unknown = Trace({**trace.columns, "match": hidden}, trace.requests, 8, trace.meta)
    with pytest.raises(DraftsimError, match="not observed"):
        list(replay_many(unknown, policies, rule=GlobalThreshold()))


def test_the_mean_threshold_is_that_of_the_tokens_judged() -> None:
    total: list[float] = []

    class Noted(CMASDVerification):
        def accepts(self, token: Any, score: Any) -> Any:
            if score.draft_rank < self.top:
                total.append(self.threshold(token))
            return super().accepts(token, score)

    for seed, policy in product(range(4), (Fixed(5), CMASD(gamma_max=8))):
        trace = scored(seed, 0.0)
        total.clear()
        replay(trace, policy, Noted())
        assert mean_tau(trace, policy) == pytest.approx(np.mean(total), rel=1e-12)
