"""transformers' two schedules: the heuristic and the ROC threshold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve  # type: ignore[import-untyped,unused-ignore]

from policies import Confidence, HFHeuristic
from policies.lengths.huggingface import roc_threshold
from tests.policy_rounds import Token, one_round, sent


def test_hf_heuristic_plus_two_minus_one() -> None:
    runs = [5, 7, 3, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert sent(HFHeuristic(), runs) == [5, 7, 9, 8, 7, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert sent(HFHeuristic(gamma=1), [0, 0]) == [1, 1]
    assert sent(HFHeuristic(gamma_max=8), [99] * 4) == [5, 7, 8, 8]


def test_hf_heuristic_readings_of_full_acceptance() -> None:
    """A draft cut by the limit and fully accepted: a hit since 4.49, a miss before 4.47."""
    for reading, then in (("sent", 7), ("budget", 4)):
        policy = HFHeuristic(full_accept_means=reading)  # type: ignore[arg-type]
        assert one_round(policy, run=9, limit=2) == (2, 2, 2)
        assert sent(policy, [0]) == [then]
        empty = HFHeuristic(full_accept_means=reading)  # type: ignore[arg-type]
        one_round(empty, run=9, limit=0)
        assert sent(empty, [0]) == [then]


def test_hf_heuristic_persistence() -> None:
    kept, forgotten = HFHeuristic(persist="persistent"), HFHeuristic()
    for policy, then in ((kept, 7), (forgotten, 5)):
        sent(policy.fresh(), [5])
        assert sent(policy.fresh(), [0]) == [then]


def test_hf_heuristic_reads_probabilities_only_with_a_threshold() -> None:
    assert not HFHeuristic().reads
    assert list(HFHeuristic(confidence_threshold=0.4).reads) == ["prob"]
    assert list(Confidence().reads) == ["prob"]
    assert not Confidence(confidence_threshold=0).reads


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(2, 60), st.booleans())
def test_roc_threshold_is_scikit_learns_choice(seed: int, n: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.random(n)
    if ties:
        probs = probs.round(1)
    matches = (rng.random(n) < probs).astype(int)
    got = roc_threshold(probs.tolist(), matches.tolist())
    if n <= 5 or len(set(matches.tolist())) < 2:
        assert got is None
        return
    fpr, tpr, thresholds = roc_curve(matches, probs)
    assert got is not None
    assert math.isfinite(got)
    assert got == thresholds[np.argmin(fpr + 3 * (1 - tpr))]


def reference_roc_stream(rounds: list[tuple[list[float], int]], start: float) -> list[float]:
    """transformers' bookkeeping written out again, with scikit-learn: threshold per round."""
    probs: list[float] = []
    matches: list[int] = []
    threshold, seen = start, []
    for drafted, accepted in rounds:
        probs += drafted
        matches += [1] * accepted
        if len(probs) > len(matches):
            matches.append(0)
        probs = probs[: len(matches)]
        if len(probs) > 5 and {0, 1} <= set(matches):
            fpr, tpr, thresholds = roc_curve(matches, probs)
            threshold = float(thresholds[np.argmin(fpr + 3 * (1 - tpr))])
        seen.append(threshold)
    return seen


def roc_run(policy: Confidence, seed: int) -> tuple[list[Any], list[float]]:
    """A call's rounds, as (probabilities, accepted), and the threshold after each."""
    policy.begin_request()
    context, rng = 9, np.random.default_rng(seed)
    rounds, thresholds = [], []
    for _ in range(12):
        tokens = [Token(prob=float(p)) for p in rng.random(30)]
        run = int(rng.integers(0, 5))
        _, drafted, accepted = one_round(policy, run, tokens, context=context)
        rounds.append(([t.prob for t in tokens[:drafted]], accepted))
        thresholds.append(policy._threshold)
        context += accepted + 1
    return rounds, thresholds


@pytest.mark.parametrize("seed", range(8))
def test_roc_update_in_the_call_and_for_the_next_call(seed: int) -> None:
    rounds, thresholds = roc_run(Confidence(roc_update="in_call"), seed)
    reference = reference_roc_stream(rounds, 0.4)
    assert thresholds == reference
    assert len(set(reference)) > 1

    later = Confidence(roc_update="next_call")
    rounds, thresholds = roc_run(later, seed)
    assert set(thresholds) == {0.4}
    chosen = reference_roc_stream(rounds, 0.4)[-1]
    # The new call starts without a history and from the threshold it was given, even where its
    # prompt is as long as the last call's text: the run says where a request begins.
    rounds, thresholds = roc_run(later, seed + 100)
    assert set(thresholds) == {chosen}
    later.begin_request()
    assert later._threshold == reference_roc_stream(rounds, chosen)[-1]


def test_roc_update_is_off_by_default_and_in_call_is_forgotten() -> None:
    assert set(roc_run(Confidence(), 3)[1]) == {0.4}
    prototype = Confidence(roc_update="in_call")
    roc_run(prototype.fresh(), 3)
    assert prototype.fresh()._threshold == 0.4
    assert not prototype.learns_across_requests
    assert Confidence(roc_update="next_call").learns_across_requests
