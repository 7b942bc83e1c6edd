"""Synthetic traces have the distributions they promise, and every policy runs on them."""

from __future__ import annotations

import numpy as np
import pytest

from policies.core import DraftPolicy
from policies.registry import parse_policy, policy_names
from traces.acceptance.synthetic import Bursty, Iid, MatchProcess, synthetic_trace
from traces.acceptance.trace import MATCH, Trace
from traces.errors import DraftsimError
from traces.replay.run import replay


def on_path_matches(trace: Trace) -> np.ndarray:
    return trace.columns["match"][trace.on_path] == MATCH


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("concentration", [None, 2.0])
def test_iid_share_of_matches(alpha: float, concentration: float | None) -> None:
    trace = synthetic_trace(alpha, requests=20, tokens=200, concentration=concentration)
    match = on_path_matches(trace)
    bound = 4 * np.sqrt(alpha * (1 - alpha) / len(match))
    assert abs(match.mean() - alpha) <= bound


def test_iid_matches_do_not_depend_on_the_last_one() -> None:
    match = on_path_matches(synthetic_trace(0.6, requests=1, tokens=20000)).astype(float)
    correlation = np.corrcoef(match[1:], match[:-1])[0, 1]
    assert abs(correlation) * np.sqrt(len(match)) < 4


def test_bursts_have_their_share_and_their_memory() -> None:
    process = Bursty(easy=0.9, hard=0.2, easy_length=12, hard_length=6)
    each = synthetic_trace(process, requests=400, tokens=60, seed=5)
    match = on_path_matches(each).reshape(400, 60).astype(float)
    share = match.mean(axis=1)
    assert abs(share.mean() - process.alpha) < 4 * share.std() / np.sqrt(400)
    # Two states with switching rates 1/12 and 1/6: the covariance at lag k decays by
    # (1 - 1/12 - 1/6) a token.
    weight = 12 / 18
    for lag in (1, 4):
        expected = weight * (1 - weight) * (0.9 - 0.2) ** 2 * (1 - 1 / 12 - 1 / 6) ** lag
        product = (match[:, lag:] - process.alpha) * (match[:, :-lag] - process.alpha)
        per_request = product.mean(axis=1)
        z = (per_request.mean() - expected) / (per_request.std() / np.sqrt(400))
        assert abs(z) < 4


def test_the_draft_probability_is_calibrated_and_tells_something() -> None:
    trace = synthetic_trace(0.7, requests=20, tokens=500, concentration=2.0)
    prob = trace.signal("prob")[trace.on_path]
    match = on_path_matches(trace)
    for low in np.arange(0, 1, 0.1):
        inside = (prob >= low) & (prob < low + 0.1)
        deviation = match[inside] - prob[inside]
        variance = (prob[inside] * (1 - prob[inside])).sum()
        assert abs(deviation.sum()) < 4 * np.sqrt(variance)
    gap = prob[match].mean() - prob[~match].mean()
    error = np.sqrt(prob[match].var() / match.sum() + prob[~match].var() / (~match).sum())
    assert gap > 4 * error


def test_signals_are_those_of_one_distribution() -> None:
    trace = synthetic_trace(0.5, requests=2, tokens=50, concentration=1.0, max_gamma=3)
    prob, margin = trace.signal("prob"), trace.signal("prob_margin")
    second = prob - margin
    assert (margin >= -1e-6).all()
    rest = 1 - prob - second
    count = trace.meta["vocab_size"] - 2
    entropy = -sum(x * np.log(np.maximum(x, 1e-12)) for x in (prob, second))
    entropy -= rest * np.log(np.maximum(rest, 1e-12) / count)
    assert trace.signal("entropy") == pytest.approx(entropy, abs=1e-3)
    assert trace.signal("logit_margin") == pytest.approx(np.log(prob / second), abs=1e-3)


def test_both_ends_of_a_sequence_occur() -> None:
    trace = synthetic_trace(0.7, requests=60, tokens=30, concentration=2.0, eos_fraction=0.5)
    ends = {r.ended for r in trace.requests}
    assert ends == {"eos", "length"}
    assert {r.max_new_tokens for r in trace.requests} == {30}
    assert all(r.tokens == 30 for r in trace.requests if r.ended == "length")
    token, offset = trace.columns["token"], trace.columns["offset"]
    last = trace.on_path[trace.request_starts[1:] - 1]
    ended = np.array([r.ended == "eos" for r in trace.requests])
    eos = trace.meta["eos_token_ids"]
    assert (np.isin(token[last], eos) == ended).all()
    assert np.isin(token[offset == 0], eos).sum() == ended.sum()
    drafted = trace.columns["draft_token"]
    match = trace.columns["match"] == MATCH
    assert (drafted[match] == token[match]).all()
    wrong = (offset == 0) & ~match
    assert (drafted[wrong] != token[wrong]).all()


@pytest.mark.parametrize("name", policy_names("single"))
def test_every_policy_can_be_replayed(name: str) -> None:
    trace = synthetic_trace(
        Bursty(), requests=6, tokens=60, concentration=3.0, eos_fraction=0.5, max_gamma=48
    )
    policy = parse_policy(name)
    assert isinstance(policy, DraftPolicy)
    log = replay(trace, policy)
    assert log.rounds["emitted"].sum() == trace.tokens - len(trace.requests)
    for r, request in zip(log.rounds.tolist(), log.rounds["request"], strict=True):
        _, position, drafted, accepted, emitted, *_ = r
        assert accepted <= drafted < trace.requests[request].max_new_tokens - position
        assert 1 <= emitted <= accepted + 1


@pytest.mark.invariant(6)
def test_the_seed_decides() -> None:
    first, again, other = (synthetic_trace(0.5, tokens=50, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first.columns["match"], again.columns["match"])
    assert not np.array_equal(first.columns["match"], other.columns["match"])


def test_a_process_of_ones_own() -> None:
    class Fading:
        def probabilities(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
            return np.where(np.arange(tokens) < 10, 1.0, 0.0)

    process: MatchProcess = Fading()
    trace = synthetic_trace(process, requests=2, tokens=15)
    assert on_path_matches(trace).tolist() == ([True] * 10 + [False] * 5) * 2
    assert trace.meta["process"]["name"] == "Fading"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Iid(1.5), "alpha is 1.5"),
        (lambda: Bursty(easy_length=0), "easy_length is 0"),
        (lambda: Bursty(hard=2), "hard is 2"),
        (lambda: synthetic_trace(0.5, requests=0), "requests is 0"),
        (lambda: synthetic_trace(0.5, tokens=0), "tokens is 0"),
        (lambda: synthetic_trace(0.5, max_gamma=0), "max_gamma is 0"),
        (lambda: synthetic_trace(0.5, concentration=0), "concentration is 0"),
        (lambda: synthetic_trace(0.5, eos_fraction=-0.1), "eos_fraction is -0.1"),
        (lambda: synthetic_trace(float("nan")), "alpha is nan"),
    ],
)
def test_impossible_parameters_are_refused(call: object, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        call()  # type: ignore[operator]
