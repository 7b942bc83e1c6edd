"""Replay under rules against really decoding a small pair of made-up models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.core import speculate
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import Confidence
from policies.rules.base import ExactMatch, RejectionSampling, VerifyRule
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import describe_rule, parse_rule
from tests.made_up import (
    EOS,
    GAMMA,
    LENGTH,
    PROMPTS,
    TRACE,
    MadeUpDecoder,
    V,
    observe,
    record,
    without,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.replay.corrections import rejected_pairs
from traces.replay.rounds import RoundLog
from traces.replay.ruled import RuleReplayDecoder
from traces.replay.run import replay

RULES = [
    "exact",
    "spec-verification:beta=3,tau=1",
    "cm-asd:tau_base=0.3",
    "csd-scg:tau=0.3",
    "csd:threshold=0,tau=0.2",
    "lossy-global:tau=0.4",
    "relaxed:topk=3,delta=0.2",
    "typical",
    "lenience:factor=0.5",
    "ensemble:weight=0.5",
    "bild:threshold=1.5",
    "fly:window=1,entropy_threshold=0.3",
]


def started(text: str) -> VerifyRule:
    rule = parse_rule(text).fresh()
    if isinstance(rule, CSD):
        # Familiar with every other pair, so that memory and gate both matter.
        rule.table.calibrate([(i, j) for i in range(V) for j in range(V) if (i + j) % 2])
    rule.begin_run(V, 0.0)
    return rule


def outputs(trace: Trace) -> list[list[int]]:
    tokens = trace.columns["token"][trace.on_path]
    bounds = itertools.pairwise(trace.request_starts)
    return [tokens[a:b].tolist() for a, b in bounds]


@pytest.mark.parametrize("text", RULES)
def test_a_round_is_exact_wherever_it_begins(text: str) -> None:
    rule, departed = started(text), 0
    for request, (prompt, output) in enumerate(zip(PROMPTS, outputs(TRACE), strict=True)):
        for start in range(LENGTH):
            real = MadeUpDecoder([prompt, *output[:start]], rule.fresh())
            true_round = next(speculate(real, Fixed(GAMMA)))
            decoder = RuleReplayDecoder(TRACE, request, rule.fresh(), start)
            assert next(speculate(decoder, Fixed(GAMMA))) == true_round
            kept = real.context[1 + start :][: true_round.accepted]
            prefixes = [(prompt, *output[:start], *kept[:i]) for i in range(len(kept))]
            wrong = [observe(p)["target_token"] != t for p, t in zip(prefixes, kept, strict=True)]
            assert decoder.mismatched == [sum(wrong)]
            assert decoder.departed == any(wrong)
            departed += any(wrong)
    # A rule that never departs here would make the comparison an empty one.
    assert (departed == 0) == (text == "exact")


@pytest.mark.invariant(1)
@pytest.mark.parametrize("eos", [(), (EOS,)])
@pytest.mark.parametrize("policy", [Fixed(4), Confidence(gamma=GAMMA)])
def test_lossless_replay_is_the_real_run(policy: Any, eos: tuple[int, ...]) -> None:
    trace = record(PROMPTS, eos)
    real = [list(speculate(MadeUpDecoder([p], ExactMatch(), eos), policy.fresh())) for p in PROMPTS]
    log = replay(trace, policy, ExactMatch(), first=0)
    np.testing.assert_array_equal(log.rounds, RoundLog.pack(real))
    assert (log.verify, log.fidelity, log.mismatched, log.rule) == ("exact", "exact", None, None)


@pytest.mark.parametrize(
    "text",
    ["spec-verification:beta=1", "csd:threshold=inf", "csd-scg:tau=1", "typical:temperature=0",
     "bild:threshold=0", "lenience:factor=1", "ensemble:weight=1", "lossy-global:tau=1",
     "relaxed:delta=0"],
)  # fmt: skip
def test_a_lossy_rule_that_forgives_nothing_stays_exact(text: str) -> None:
    exact, log = replay(TRACE, Fixed(5)), replay(TRACE, Fixed(5), parse_rule(text))
    np.testing.assert_array_equal(log.rounds, exact.rounds)
    assert log.fidelity == "exact"
    assert log.verify == text
    assert log.mismatched is not None
    assert not log.mismatched.any()


@pytest.mark.invariant(2)
@pytest.mark.parametrize("text", RULES[1:])
def test_lossy_replay_is_labelled_and_decodes_every_token(text: str) -> None:
    exact, log = replay(TRACE, Fixed(5)), replay(TRACE, Fixed(5), parse_rule(text))
    assert log.fidelity == "approximate"
    assert log.verify == describe_rule(parse_rule(text))
    assert log.mismatched is not None
    assert log.mismatched.shape == log.rounds.shape
    assert (log.mismatched <= np.minimum(log.rounds["accepted"], log.rounds["emitted"])).all()
    assert log.per_request(log.rounds["emitted"]).tolist() == [LENGTH - 1] * len(PROMPTS)
    assert len(log) < len(exact)
    assert 0 < log.mismatched.sum() < log.rounds["emitted"].sum() / 2


class Trust(VerifyRule):
    """Accepts everything."""

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return len(draft)


@pytest.mark.invariant(2)
def test_tokens_accepted_past_the_recorded_end_are_not_emitted() -> None:
    trace = record(PROMPTS, (EOS,))
    log = replay(trace, Fixed(5), Trust(), first=0)
    assert log.per_request(log.rounds["emitted"]).tolist() == [r.tokens for r in trace.requests]
    assert log.mismatched is not None
    assert (log.rounds["accepted"] > log.rounds["emitted"]).any()
    assert (log.mismatched <= log.rounds["emitted"]).all()


class Distrust(VerifyRule):
    """Accepts nothing."""

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return 0


def test_refusing_a_match_leaves_a_sampled_path_but_not_a_greedy_one() -> None:
    # A greedy target emits the refused token itself; a sampled correction need not be it.
    log = replay(TRACE, Fixed(2), Distrust())
    assert (log.verify, log.fidelity) == ("Distrust", "exact")
    assert (log.rounds["emitted"] == 1).all()
    sampled = without(TRACE, sampling={"temperature": 1.0})
    assert replay(sampled, Fixed(2), Distrust()).fidelity == "approximate"
    # A rule that calls itself lossy and yet takes the leading matches stays on the path.
    log = replay(sampled, Fixed(2), LeadingMatches())
    assert log.fidelity == "exact in distribution"
    assert (log.rounds["accepted"] > 0).any()


class LeadingMatches(VerifyRule):
    """Accepts what exact matching would."""

    needs = ("match",)

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return [*(score.match for score in scores), False].index(False)


def test_only_the_verdicts_that_decided_need_to_be_known() -> None:
    """The verdict after the refused token may be unknown; the refused token's own may not."""
    starts = TRACE.request_starts
    runs = TRACE.run_lengths[starts[0] : starts[1]]
    at = int(np.flatnonzero(runs[:-3] >= 2)[0])
    match = TRACE.columns["match"].copy()
    match[TRACE.on_path[at + 1]] = -1
    columns = {**TRACE.columns, "match": match}
    trace = Trace(columns, TRACE.requests, TRACE.max_gamma, TRACE.meta)
    decoder = RuleReplayDecoder(trace, 0, Distrust(), at)
    first = next(speculate(decoder, Fixed(2)))
    assert (first.drafted, first.accepted) == (2, 0)
    for rule in (LeadingMatches(), Distrust()):
        decoder = RuleReplayDecoder(trace, 0, rule, at + 1)
        with pytest.raises(SignalError, match=f"not observed at position {at + 1}"):
            next(speculate(decoder, Fixed(1)))


def test_what_a_trace_cannot_tell_is_named() -> None:
    for rule, missing in (
        ("spec-verification", ["target_draft_rank", "target_top1"]),
        ("typical", ["target_entropy"]),
        ("csd", ["target_token"]),
    ):
        with pytest.raises(SignalError, match=f"lacks the column.*{missing[0]}"):
            replay(without(TRACE, *missing), Fixed(2), parse_rule(rule))
    bare = without(TRACE, "draft_entropy")
    with pytest.raises(SignalError, match=r"reads entropy, .* choose a lossless rule"):
        replay(bare, Fixed(2), parse_rule("cm-asd"))
    assert len(replay(bare, Fixed(2), parse_rule("cm-asd:weights=[0,1,0]"))) > 0
    with pytest.raises(DraftsimError, match=r"cm-asd: .*give it vocab_size"):
        replay(without(TRACE, target=None), Fixed(2), parse_rule("cm-asd"))
    only_scores = without(TRACE, *(c for c in TRACE.columns if c.startswith("draft_")))
    with pytest.raises(SignalError, match="no draft tokens off the path"):
        replay(only_scores, Fixed(2), parse_rule("typical"))
    with pytest.raises(SignalError, match="leaves the recorded path"):
        rejected_pairs(TRACE, replay(TRACE, Fixed(2), parse_rule("typical")))
    with pytest.raises(SignalError, match=r"lacks the column.*draft_token"):
        rejected_pairs(without(TRACE, "draft_token"), replay(TRACE, Fixed(2)))


def test_rules_that_do_not_fit_the_temperature_are_refused() -> None:
    sampled = without(TRACE, sampling={"temperature": 0.7})
    with pytest.raises(DraftsimError, match=r"sampled at temperature 0\.7: use RejectionSampling"):
        replay(sampled, Fixed(2), ExactMatch())
    with pytest.raises(DraftsimError, match=r"ensemble: .*use mode=sample"):
        replay(sampled, Fixed(2), parse_rule("ensemble"))
    log = replay(sampled, Fixed(2), RejectionSampling())
    assert (log.verify, log.fidelity) == ("rejection-sampling", "exact in distribution")


def test_an_unobserved_verdict_is_not_guessed() -> None:
    match = TRACE.columns["match"].copy()
    match[TRACE.on_path[5]] = -1
    columns = {**TRACE.columns, "match": match}
    # A tail follows only a recorded mismatch.
    keep = ~((columns["request"] == 0) & (columns["position"] == 5) & (columns["offset"] > 0))
    trace = Trace({k: v[keep] for k, v in columns.items()}, TRACE.requests, GAMMA, TRACE.meta)
    with pytest.raises(SignalError, match=r"not observed at position 5.*impute"):
        replay(trace, Fixed(1), parse_rule("bild:threshold=9"), first=5)


def test_memory_is_shared_in_request_order_and_the_prototype_kept() -> None:
    rule = CSD(threshold=1, tau=0.05)
    log, again = (replay(TRACE, Fixed(5), rule) for _ in range(2))
    np.testing.assert_array_equal(log.rounds, again.rounds)
    assert len(rule.table) == 0
    assert isinstance(log.rule, CSD)
    sizes = log.rule.table.sizes
    assert len(sizes) == len(PROMPTS)
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(log.rule.table) > sizes[0] > 0
    alone = replay(TRACE.select([7]), Fixed(5), rule)
    last = log.rounds[log.rounds["request"] == 7]
    assert len(last) < len(alone), "the last request profits from the seven before it"


def test_bounded_memory_stays_bounded() -> None:
    log = replay(TRACE, Fixed(5), CSD(threshold=1, capacity=4))
    assert isinstance(log.rule, CSD)
    assert len(log.rule.table) == 4
    assert log.rule.table.evictions > 0


def test_a_calibrated_memory_replays_alike_once_read_again(tmp_path: Path) -> None:
    pairs = rejected_pairs(TRACE, replay(TRACE, Fixed(5)))
    memory = OnlineCorrectionMemory().calibrate(pairs)
    path = tmp_path / "ocm.npz"
    path.write_bytes(memory.content())
    kept = replay(TRACE, Fixed(5), CSD(threshold=1, memory=memory))
    loaded = replay(TRACE, Fixed(5), CSD(threshold=1, memory=path))
    assert kept.rounds.tobytes() == loaded.rounds.tobytes()
    assert len(kept) < len(replay(TRACE, Fixed(5), CSD(threshold=1)))


@pytest.mark.parametrize("gamma", [1, 5])
def test_rejected_pairs_are_those_of_a_real_run(gamma: int) -> None:
    real = []
    for prompt in PROMPTS:
        decoder = MadeUpDecoder([prompt], ExactMatch())
        list(speculate(decoder, Fixed(gamma)))
        real += decoder.rejected
    assert rejected_pairs(TRACE, replay(TRACE, Fixed(gamma), first=0)) == real
