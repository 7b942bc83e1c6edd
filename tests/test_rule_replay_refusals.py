"""Refusals of a replay under a rule: a trace that cannot tell, a temperature that does not fit."""

from __future__ import annotations

import pytest

from policies.lengths.basic import Fixed
from policies.rules.base import ExactMatch, RejectionSampling
from policies.rules.registry import parse_rule
from tests.made_up import GAMMA, TRACE, without
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError
from traces.replay.corrections import rejected_pairs
from traces.replay.run import replay


def test_what_a_trace_cannot_tell_is_named() -> None:
    for rule, missing in (
        ("spec-verification", ["target_draft_rank", "target_top1"]),
        ("typical", ["target_entropy"]),
        ("csd", ["target_token"]),
    ):
        with pytest.raises(SignalError, match=f"lacks the column.*{missing[0]}"):
            replay(without(TRACE, *missing), Fixed(2), parse_rule(rule))
    bare = without(TRACE, "draft_entropy")
    with pytest.raises(SignalError, match="reads the draft signals entropy"):
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
