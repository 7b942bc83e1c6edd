"""Replay under rules against really decoding a small pair of made-up models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from policies.basic import Fixed
from policies.core import Load, Round, speculate
from policies.huggingface import Confidence
from policies.memory import OnlineCorrectionMemory
from policies.rule_registry import describe_rule, parse_rule
from policies.rules import (
    ExactMatch,
    RejectionSampling,
    VerifyRule,
    acceptance_probability,
    residual,
)
from policies.rules_context import CSD
from traces.corrections import rejected_pairs
from traces.errors import DraftsimError, SignalError
from traces.quality import own_choice_share
from traces.replay import RuleReplayDecoder, replay
from traces.rounds import RoundLog
from traces.trace import Request, Trace

V, GAMMA, LENGTH = 10, 6, 24
EOS = 0


@cache
def observe(context: tuple[int, ...]) -> dict[str, Any]:
    """Columns of the draft's proposal after `context`, from two made-up language models."""
    rng = np.random.default_rng([11, *context])
    target = rng.normal(0, rng.uniform(0.3, 3), V)
    draft = target + rng.normal(0, rng.uniform(0.1, 2), V)
    proposal = int(draft.argmax())
    sides: dict[str, Any] = {}
    for side, logits in (("draft", draft), ("target", target)):
        best = np.sort(logits)[::-1]
        lse = np.log(np.exp(logits).sum())
        sides |= {
            f"{side}_top1": best[0], f"{side}_top2": best[1], f"{side}_logsumexp": lse,
            f"{side}_entropy": lse - np.exp(logits - lse) @ logits,
        }  # fmt: skip
    values = sides | {
        "draft_logprob": draft[proposal] - sides["draft_logsumexp"],
        "target_draft_logit": target[proposal],
    }
    return {name: float(np.float32(value)) for name, value in values.items()} | {
        "draft_token": proposal,
        "target_token": int(target.argmax()),
        "match": int(proposal == target.argmax()),
        "target_draft_rank": int((target > target[proposal]).sum()),
    }


def record(prompts: Sequence[int], eos: Sequence[int] = ()) -> Trace:
    """Greedy recording of the made-up pair, with tails; one prompt token per request."""
    rows: list[dict[str, Any]] = []
    requests = []
    for r, prompt in enumerate(prompts):
        output: list[int] = []
        while len(output) < LENGTH and not (output and output[-1] in eos):
            context, t = (prompt, *output), len(output)
            seen = observe(context)
            output.append(seen["target_token"])
            rows.append({"request": r, "position": t, "offset": 0, "token": output[-1], **seen})
            for offset in range(1, 1 if seen["match"] else min(GAMMA, LENGTH - 1 - t)):
                if seen["draft_token"] in eos:
                    break
                context = (*context, seen["draft_token"])
                seen = observe(context)
                rows.append({"request": r, "position": t, "offset": offset, "token": -1, **seen})
        ended: Literal["eos", "length"] = "eos" if output[-1] in eos else "length"
        requests.append(Request(str(prompt), "made-up", 1, len(output), LENGTH, ended))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    kinds = {"request": np.int32, "position": np.int32, "offset": np.int16, "match": np.int8}
    for name, values in columns.items():
        default = np.float32 if values.dtype.kind == "f" else np.int32
        columns[name] = values.astype(kinds.get(name, default))
    meta = {"target": {"vocab_size": V}, "eos_token_ids": list(eos)}
    return Trace(columns, requests, GAMMA, meta)


class MadeUpDecoder:
    """Really decodes the made-up pair under a rule, from any prefix."""

    def __init__(self, prefix: Sequence[int], rule: VerifyRule, eos: Sequence[int] = ()) -> None:
        self.context = tuple(prefix)
        self.rule, self.eos = rule, eos
        self.rejected: list[tuple[int, int]] = []

    @property
    def position(self) -> int:
        return len(self.context) - 1

    @property
    def remaining(self) -> int:
        return 0 if self.position and self.context[-1] in self.eos else LENGTH - self.position

    @property
    def load(self) -> Load:
        return Load(1, len(self.context))

    def draft(self, so_far: Sequence[Any]) -> Any:
        seen = observe((*self.context, *(t.token_id for t in so_far)))
        top1, top2, lse = (seen[f"draft_{n}"] for n in ("top1", "top2", "logsumexp"))
        return SimpleNamespace(
            token_id=seen["draft_token"], ends=seen["draft_token"] in self.eos,
            prob=math.exp(seen["draft_logprob"]), entropy=seen["draft_entropy"],
            logit_margin=top1 - top2, prob_margin=math.exp(top1 - lse) - math.exp(top2 - lse),
        )  # fmt: skip

    def verify(self, draft: Sequence[Any]) -> int:
        tokens = [t.token_id for t in draft]
        seen = [observe((*self.context, *tokens[:i])) for i in range(len(tokens) + 1)]
        scores = [
            SimpleNamespace(
                match=bool(s["match"]), token=s["target_token"], top1=s["target_top1"],
                top2=s["target_top2"], logsumexp=s["target_logsumexp"],
                entropy=s["target_entropy"], draft_logit=s["target_draft_logit"],
                draft_rank=s["target_draft_rank"],
            )
            for s in seen[:-1]
        ]  # fmt: skip
        accepted = self.rule.accept(draft, scores)
        own = seen[accepted]["target_token"]
        if accepted < len(draft):
            self.rejected.append((tokens[accepted], own))
        for token in (*tokens[:accepted], own):
            if self.remaining > 0:
                self.context = (*self.context, token)
        return accepted


PROMPTS = range(1, 9)
TRACE = record(PROMPTS)
RULES = [
    "exact",
    "spec-verification:beta=3,tau=1",
    "cm-asd:tau_base=0.3",
    "csd-scg:tau=0.3",
    "csd:threshold=0,tau=0.2",
    "lossy-global:tau=0.4",
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


@pytest.mark.parametrize("eos", [(), (EOS,)])
@pytest.mark.parametrize("policy", [Fixed(4), Confidence(gamma=GAMMA)])
def test_lossless_replay_is_the_real_run(policy: Any, eos: tuple[int, ...]) -> None:
    trace = record(PROMPTS, eos)
    real = [list(speculate(MadeUpDecoder([p], ExactMatch(), eos), policy.fresh())) for p in PROMPTS]
    log = replay(trace, policy, ExactMatch(), first=0)
    np.testing.assert_array_equal(log.rounds, RoundLog.pack(real))
    assert (log.verify, log.fidelity, log.mismatched, log.rule) == ("exact", "exact", None, None)
    assert own_choice_share(log) == 1


@pytest.mark.parametrize(
    "text",
    ["spec-verification:beta=1", "csd:threshold=inf", "csd-scg:tau=1", "typical:temperature=0",
     "bild:threshold=0", "lenience:factor=1", "ensemble:weight=1", "lossy-global:tau=1"],
)  # fmt: skip
def test_a_lossy_rule_that_forgives_nothing_stays_exact(text: str) -> None:
    exact, log = replay(TRACE, Fixed(5)), replay(TRACE, Fixed(5), parse_rule(text))
    np.testing.assert_array_equal(log.rounds, exact.rounds)
    assert log.fidelity == "exact"
    assert log.verify == text
    assert log.mismatched is not None
    assert not log.mismatched.any()


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
    assert 0.5 < own_choice_share(log) < 1


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


def test_a_calibrated_memory_replays_alike_after_save_and_load(tmp_path: Path) -> None:
    pairs = rejected_pairs(TRACE, replay(TRACE, Fixed(5)))
    memory = OnlineCorrectionMemory().calibrate(pairs)
    path = memory.save(tmp_path / "ocm.npz")
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


def without(trace: Trace, *names: str, **meta: Any) -> Trace:
    columns = {k: v for k, v in trace.columns.items() if k not in names}
    return Trace(columns, trace.requests, trace.max_gamma, {**trace.meta, **meta})


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


class Trust(VerifyRule):
    """Accepts everything."""

    def accept(self, draft: Sequence[Any], scores: Sequence[Any]) -> int:
        return len(draft)


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


def test_an_unobserved_verdict_is_not_guessed() -> None:
    match = TRACE.columns["match"].copy()
    match[TRACE.on_path[5]] = -1
    columns = {**TRACE.columns, "match": match}
    # A tail follows only a recorded mismatch.
    keep = ~((columns["request"] == 0) & (columns["position"] == 5) & (columns["offset"] > 0))
    trace = Trace({k: v[keep] for k, v in columns.items()}, TRACE.requests, GAMMA, TRACE.meta)
    with pytest.raises(SignalError, match=r"not observed at position 5.*impute"):
        replay(trace, Fixed(1), parse_rule("bild:threshold=9"), first=5)


# Lossless sampling: one recorded coin per position replays true rejection sampling.

PAIR_RNG = np.random.default_rng(2)
TARGET, DRAFT = (PAIR_RNG.dirichlet(np.full(4, 0.8), 4) for _ in range(2))
"""Next-token distributions given the last token, (4, 4)."""


def sampled_trace(rng: np.random.Generator, requests: int, length: int) -> Trace:
    """Sampled outputs of the bigram target, with one coin per position."""
    coins = rng.random((requests, length))
    match = np.zeros((requests, length), np.int8)
    last = np.zeros(requests, int)
    for t in range(length):
        cumulative = TARGET.cumsum(1)[last]
        x = np.minimum((rng.random(requests)[:, None] > cumulative).sum(1), 3)
        match[:, t] = coins[:, t] < DRAFT[last, x] / TARGET[last, x]
        last = x
    columns: dict[str, Any] = {
        "request": np.repeat(np.arange(requests, dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), requests),
        "offset": np.zeros(requests * length, np.int16),
        "match": match.ravel(),
    }
    table = [Request(str(i), "sampled", 1, length, length, "length") for i in range(requests)]
    return Trace(columns, table, meta={"sampling": {"temperature": 1.0}})


def rejection_sampling(rng: np.random.Generator, length: int, gamma: int) -> list[Round]:
    """True speculative sampling of one output: draw, toss, correct (Leviathan, Alg. 1)."""
    last, position, rounds = 0, 0, []
    while position < length:
        count, accepted = min(gamma, length - position - 1), 0
        drafted = [last]
        for _ in range(count):
            drafted.append(int(rng.choice(4, p=DRAFT[drafted[-1]])))
        for before, d in itertools.pairwise(drafted):
            if rng.random() >= acceptance_probability(TARGET[before, d], DRAFT[before, d]):
                break
            accepted += 1
        before = drafted[accepted]
        rejected = accepted < count
        last = int(
            rng.choice(4, p=residual(TARGET[before], DRAFT[before]) if rejected else TARGET[before])
        )
        rounds.append(Round(position, count, accepted, accepted + 1, count, 1))
        position += accepted + 1
    return rounds


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_first_round_of_a_sampled_replay_has_the_exact_distribution(gamma: int) -> None:
    # P(A >= k | last) = (M^k 1)(last), with M the sub-stochastic matrix min(target, draft).
    requests = 4000
    log = replay(
        sampled_trace(np.random.default_rng(gamma), requests, 8), Fixed(gamma),
        RejectionSampling(), first=0,
    )  # fmt: skip
    accepted = log.rounds["accepted"][log.rounds["position"] == 0]
    overlap = np.minimum(TARGET, DRAFT)
    survival = [np.linalg.matrix_power(overlap, k).sum(1)[0] for k in range(gamma + 2)]
    survival[-1] = 0.0
    for k in range(gamma + 1):
        share = survival[k] - survival[k + 1]
        error = math.sqrt(share * (1 - share) / requests)
        assert abs((accepted == k).mean() - share) < 4 * error
    emitted = 1 + sum(survival[1 : gamma + 1])
    error = accepted.std(ddof=1) / math.sqrt(requests)
    assert abs(accepted.mean() + 1 - emitted) < 4 * error


@pytest.mark.parametrize("gamma", [2, 5])
def test_whole_sampled_replays_are_distributed_as_true_rejection_sampling(gamma: int) -> None:
    requests, length = 1000, 16
    trace = sampled_trace(np.random.default_rng(10 + gamma), requests, length)
    rng = np.random.default_rng(20 + gamma)
    true = RoundLog.pack(rejection_sampling(rng, length, gamma) for _ in range(requests))
    ours = replay(trace, Fixed(gamma), first=0).rounds

    def per_request(rounds: Any, count: int) -> Any:
        """Rounds of each request in which exactly `count` were accepted; requests are i.i.d."""
        return np.bincount(rounds["request"], rounds["accepted"] == count, minlength=requests)

    for count in range(gamma + 1):
        a, b = per_request(ours, count), per_request(true, count)
        error = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / requests)
        assert abs(a.mean() - b.mean()) < 4 * error
