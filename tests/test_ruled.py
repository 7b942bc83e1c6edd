"""Real decoding under lossy rules: against plain decoding, replay, and a second count."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policies import parse_policy
from policies.core import SIGNALS, speculate
from policies.lengths.basic import Fixed
from policies.rules.base import SCORES, VerifyRule
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import parse_rule
from profiler.checks.differences import output_of, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, real_run, run_requests
from profiler.decoding.single import ModelDecoder, judge
from profiler.models.sampling import scored
from tests import bundled
from tests.rule_runs import decode, prepared, short_trace
from traces.acceptance.sampling import Sampling
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.corrections import calibrated, rejected_pairs, split_requests
from traces.replay.ruled import RuleReplayDecoder, score_lists
from traces.replay.run import replay
from traces.store.outputs import find_run, find_runs, read_run, write_run

EXACT = (
    "csd:threshold=inf", "csd-ocm:threshold=inf", "spec-verification:beta=1,tau=0",
    "lossy-global:tau=1", "typical:temperature=0", "bild:threshold=0",
    "relaxed:topk=1",
)  # fmt: skip
"""Lossy rules with the parameters at which they accept the target's argmax alone."""
LOSSY = (
    "spec-verification", "cm-asd:vocab_size=2048", "csd:threshold=0", "csd-scg:tau=0.3",
    "lossy-global", "relaxed", "typical", "lenience", "ensemble", "fly:vocab_size=2048,window=1",
)  # fmt: skip


@pytest.mark.parametrize("text", EXACT)
def test_exact_settings_decode_greedily_round_for_round(text: str) -> None:
    trace = short_trace()
    planned, measured = decode(text, trace)
    log = measured.logs[planned.label]
    expected = replay(trace, planned.policy)
    np.testing.assert_array_equal(log.rounds, expected.rounds)
    assert rounds_differ(log, expected) == 0
    assert measured.outputs[planned.label] == [output_of(trace, i) for i in range(3)]
    assert log.mismatched is not None
    assert not log.mismatched.any()
    assert [r.tokens for r in log.requests] == [r.tokens for r in trace.requests]
    # The decoder's log-likelihoods against the recorder's, which come from other passes.
    values = trace.columns["target_path_logprob"][trace.on_path].astype(float)
    sums = np.add.reduceat(values, trace.request_starts[:-1])
    np.testing.assert_allclose(measured.log_likelihoods[planned.label], sums, rtol=1e-4, atol=1e-3)


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
    planned, measured = decode("spec-verification:beta=50,tau=100", trace)
    log = measured.logs[planned.label]
    lossless = replay(trace, planned.policy)
    assert log.rounds["accepted"].mean() > lossless.rounds["accepted"].mean()
    assert measured.outputs[planned.label] != [output_of(trace, i) for i in range(3)]
    assert log.mismatched is not None
    assert log.mismatched.sum() > 0
    assert log.verify == "spec-verification:beta=50,tau=100"


@pytest.mark.invariant(2)
def test_emitted_tokens_are_counted_and_scored_as_one_pass_would() -> None:
    """Outputs, log-likelihoods and mismatches against one plain pass over each output."""
    trace = short_trace()
    planned, measured = decode("lossy-global:tau=0.1", trace)
    log = measured.logs[planned.label]
    assert log.mismatched is not None
    target, _ = bundled.runners()
    for i, request in enumerate(log.requests):
        output = torch.tensor(measured.outputs[planned.label][i])
        path = torch.cat([torch.tensor(request.prompt_ids), output])
        logits = target.forward(path[:-1], 0, keep=len(output)).float()
        own = torch.log_softmax(logits, -1).gather(1, output[:, None]).sum()
        assert measured.log_likelihoods[planned.label][i] == pytest.approx(float(own), abs=1e-2)
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
        run_requests(pair, trace, [PlannedPolicy("fixed", Fixed(2), lossy)], forced=True, repeats=1)
    oracle = PlannedPolicy("oracle", parse_policy("oracle", max_gamma=24), lossy)
    with pytest.raises(DraftsimError, match="drop this policy"):
        run_requests(pair, trace, [oracle], repeats=1)
    sampled = PlannedPolicy("fixed", Fixed(2), parse_rule("ensemble:mode=sample"))
    with pytest.raises(DraftsimError, match="use mode=greedy"):
        run_requests(pair, trace, [sampled], repeats=1)


def test_scores_are_the_recorded_ones() -> None:
    """A rule's scores in a real first round equal the columns of the recording."""
    trace, seen = short_trace(), []

    class Spy(VerifyRule):
        reads, needs = SIGNALS, SCORES

        def accept(self, draft: list, scores: list) -> int:  # type: ignore[type-arg, override]
            seen.append((list(draft), list(scores)))
            return 0

    prompt = torch.tensor(trace.requests[1].prompt_ids)
    decoder = ModelDecoder(*bundled.runners(), prompt, 16, rule=Spy())
    next(speculate(decoder, Fixed(4)))
    draft, scores = seen[-1]
    start = int(trace.request_starts[1]) + 1
    row = int(trace.on_path[start])
    recorded = score_lists(trace).scores(SCORES).rows(row, 4)
    for i, (token, mine, theirs) in enumerate(zip(draft, scores, recorded, strict=True)):
        assert (mine.match, mine.token, mine.draft_rank) == (
            theirs.match, theirs.token, theirs.draft_rank
        )  # fmt: skip
        for name in ("top1", "top2", "logsumexp", "entropy", "draft_logit"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-3)
        for name in SIGNALS:
            recorded_value = float(trace.signal(name)[row + i])
            assert getattr(token, name) == pytest.approx(recorded_value, abs=1e-3)


def test_target_numbers_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(2.0)]])
    seen = scored(logits, torch.tensor([2]))
    pick, top1, top2, lse, entropy, logit, rank = (column.item() for column in seen)
    assert (pick, rank) == (1, 1)
    shares = np.array([1, 3, 2]) / 6
    wanted = [math.log(3), math.log(2), math.log(6), -(shares * np.log(shares)).sum(), math.log(2)]
    assert [top1, top2, lse, entropy, logit] == pytest.approx(wanted, abs=1e-6)


def test_judge_without_a_draft_gives_the_targets_token() -> None:
    none = torch.empty(0, dtype=torch.long)
    seen = judge(parse_rule("lossy-global"), [], none, torch.tensor([[0.0, 2.0]]), 0.0)
    assert (seen.accepted, seen.picks, seen.mismatched) == (0, [1], [])


@pytest.mark.invariant(6)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, 0.9)], ids=["all", "top-p"])
def test_a_stochastic_rules_seed_reproduces(sampling: Sampling) -> None:
    trace = bundled.record(3, sampling, max_new=16, seed=3)
    outputs = []
    for seed in (1, 1, 2):
        _, measured = decode(f"ensemble:mode=sample,weight=0.5,seed={seed}", trace)
        outputs += list(measured.outputs.values())
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_lossless_as_lenience_one_keeps_the_sampled_output() -> None:
    """At factor 1 the rule never rescues, so coins, residuals and outputs are unchanged."""
    trace = bundled.record(3, sampling=Sampling(1.0), max_new=16, seed=3)
    plain = PlannedPolicy("fixed:gamma=5", Fixed(5))
    measured = run_requests(bundled.pair(), trace, [plain], repeats=1)
    planned, ruled = decode("lenience:mode=sample,factor=1", trace)
    np.testing.assert_array_equal(
        ruled.logs[planned.label].rounds, measured.logs[plain.label].rounds
    )
    assert ruled.outputs[planned.label] == measured.outputs[plain.label]


def test_a_cut_that_a_rule_cannot_know_is_refused() -> None:
    trace = bundled.record(2, Sampling(1.0, 0.9), max_new=8)
    refusal = r"lenience.*: .* not 1 with top-p 0\.9"
    with pytest.raises(DraftsimError, match=refusal):
        decode("lenience:mode=sample", trace)
    with pytest.raises(DraftsimError, match=refusal):
        replay(trace, Fixed(3), parse_rule("lenience:mode=sample"))


def test_a_sampled_run_is_not_taken_for_a_greedy_one(tmp_path: Path) -> None:
    greedy = bundled.record(2, max_new=8)
    sampled = bundled.record(2, Sampling(1.0), max_new=8)
    for trace in (greedy, sampled):
        planned, measured = decode("lossy-global", trace, "fixed:gamma=4")
        about = {"sampling": trace.sampling.meta}
        write_run(real_run(bundled.pair(), greedy, planned, measured, about), tmp_path)
    runs = [read_run(file) for file in find_runs(tmp_path)]
    assert len(runs) == 2
    assert planned.rule is not None
    for trace in (greedy, sampled):
        found = find_run(runs, planned.policy, planned.rule, trace)
        assert found is not None
        assert found.meta["sampling"] == trace.sampling.meta
    assert find_run(runs, planned.policy, planned.rule, bundled.record(2, Sampling(0.5), 8)) is None


def test_a_calibrated_memory_is_the_same_once_read_again(tmp_path: Path) -> None:
    """Rounds, outputs and the memory they end with, byte for byte; and the memory matters."""
    trace = short_trace()
    memory = calibrated(trace, Fixed(5))
    assert len(memory) > 0
    assert memory.sizes == sorted(memory.sizes)
    assert sum(n for _, n in memory.items()) == len(rejected_pairs(trace, replay(trace, Fixed(5))))
    (tmp_path / "memory.npz").write_bytes(memory.content())
    loaded = OnlineCorrectionMemory.load(tmp_path / "memory.npz")
    runs = {}
    for name, table in (("kept", memory), ("loaded", loaded), ("empty", None)):
        planned = PlannedPolicy("fixed", Fixed(5), CSD(threshold=0, tau=1e-3, memory=table))
        measured = run_requests(bundled.pair(), trace, [planned], repeats=1)
        log = measured.logs[planned.label]
        assert isinstance(log.rule, CSD)
        runs[name] = (
            log.rounds.tobytes(), measured.outputs[planned.label], log.rule.table.items(),
            log.rule.table.sizes[-3:],
        )  # fmt: skip
    assert runs["kept"] == runs["loaded"]
    assert runs["kept"] != runs["empty"]
    assert len(memory) == len(loaded)  # the run worked on a copy


def test_rules_share_a_run_in_order_and_are_not_the_callers() -> None:
    trace = short_trace()
    rule = CSD(threshold=0)
    planned = PlannedPolicy("fixed", Fixed(5), rule)
    measured = run_requests(bundled.pair(), trace, [planned], repeats=2)
    assert len(rule.table) == 0
    ended = measured.logs[planned.label].rule
    assert isinstance(ended, CSD)
    assert len(ended.table.sizes) == len(trace.requests)
    counts = measured.times.groupby("repeat")["rounds"].sum()
    assert counts.nunique() == 1  # every repeat starts from the same memory


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_splitting_is_even_and_loses_nothing(share: float) -> None:
    trace = synthetic_trace(0.5, requests=20, tokens=4, max_gamma=4)
    trace = Trace(
        trace.columns,
        [replace(r, category="ab"[i % 2]) for i, r in enumerate(trace.requests)],
        trace.max_gamma,
    )
    train, rest = split_requests(trace, share)
    assert sorted(train + rest) == list(range(20))
    assert len(train) == round(20 * share)
    assert abs(sum(i % 2 for i in train) - len(train) / 2) <= 1
    assert split_requests(trace, 1.0) == (list(range(20)), [])
    for wrong, said in ((0.0, "share is 0"), (0.01, "leaves none")):
        with pytest.raises(DraftsimError, match=said):
            split_requests(trace, wrong)
