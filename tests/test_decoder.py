"""The real decoder: identical to replay, to plain decoding, and to the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TopPLogitsWarper,
)

from policies import parse_policy
from policies.core import DraftPolicy, speculate
from policies.lengths.basic import Fixed
from policies.lengths.huggingface import HFHeuristic
from profiler import machine as repeats
from profiler.checks.differences import output_of, rounds_differ
from profiler.checks.spot_check import PlannedPolicy, assisted_generation, run_batches, run_requests
from profiler.decoding.forced import ForcedDecoder
from profiler.decoding.single import ModelDecoder
from profiler.models.runner import Runner
from tests import batched, bundled
from tests.outputs import greedy
from tests.replayed import assert_decoded_as_replayed
from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.rounds import RoundLog
from traces.replay.run import replay

POLICIES = (
    "autoregressive", "fixed:gamma=1", "fixed:gamma=5", "fixed:gamma=8", "confidence",
    "confidence:roc_update=in_call", "hf-heuristic", "hf-heuristic:full_accept_means=budget",
    "gammatune", "gammatune-plus", "svip", "adaedl", "draft-and-verify", "oracle",
    "oracle:convention=run+1", "hf-heuristic:persist=persistent", "confidence:roc_update=next_call",
    "llama-cpp:gamma=8,p_min=0.7",
)  # fmt: skip


def named(texts: tuple[str, ...], trace: Trace) -> list[PlannedPolicy]:
    return [PlannedPolicy(t, parse_policy(t, max_gamma=trace.max_gamma)) for t in texts]


@pytest.mark.invariant(1)
def test_real_rounds_and_outputs_equal_replay_for_every_policy() -> None:
    trace = batched.trace().select(range(4))
    assert {r.ended for r in trace.requests} == {"eos", "length"}
    assert_decoded_as_replayed(batched.pair(), trace, named(POLICIES, trace))


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_what_warms_up_is_run_and_not_kept(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a policy that would go on from what it learnt."""
    trace, learner = bundled.greedy_trace().select(range(2)), HFHeuristic(3, persist="persistent")
    begun: list[int] = []
    plain = type(learner).fresh
    monkeypatch.setattr(HFHeuristic, "fresh", lambda self: begun.append(1) or plain(self))
    found = []
    for warming in (0, 1):
        monkeypatch.setattr(repeats, "WARMING", warming)
        begun.clear()
        if batched:
            made = run_batches(
                bundled.pair(), trace, [PlannedPolicy("it", learner)], batches=(1,), repeats=1
            )
            log = made.logs["it", 1]
        else:
            alone = run_requests(bundled.pair(), trace, [PlannedPolicy("it", learner)], repeats=1)
            made, log = alone, alone.logs["it"]
        assert len(made.times) == 2
        found.append((log.rounds.tolist(), len(begun)))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]


def test_rounds_that_differ_are_counted() -> None:
    trace = bundled.greedy_trace()
    three, four = replay(trace, Fixed(3)), replay(trace, Fixed(4))
    assert rounds_differ(three, three) == 0
    assert rounds_differ(three, four) >= abs(len(three) - len(four)) > 0


@pytest.mark.invariant(2)
def test_without_eos_the_draft_is_capped_by_what_remains() -> None:
    """Outputs that run into the limit: the last rounds draft no more than fits."""
    trace = bundled.record(2, max_new=23, eos=False)
    assert {r.ended for r in trace.requests} == {"length"}
    for policy in (Fixed(24), Fixed(7)):
        log = replay(trace, policy)
        for i, request in enumerate(trace.requests):
            prompt = torch.tensor(request.prompt_ids)
            decoder = ModelDecoder(*bundled.runners(), prompt, 23)
            real = RoundLog.pack([list(speculate(decoder, policy.fresh()))])
            mine = log.rounds[log.rounds["request"] == i]
            for name in ("drafted", "accepted", "emitted", "catch_up"):
                np.testing.assert_array_equal(real[name], mine[name])
        remaining = 23 - log.rounds["position"]
        assert (log.rounds["drafted"] <= remaining - 1).all()


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (
            "confidence:roc_update=in_call",
            {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
             "assistant_confidence_threshold": 0.4},
        ),
        (
            "hf-heuristic:gamma=5",
            {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient",
             "assistant_confidence_threshold": 0.0},
        ),
        (
            "fixed:gamma=4",
            {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant",
             "assistant_confidence_threshold": 0.0},
        ),
    ],
)  # fmt: skip
def test_transformers_needs_the_predicted_number_of_target_passes(
    policy: str, settings: dict[str, object]
) -> None:
    trace, pair = bundled.greedy_trace(), bundled.pair()
    log = replay(trace, parse_policy(policy, max_gamma=trace.max_gamma), first=0)
    expected = log.per_request(np.ones(len(log)))
    for i, request in enumerate(trace.requests):
        prompt = torch.tensor(request.prompt_ids)
        output, passes = assisted_generation(pair, prompt, request.max_new_tokens, **settings)
        assert output == output_of(trace, i)
        assert passes == expected[i], request.id


@pytest.mark.invariant(1)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, 0.9)], ids=["all", "top-p"])
def test_sampled_rounds_agree_with_replay_in_distribution(sampling: Sampling) -> None:
    """Mean accepted per round of real rejection sampling against the recorded coins."""
    trace = bundled.record(6, sampling)
    policy = Fixed(4)
    replayed = replay(trace, policy)
    assert replayed.fidelity == "exact in distribution"
    measured = run_requests(bundled.pair(), trace, [PlannedPolicy("fixed", policy)], repeats=1)
    real = measured.logs["fixed"]
    per_prompt = []
    for log in (replayed, real):
        full = (log.rounds["drafted"] == 4).astype(float)
        accepted = log.per_request(log.rounds["accepted"] * full) / log.per_request(full).clip(1)
        per_prompt.append(accepted)
    difference = per_prompt[0] - per_prompt[1]
    assert abs(difference.mean()) < 4 * difference.std(ddof=1) / np.sqrt(len(difference)) + 1e-9


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=5, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Remembering(Runner):
    """Computes what follows a prefix once: of five words and a few tokens there are not many."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__(model, 32)
        self.held: list[int] = []
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(
        self, tokens: torch.Tensor, start: int, *, keep: int = 0, **_: object
    ) -> torch.Tensor:
        assert start <= len(self.held)
        self.held[start:] = tokens.tolist()
        ends = range(start + 1, len(self.held) + 1)[-keep:]
        return torch.stack([self.after(tuple(self.held[:end])) for end in ends])

    def after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self.known:
            self.known[prefix] = super().forward(torch.tensor(prefix), 0, keep=1)[0]
        return self.known[prefix]


@pytest.mark.invariant(8)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 0.8)], ids=["all", "top-p"])
def test_rejection_sampling_leaves_the_targets_distribution(sampling: Sampling) -> None:
    """All 125 three-token outputs, against their exact probabilities."""
    target, draft = Remembering(tiny(1)), Remembering(tiny(2))
    prompt = torch.tensor([1, 2])
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros((5, 5, 5))
    draws = 1500
    for _ in range(draws):
        decoder = ModelDecoder(target, draft, prompt, 3, sampling=sampling, generator=generator)
        list(speculate(decoder, Fixed(2)))
        counts[tuple(decoder.output)] += 1
    expected, plain = np.zeros((5, 5, 5)), Runner(tiny(1), 32)
    for a, b in product(range(5), range(5)):
        logits = plain.forward(torch.tensor([1, 2, a, b]), 0)
        kept = TopPLogitsWarper(sampling.top_p)(prompt[None], logits / sampling.temperature)
        probs = torch.softmax(kept, -1).double().numpy()
        expected[a, b] = probs[1, a] * probs[2, b] * probs[3]
    assert (counts[expected == 0] == 0).all()
    assert (expected == 0).any() == (sampling.top_p < 1)
    expected *= draws / expected.sum()
    counts, expected = counts[expected > 0], expected[expected > 0]
    rare = expected < 5
    observed = [*counts[~rare], *([counts[rare].sum()] if rare.any() else [])]
    wanted = [*expected[~rare], *([expected[rare].sum()] if rare.any() else [])]
    result = stats.chisquare(observed, wanted)
    assert result.pvalue > 6e-5  # four standard errors of a normal


def test_greedy_reference_counts_and_ends() -> None:
    target, _ = bundled.runners()
    trace = bundled.greedy_trace()
    request = trace.requests[0]
    out = greedy(
        target, torch.tensor(request.prompt_ids), request.max_new_tokens, bundled.pair().eos
    )
    assert out == output_of(trace, 0)


def test_forced_runs_repeat_the_recording_with_any_weights() -> None:
    trace = bundled.greedy_trace()
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "attn_implementation": "sdpa",
    }  # fmt: skip
    runners = [
        Runner(LlamaForCausalLM(LlamaConfig(num_hidden_layers=n, **shape)).eval(), 512)
        for n in (2, 1)
    ]
    for text in ("fixed:gamma=5", "gammatune-plus", "svip", "oracle"):
        policy: DraftPolicy = parse_policy(text, max_gamma=trace.max_gamma)
        expected = replay(trace, policy)
        rounds = [
            list(speculate(ForcedDecoder(runners[0], runners[1], trace, i), policy.fresh()))
            for i in range(len(trace.requests))
        ]
        np.testing.assert_array_equal(RoundLog.pack(rounds), expected.rounds)


def test_signals_come_to_the_host_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from profiler.decoding.single import ModelToken

    fetched = 0
    original = ModelToken._fetch

    def counting(self: ModelToken) -> Sequence[float]:
        nonlocal fetched
        fetched += 1
        return original(self)

    monkeypatch.setattr(ModelToken, "_fetch", counting)
    trace = bundled.greedy_trace()
    prompt = torch.tensor(trace.requests[0].prompt_ids)

    def run(text: str) -> int:
        nonlocal fetched
        fetched = 0
        decoder = ModelDecoder(*bundled.runners(), prompt, 12, watch_eos=False)
        list(speculate(decoder, parse_policy(text)))
        return fetched

    assert run("fixed:gamma=4") == run("gammatune") == 0
    assert run("svip") > 0


def test_a_recording_of_other_weights_is_refused() -> None:
    trace = bundled.greedy_trace()
    other = {**bundled.pair().meta, "draft": {"fingerprint": "of another model"}}
    stale = Trace(trace.columns, trace.requests, trace.max_gamma, {**trace.meta, **other})
    with pytest.raises(DraftsimError, match=r"draft model.s weights .* are not those"):
        run_requests(bundled.pair(), stale, named(("fixed",), trace), repeats=1)


def test_prompts_that_do_not_fit_are_refused_with_the_numbers() -> None:
    target, draft = bundled.runners()
    room = min(target.max_positions, bundled.SLOTS)
    with pytest.raises(DraftsimError, match=f"exceed the context of {room}"):
        ModelDecoder(target, draft, torch.zeros(room, dtype=torch.long), 8)
    with pytest.raises(DraftsimError, match="the prompt is empty"):
        ModelDecoder(target, draft, torch.zeros(0, dtype=torch.long), 8)
