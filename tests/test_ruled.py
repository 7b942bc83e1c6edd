"""Real decoding under lossy rules: against plain decoding, replay, and a second count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policies import parse_policy
from policies.core import speculate
from policies.lengths.basic import Fixed
from policies.rules.registry import parse_rule
from profiler.checks.differences import output_of
from profiler.checks.spot_check import Arm, rounds_differ, run_arms
from profiler.decoding.single import ModelDecoder
from tests import bundled
from tests.rule_runs import decode, prepared, short_trace
from traces.errors import DraftsimError
from traces.replay.ruled import RuleReplayDecoder
from traces.replay.run import replay

EXACT = (
    "csd:threshold=inf", "csd-ocm:threshold=inf", "spec-verification:beta=1,tau=0",
    "lossy-global:tau=1", "typical:temperature=0", "bild:threshold=0",
)  # fmt: skip
"""Lossy rules with the parameters at which they accept the target's argmax alone."""
LOSSY = (
    "spec-verification", "cm-asd:vocab_size=2048", "csd:threshold=0", "csd-scg:tau=0.3",
    "lossy-global", "typical", "lenience", "ensemble", "fly:vocab_size=2048,window=1",
)  # fmt: skip


@pytest.mark.parametrize("text", EXACT)
def test_exact_settings_decode_greedily_round_for_round(text: str) -> None:
    trace = short_trace()
    arm, measured = decode(text, trace)
    log = measured.logs[arm.label]
    expected = replay(trace, arm.policy)
    np.testing.assert_array_equal(log.rounds, expected.rounds)
    assert rounds_differ(log, expected) == 0
    assert measured.outputs[arm.label] == [output_of(trace, i) for i in range(3)]
    assert log.mismatched is not None
    assert not log.mismatched.any()
    assert [r.tokens for r in log.requests] == [r.tokens for r in trace.requests]
    # The decoder's log-likelihoods against the recorder's, which come from other passes.
    values = trace.columns["target_path_logprob"][trace.on_path].astype(float)
    sums = np.add.reduceat(values, trace.request_starts[:-1])
    np.testing.assert_allclose(measured.log_likelihoods[arm.label], sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        *((text, "fixed:gamma=6") for text in LOSSY),
        ("cm-asd:vocab_size=2048", "cm-asd:vocab_size=2048"),
    ],
)
def test_first_round_of_every_prompt_is_the_replays(text: str, policy: str) -> None:
    """Until the first lossy acceptance the prefix is the recorded one, so nothing may differ."""
    trace = short_trace()
    for i, request in enumerate(trace.requests):
        # A fresh rule per prompt: what CSD learns after the first round is another test's.
        rule, again = prepared(text), prepared(text)
        prompt = torch.tensor(request.prompt_ids)
        real = ModelDecoder(
            *bundled.runners(), prompt, request.max_new_tokens, bundled.pair().eos, rule=rule
        )
        theirs = RuleReplayDecoder(trace, i, again)
        lengths = parse_policy(policy, max_gamma=trace.max_gamma)
        first, expected = (next(speculate(d, lengths.fresh())) for d in (real, theirs))
        assert first[:3] == expected[:3], (text, i)
        assert real.mismatched[:1] == theirs.mismatched[:1]


def test_a_lossy_rule_departs_from_greedy_output() -> None:
    """The tests above would also pass if the rule were never asked."""
    trace = short_trace()
    arm, measured = decode("spec-verification:beta=50,tau=100", trace)
    log = measured.logs[arm.label]
    lossless = replay(trace, arm.policy)
    assert log.rounds["accepted"].mean() > lossless.rounds["accepted"].mean()
    assert measured.outputs[arm.label] != [output_of(trace, i) for i in range(3)]
    assert log.mismatched is not None
    assert log.mismatched.sum() > 0
    assert log.verify == "spec-verification:beta=50,tau=100"


@pytest.mark.invariant(2)
def test_emitted_tokens_are_counted_and_scored_as_one_pass_would() -> None:
    """Outputs, log-likelihoods and mismatches against one plain pass over each output."""
    trace = short_trace()
    arm, measured = decode("lossy-global:tau=0.1", trace)
    log = measured.logs[arm.label]
    assert log.mismatched is not None
    target, _ = bundled.runners()
    for i, request in enumerate(log.requests):
        output = torch.tensor(measured.outputs[arm.label][i])
        path = torch.cat([torch.tensor(request.prompt_ids), output])
        logits = target.forward(path[:-1], 0, keep=len(output)).float()
        own = torch.log_softmax(logits, -1).gather(1, output[:, None]).sum()
        assert measured.log_likelihoods[arm.label][i] == pytest.approx(float(own), abs=1e-2)
        departures = int((logits.argmax(-1) != output).sum())
        assert departures == log.mismatched[log.rounds["request"] == i].sum()
        emitted = log.rounds["emitted"][log.rounds["request"] == i].sum()
        assert emitted + 1 == len(output) == request.tokens
        assert (request.ended == "eos") == (int(output[-1]) in bundled.pair().eos)


def test_a_drafted_eos_that_is_accepted_ends_the_sequence() -> None:
    """With every token an accepted EOS, outputs stop at the first drafted one."""
    trace = short_trace()
    rule = prepared("spec-verification:beta=5000,tau=1e9")
    prompt = torch.tensor(trace.requests[0].prompt_ids)
    target, draft = bundled.runners()
    open_ended = ModelDecoder(target, draft, prompt, 12, rule=rule)
    list(speculate(open_ended, Fixed(4)))
    drafted = open_ended.output[2]
    eos = frozenset({drafted})
    decoder = ModelDecoder(target, draft, prompt, 12, eos, rule=rule)
    rounds = list(speculate(decoder, Fixed(4)))
    assert decoder.remaining == 0
    stop = open_ended.output.index(drafted) + 1
    assert decoder.output == open_ended.output[:stop]
    assert sum(r.emitted for r in rounds) + 1 == len(decoder.output) == len(decoder.log_probs)


def test_what_cannot_be_decoded_is_refused() -> None:
    trace = short_trace()
    pair = bundled.pair()
    lossy = parse_rule("lossy-global")
    with pytest.raises(DraftsimError, match="drop --verify"):
        run_arms(pair, trace, [Arm("fixed", Fixed(2), lossy)], forced=True, repeats=1)
    oracle = Arm("oracle", parse_policy("oracle", max_gamma=24), lossy)
    with pytest.raises(DraftsimError, match="drop this policy"):
        run_arms(pair, trace, [oracle], repeats=1)
    sampled = Arm("fixed", Fixed(2), parse_rule("ensemble:mode=sample"))
    with pytest.raises(DraftsimError, match="use mode=greedy"):
        run_arms(pair, trace, [sampled], repeats=1)
