"""Many settings replayed at once: the rounds of the loop, round by round."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CMASD, DraftPolicy, Fixed, HFHeuristic, parse_policy
from policies.estimators import LogisticAcceptance
from policies.lengths.basic import Oracle
from policies.lengths.draft_and_verify import DraftAndVerify
from policies.lengths.entropy import AdaEDL
from policies.lengths.gammatune import GammaTune
from policies.lengths.rate_optimal import RateOptimal
from policies.lengths.specdec_pp import Disco, SpecDecPP
from policies.registry import POLICIES
from policies.rules.registry import RULES, parse_rule
from policies.vectorised import plan_of
from simulator.whatif.tilt import Tilter, iid_like
from tests.made_up import TRACE
from tests.traces_of_kinds import KINDS, Kind, random_trace
from tests.vectorised import MANY
from traces.acceptance.synthetic import Bursty, synthetic_trace
from traces.acceptance.trace import UNKNOWN, Trace
from traces.errors import DraftsimError, SignalError, TailError
from traces.replay import vectorised
from traces.replay.rounds import RoundLog
from traces.replay.run import replay
from traces.replay.vectorised import replay_many

LOOPED = (
    "confidence:roc_update=in_call", "hf-heuristic:roc_update=next_call", "cm-asd:window=lagged",
    "cm-asd:window=literal", "disable-by-batch-size", "goodput", "turbospec",
    "confidence-freeze", "adaptive-verification", "batch-table-hysteresis",
    "confidence-scheduled", "sglang-throughput", "graph-aware", "tensorrt-llm",
    "rate-optimal:recalibrate=0.1",
)  # fmt: skip
"""Texts that no plan is told of."""
STEEP = LogisticAcceptance(("prob",), (2.0, -1.0), 2.0)
"""From about 0.98 at the first token to 0.5 at the fourth."""
FIELDS = ("policy", "source", "drafter", "verify", "fidelity", "reads", "first")


def alike(one: RoundLog, other: RoundLog) -> None:
    np.testing.assert_array_equal(one.rounds, other.rounds)
    for name in FIELDS:
        assert getattr(one, name) == getattr(other, name), name


def one(trace: Trace, policy: DraftPolicy) -> RoundLog:
    [log] = replay_many(trace, {"it": policy})
    return log


def parsed(name: str, trace: Trace) -> DraftPolicy:
    return parse_policy(name, max_gamma=trace.max_gamma or 24)


def recorded(seed: int = 0) -> Trace:
    return synthetic_trace(
        Bursty(0.95, 0.3), requests=6, tokens=40, eos_fraction=0.5, seed=seed, concentration=5.0
    )


@pytest.mark.invariant(9)
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS), seed=st.integers(0, 10_000), max_gamma=st.integers(1, 12),
    given_policies=MANY, first=st.sampled_from([0, 1, 1, 3]),
)  # fmt: skip
def test_any_settings_over_any_recording(
    kind: Kind, seed: int, max_gamma: int, given_policies: list[tuple[DraftPolicy, int]],
    first: int,
) -> None:  # fmt: skip
    trace = random_trace(kind, seed, max_gamma, first)
    batches: dict[int, dict[str, DraftPolicy]] = {}
    for i, (policy, batch) in enumerate(given_policies):
        assert plan_of(policy) is not None or isinstance(policy, CMASD)
        batches.setdefault(batch, {})[str(i)] = policy
    for batch, policies in batches.items():
        expected, refused = {}, {}
        for name, policy in policies.items():
            try:
                expected[name] = replay(trace, policy, name=name, batch=batch)
            except DraftsimError as error:
                refused[name] = str(error)
        with patch.object(vectorised, "FEWEST", 0):
            logs = replay_many(trace, policies, batch=batch, leave_out=lambda *_: True)
            found = {log.policy: log for log in logs}
            for name, said in refused.items():
                with pytest.raises(DraftsimError) as caught:
                    list(replay_many(trace, {name: policies[name]}, batch=batch))
                assert str(caught.value) == said
        assert list(found) == list(expected)
        for name, log in found.items():
            alike(log, expected[name])


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", [*POLICIES, *LOOPED])
def test_built_in_policies(name: str) -> None:
    for trace in (recorded(), Tilter(recorded()).to(0.8), iid_like(recorded(), 0.3)):
        policy = parsed(name, trace)
        alike(one(trace, policy), replay(trace, policy, name="it"))


@pytest.mark.parametrize(
    "policy",
    [
        RateOptimal(estimator=STEEP), RateOptimal(following=STEEP), SpecDecPP(estimator=STEEP),
        SpecDecPP(estimator=STEEP, lag=False), Disco(estimator=STEEP),
    ],
)  # fmt: skip
def test_estimates_may_fall_along_the_draft(
    policy: DraftPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectorised, "FEWEST", 0)
    alike(one(recorded(), policy), replay(recorded(), policy, name="it"))


def test_what_has_a_plan_asks_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above compare the loop with itself."""

    def loop(*_: Any, **__: Any) -> RoundLog:
        raise AssertionError("asked before every token")

    monkeypatch.setattr(vectorised, "replay", loop)
    monkeypatch.setattr(vectorised, "FEWEST", 0)
    trace, looped = recorded(), {text.partition(":")[0] for text in LOOPED[4:-1]}
    for name in POLICIES:
        if name not in looped:
            one(trace, parsed(name, trace))
    for name in LOOPED:
        with pytest.raises(AssertionError, match="asked"):
            one(trace, parsed(name, trace))

    class Even(Fixed):
        def keep_drafting(self, draft: Any) -> bool:
            return super().keep_drafting(draft) or len(draft) % 2 == 1

    class Unsure(DraftAndVerify):
        pass

    class Own:
        reads = ("prob",)

        def __call__(self, token: Any, offset: int) -> float:
            return float(token.prob) ** 2

    every: Mapping[str, DraftPolicy] = {
        "even": Even(3), "unsure": Unsure(), "rule": RateOptimal(estimator=Own()),
        "after": RateOptimal(following=Own()), "disco": Disco(estimator=Own()),
    }  # fmt: skip
    for policy in every.values():
        with pytest.raises(AssertionError, match="asked"):
            one(trace, policy)


@pytest.mark.invariant(11)
def test_a_prototype_is_left_as_it_was() -> None:
    from policies.core import Round

    trace = recorded()
    for policy in (HFHeuristic(persist="persistent"), GammaTune(), AdaEDL(), CMASD(), RateOptimal(),
                   parse_policy("sglang-adaptive")):  # fmt: skip
        before = pickle.dumps(policy)
        alike(one(trace, policy), one(trace, policy))
        assert pickle.dumps(policy) == before
    used = HFHeuristic(persist="persistent")
    used.observe(Round(0, 9, 9, 10, 9, 1), ())
    alike(one(trace, used), replay(trace, used, name="it"))


def test_a_learner_goes_on_from_request_to_request() -> None:
    trace = recorded()
    policies = {
        str(g): HFHeuristic(g, persist="persistent", gamma_max=24)
        for g in range(1, 2 * vectorised.FEWEST)
    }
    for log, policy in zip(replay_many(trace, policies), policies.values(), strict=True):
        alike(log, replay(trace, policy, name=log.policy))
    alone = [replay(trace.select([i]), policies["1"]).rounds.tolist() for i in range(6)]
    together = replay(trace, policies["1"]).rounds.tolist()
    assert [r[1:] for r in together] != [r[1:] for rounds in alone for r in rounds]


def test_what_the_recording_does_not_hold_is_said_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = synthetic_trace(0.5, requests=3, tokens=40, max_gamma=4, concentration=5.0)
    with pytest.raises(TailError, match="past the recorded tail"):
        one(short, Fixed(8))
    bare = synthetic_trace(0.5, requests=3, tokens=40)
    with pytest.raises(SignalError, match="does not hold"):
        one(bare, CMASD())
    match = np.where(np.arange(len(bare)) % 5, bare.columns["match"], UNKNOWN).astype(np.int8)
    unknown = Trace({**bare.columns, "match": match}, bare.requests, None, bare.meta)
    # By the loop, which takes over where there are few runs, and vectorised.
    for fewest in (vectorised.FEWEST, 0):
        monkeypatch.setattr(vectorised, "FEWEST", fewest)
        for policy in (Fixed(4), Oracle(), Oracle("run+1")):
            with pytest.raises(SignalError, match="not observed"):
                one(unknown, policy)


def test_settings_are_yielded_in_order_and_a_block_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = recorded()
    names = [f"gammatune:gamma={g}" for g in range(1, 9)] + ["goodput"] + ["svip"] * 1 + ["fixed"]
    policies = {name: parsed(name, trace) for name in names}
    expected = [replay(trace, p, name=n) for n, p in policies.items()]
    for held, cells in ((1, 1), (700, 300), (1 << 22, 1 << 18)):
        monkeypatch.setattr(vectorised, "HELD", held)
        monkeypatch.setattr(vectorised, "CELLS", cells)
        for log, want in zip(replay_many(trace, policies), expected, strict=True):
            alike(log, want)


@pytest.mark.invariant(9)
@pytest.mark.parametrize("text", RULES)
def test_rules_judge_the_same_rounds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TRACE
    looped: list[str] = []
    loop = vectorised.replay
    monkeypatch.setattr(
        vectorised, "replay", lambda *a, name, **k: looped.append(name) or loop(*a, name=name, **k)
    )
    names = ["fixed:gamma=4", "cm-asd", "oracle", "svip", "gammatune", "bild"]
    policies = {name: parsed(name, trace) for name in names}
    rule = parse_rule(text)
    for first in (0, 1):
        logs = replay_many(trace, policies, rule=rule, first=first)
        for log, (name, policy) in zip(logs, policies.items(), strict=True):
            want = replay(trace, policy, rule, name=name, first=first)
            alike(log, want)
            np.testing.assert_array_equal(
                -1 if log.mismatched is None else log.mismatched,
                -1 if want.mismatched is None else want.mismatched,
            )
            assert pickle.dumps(log.rule) == pickle.dumps(want.rule)
    assert set(looped) == (set() if rule.lossless else {"gammatune", "bild"})


def test_requests_that_end_with_prefill_have_no_rounds() -> None:
    trace = synthetic_trace(0.5, requests=2, tokens=1)
    for name in ("fixed", "gammatune", "sglang-adaptive"):
        assert len(one(trace, parsed(name, trace))) == 0


def test_a_policy_that_takes_its_vocabulary_from_the_run_does_so_in_a_batch() -> None:
    trace = recorded()
    [log] = replay_many(trace, {"it": CMASD()}, batch=4)
    alike(log, replay(trace, CMASD(), name="it", batch=4))
    np.testing.assert_array_equal(log.rounds, one(trace, CMASD()).rounds)
