"""Single-stream draft-length policies against their equations, vectors and references."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve  # type: ignore[import-untyped,unused-ignore]

from policies import (
    CMASD,
    SVIP,
    AdaEDL,
    Autoregressive,
    BiLDFallback,
    Confidence,
    Disco,
    DraftAndVerify,
    DraftPolicy,
    EXP3Spec,
    Fixed,
    GammaTune,
    GammaTunePlus,
    HFHeuristic,
    IsotonicAcceptance,
    Load,
    LogisticAcceptance,
    Oracle,
    Round,
    SpecDecPP,
    TextbookCost,
    UCBSpec,
    cmasd_confidence,
)
from policies.huggingface import roc_threshold
from policies.threshold import AdaptiveThreshold


@dataclass
class Token:
    prob: float = 0.9
    entropy: float = 0.1
    logit_margin: float = 3.0
    prob_margin: float = 0.8
    token_id: int = 0
    ends: bool = False


def one_round(
    policy: DraftPolicy, run: int, tokens: Iterable[Token] = (), limit: int = 200, context: int = 9
) -> tuple[int, int, int]:
    """(draft passes, sent, accepted) of a round whose first `run` tokens match."""
    supply = iter(tokens)
    policy.begin_round(Load(1, context, run))
    draft: list[Any] = []
    while len(draft) < limit and policy.keep_drafting(draft):
        draft.append(next(supply, Token()))
    passes = len(draft)
    del draft[policy.submit(draft) :]
    accepted = min(run, len(draft))
    policy.observe(Round(0, len(draft), accepted, accepted + 1, passes, 1), draft)
    return passes, len(draft), accepted


def sent(policy: DraftPolicy, runs: Sequence[int], **kwargs: Any) -> list[int]:
    return [one_round(policy, run, **kwargs)[1] for run in runs]


def test_reference_policies() -> None:
    assert sent(Autoregressive(), [3, 0]) == [0, 0]
    assert sent(Fixed(3), [9, 0, 1]) == [3, 3, 3]
    assert sent(Fixed(0), [9]) == [0]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 30))
def test_oracle_stops_at_or_after_the_run(runs: list[int], longest: int) -> None:
    assert sent(Oracle(), runs) == runs
    assert sent(Oracle("run+1"), runs) == [r + 1 for r in runs]
    assert sent(Oracle(gamma_max=longest), runs) == [min(r, longest) for r in runs]


def test_oracle_needs_a_recording() -> None:
    with pytest.raises(ValueError, match="only a recording"):
        Oracle().begin_round(Load(1, 10, None))


def test_gammatune_vector() -> None:
    """Worked by hand from equations 7 and 8: eta .3, delta 2, bounds [1, 16], start 4."""
    policy = GammaTune(gamma=4, eta=0.3, delta=2, gamma_min=1, gamma_max=16)
    seen = []
    for run in (4, 6, 1, 0, 5, 9):
        _, drafted, accepted = one_round(policy, run)
        seen.append((drafted, accepted, policy._mean))
    expected = [
        (4, 4, 4.6), (5, 5, 5.32), (6, 1, 4.024), (5, 0, 2.8168), (3, 3, 3.4718), (4, 4, 4.2302)
    ]  # fmt: skip
    for got, want in zip(seen, expected, strict=True):
        assert got[:2] == want[:2]
        assert got[2] == pytest.approx(want[2], abs=5e-5)
    assert sent(policy, [0]) == [5]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(5, 12))
def test_gammatune_stays_within_its_bounds(runs: list[int], low: int, high: int) -> None:
    policy = GammaTune(gamma=5, gamma_min=low, gamma_max=high)
    assert all(low <= n <= high for n in sent(policy, runs))


def test_gammatune_grows_to_the_bound_on_full_acceptance_only_through_delta() -> None:
    assert sent(GammaTune(gamma=4, delta=2, gamma_max=10), [99] * 100)[-1] == 10
    assert sent(GammaTune(gamma=4, delta=0, gamma_max=10), [99] * 100) == [4] * 100


def test_gammatune_readings_of_full_acceptance_differ_on_a_cut_draft() -> None:
    generous, strict = (
        GammaTune(gamma=6, eta=1, delta=2, full_accept_means=m) for m in ("sent", "budget")
    )
    for policy in (generous, strict):
        assert one_round(policy, run=9, limit=3) == (3, 3, 3)
    assert sent(generous, [0]) == [5]
    assert sent(strict, [0]) == [3]


def test_gammatune_plus_keeps_the_token_that_stops_it() -> None:
    tokens = [Token(prob=0.9), Token(prob=0.39), Token(prob=0.9)]
    assert sent(GammaTunePlus(gamma=5, threshold=0.4), [0], tokens=tokens) == [2]
    tokens[1].prob = 0.4
    assert sent(GammaTunePlus(gamma=5, threshold=0.4), [0], tokens=tokens) == [5]


@pytest.mark.parametrize(
    ("policy", "field", "stays", "stops"),
    [
        (Confidence(20, 0.4), "prob", 0.4, math.nextafter(0.4, 0)),
        (SVIP(), "entropy", 0.5999, 0.6001),
        (DraftAndVerify(0.8), "prob", 0.8, 0.7999),
        (AdaEDL(threshold=0.5), "entropy", 1.2499, 1.2501),  # (1 - .5)^2 / .2
        (Disco(threshold=0.5), "prob", 0.5, 0.4999),
    ],
)
def test_stop_tests_trigger_at_their_bound_and_keep_the_token(
    policy: DraftPolicy, field: str, stays: float, stops: float
) -> None:
    calm: dict[str, Any] = {"prob": 0.99, "entropy": 0.0}
    for value, full in ((stays, True), (stops, False)):
        tokens = [Token(**calm), Token(**{**calm, field: value})] + [Token(**calm)] * 60
        n = sent(policy.fresh(), [0], tokens=tokens)[0]
        assert (n > 2) is full
        assert n >= 2


@given(st.floats(0, 8))
def test_svip_is_entropy_above_point_six(entropy: float) -> None:
    if abs(entropy - 0.6) > 1e-9:
        assert SVIP().keep_drafting([Token(entropy=entropy)]) is (entropy < 0.6)


def test_hard_caps() -> None:
    sure = [Token(prob=1.0, entropy=0.0, prob_margin=1.0)] * 100
    assert sent(SVIP(), [0], tokens=sure) == [40]
    assert sent(Confidence(), [0], tokens=sure) == [20]
    assert sent(DraftAndVerify(), [0], tokens=sure) == [8]
    assert sent(SpecDecPP(), [0], tokens=sure) == [20]
    assert sent(BiLDFallback(), [0], tokens=sure) == [10]


# --- transformers ---------------------------------------------------------------------


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


def roc_run(policy: Confidence, seed: int, context: int = 9) -> tuple[list[Any], list[float]]:
    rng = np.random.default_rng(seed)
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
    rounds, thresholds = roc_run(later, seed + 100, context=5)
    assert set(thresholds) == {chosen}
    # The new call starts its history anew but from the threshold it was given.
    one_round(later, 0, context=5)
    assert later._threshold == reference_roc_stream(rounds, chosen)[-1]


def test_roc_update_is_off_by_default_and_in_call_is_forgotten() -> None:
    assert set(roc_run(Confidence(), 3)[1]) == {0.4}
    prototype = Confidence(roc_update="in_call")
    roc_run(prototype.fresh(), 3)
    assert prototype.fresh()._threshold == 0.4
    assert not prototype.learns_across_requests
    assert Confidence(roc_update="next_call").learns_across_requests


# --- the adaptive threshold -----------------------------------------------------------


def test_adaptive_threshold_by_hand() -> None:
    """Two steps from 0.8: a low rate raises it, a high one lowers it, a full draft holds it."""
    t = AdaptiveThreshold(0.8)
    t.update(drafted=4, accepted=2, at_maximum=False)
    assert t.rate == pytest.approx(0.25)
    assert t.value == pytest.approx(0.9 * 0.8 + 0.1 * 0.81)
    t = AdaptiveThreshold(0.8, rate=1.0)
    t.update(drafted=4, accepted=4, at_maximum=False)
    assert t.value == pytest.approx(0.9 * 0.8 + 0.1 * 0.79)
    t = AdaptiveThreshold(0.8, rate=1.0)
    t.update(drafted=4, accepted=4, at_maximum=True)
    assert t.value == pytest.approx(0.8)
    t.update(drafted=0, accepted=0, at_maximum=False)
    assert t.rate == 1.0
    assert t.value == pytest.approx(0.8)


def test_draft_and_verify_and_adaedl_hold_the_threshold_for_different_reasons() -> None:
    """Released Draft&Verify: the draft had its maximum length; AdaEDL: all of it was accepted.

    With a rate memory of 0.9 and a start at 1 the rate stays above the target after one
    partly rejected draft of the maximum length, where the two therefore part.
    """
    sure = [Token(prob=1.0, entropy=0.0)] * 20
    dv = DraftAndVerify(0.8, gamma_max=8, rate_memory=0.9)
    edl = AdaEDL(0.8, gamma_max=8, rate_memory=0.9, initial_rate=1.0)
    dv._threshold.rate = 1.0
    for policy in (dv, edl):
        assert one_round(policy, run=7, tokens=sure) == (8, 8, 7)
    assert dv._threshold.value == pytest.approx(0.8)
    assert edl._lambda.value == pytest.approx(0.8 - 0.1 * 0.01)


def test_adaedl_can_drop_the_trigger_token_at_its_cost() -> None:
    tokens = [Token(entropy=0.0), Token(entropy=5.0), Token(entropy=0.0)]
    assert one_round(AdaEDL(), 9, tokens) == (2, 2, 2)
    assert one_round(AdaEDL(keep_trigger_token=False), 9, tokens) == (2, 1, 1)
    assert one_round(AdaEDL(keep_trigger_token=False), 9, tokens[1:]) == (1, 0, 0)


def test_bild_drops_the_trigger_token_and_pays_a_target_step_after_a_rollback() -> None:
    tokens = [Token(prob=0.9), Token(prob=0.59), Token(prob=0.9)]
    policy = BiLDFallback()
    assert one_round(policy, 9, tokens) == (2, 1, 1)
    assert one_round(policy, 0, tokens) == (2, 1, 0)
    assert one_round(policy, 9, tokens) == (0, 0, 0)
    assert one_round(policy, 9, tokens) == (2, 1, 1)
    plain = BiLDFallback(target_after_rollback=False)
    assert sent(plain, [0, 0], tokens=tokens) == [1, 1]
    assert sent(BiLDFallback(target_first=True), [9, 9], tokens=tokens) == [0, 1]


# --- CM-ASD ---------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 50), st.floats(0, 1), st.integers(2, 10**6))
def test_cmasd_confidence_components(
    share: float, logit_margin: float, prob_margin: float, vocab_size: int
) -> None:
    entropy = share * math.log(vocab_size)
    args = (entropy, logit_margin, prob_margin, vocab_size)
    intended = cmasd_confidence(*args, weights=(1, 0, 0))
    literal = cmasd_confidence(*args, weights=(1, 0, 0), entropy_sign="literal")
    assert intended == pytest.approx(1 - share)
    assert literal == pytest.approx(1 - intended)
    assert 0.5 <= cmasd_confidence(*args, weights=(0, 1, 0)) <= 1
    softmax = cmasd_confidence(*args, weights=(0, 0, 1))
    assert softmax == pytest.approx(min(1.0, prob_margin * vocab_size / (vocab_size - 1)))
    parts = [cmasd_confidence(*args, weights=w) for w in np.eye(3).tolist()]
    assert cmasd_confidence(*args, weights=(0.2, 0.3, 0.5)) == pytest.approx(
        np.dot((0.2, 0.3, 0.5), parts)
    )


def test_cmasd_confidence_of_arrays_is_that_of_their_elements() -> None:
    rng = np.random.default_rng(0)
    h, m, s = rng.exponential(1, 50), rng.exponential(4, 50), rng.random(50)
    whole = cmasd_confidence(h, m, s, 5000, beta=0.7)
    single = [
        cmasd_confidence(float(a), float(b), float(c), 5000, beta=0.7)
        for a, b, c in zip(h, m, s, strict=True)
    ]
    np.testing.assert_allclose(whole, single, rtol=1e-12)


@pytest.mark.parametrize("sign", ["intended", "literal"])
@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.2, 0.3, 0.5)])
def test_cmasd_policy_scores_tokens_as_the_function_does(sign: Any, weights: Any) -> None:
    rng = np.random.default_rng(2)
    policy = CMASD(weights=weights, entropy_sign=sign, beta=0.6, vocab_size=50)
    for h, m, s in zip(rng.exponential(1, 40), rng.exponential(4, 40), rng.random(40), strict=True):
        token = Token(entropy=float(h), logit_margin=float(m), prob_margin=float(s))
        expected = cmasd_confidence(float(h), float(m), float(s), 50, 0.6, weights, sign)
        assert policy.confidence(token) == pytest.approx(expected, abs=1e-12)


def softmax_only(**kwargs: Any) -> CMASD:
    """C is then the probability margin itself, up to 1 / vocab_size."""
    return CMASD(weights=(0, 0, 1), vocab_size=10**9, **kwargs)


def test_cmasd_windows_by_hand() -> None:
    """gamma_max 10 and margins .85 .75 .25 .15 ...: means .85 .80 .617 .50 .45 .42."""
    margins = [0.85, 0.75, 0.25, 0.15, 0.25, 0.25, 0.15, 0.25, 0.25, 0.25]
    tokens = [Token(prob_margin=m) for m in margins]
    literal = softmax_only(window="literal", gamma_max=10)
    assert one_round(literal, 0, tokens) == (10, 3, 0)  # floor(10 * .34) = 3
    # causal: 4 < floor(5.0) goes on; 5 < floor(4.5) does not.
    assert sent(softmax_only(window="causal", gamma_max=10), [0, 9], tokens=tokens) == [5, 5]
    lagged = softmax_only(window="lagged", gamma_max=10, initial_confidence=0.55)
    assert sent(lagged, [0, 0, 0], tokens=tokens) == [5, 4, 5]
    assert list(softmax_only().reads) == ["prob_margin"]
    assert list(CMASD().reads) == ["entropy", "logit_margin", "prob_margin"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.sampled_from(["literal", "causal"]))
def test_cmasd_length_is_clipped(margins: list[float], window: Any) -> None:
    tokens = [Token(prob_margin=m) for m in margins] * 12
    policy = softmax_only(window=window, gamma_min=2, gamma_max=7, alpha=1.7)
    assert 2 <= one_round(policy, 0, tokens)[1] <= 7


# --- estimators -----------------------------------------------------------------------


def test_specdec_pp_reads_its_estimate_one_token_late() -> None:
    tokens = [Token(prob=p) for p in (0.9, 0.7, 0.9, 0.9, 0.9)]
    # Products .9, .63: 1 - .63 > .3, seen after token 2 without the lag, 3 with it.
    assert sent(SpecDecPP(lag=False), [0], tokens=tokens) == [2]
    assert sent(SpecDecPP(lag=True), [0], tokens=tokens) == [3]
    doubt = [Token(prob=0.1)] * 9
    assert sent(SpecDecPP(gamma_min=4, lag=False), [0], tokens=doubt) == [4]


@pytest.mark.parametrize("rising", [True, False])
def test_isotonic_fit_is_the_least_squares_monotone_one(rising: bool) -> None:
    from sklearn.isotonic import IsotonicRegression  # type: ignore[import-untyped,unused-ignore]

    rng = np.random.default_rng(4)
    x = rng.random(300).round(2)
    y = (rng.random(300) < (x if rising else 1 - x)).astype(float)
    fit = IsotonicAcceptance.fit("entropy", x, y, rising=rising)
    reference = IsotonicRegression(increasing=rising).fit(x, y)
    got = [fit(Token(entropy=v), 0) for v in x]
    np.testing.assert_allclose(got, reference.predict(x), atol=1e-9)
    assert list(fit.reads) == ["entropy"]
    steps = [b >= a if rising else b <= a for a, b in pairwise(fit.values)]
    assert all(steps)


def test_logistic_fit_recovers_what_made_the_data() -> None:
    """Within 4 standard errors (inverse Fisher information) of the generating weights."""
    rng = np.random.default_rng(1)
    n = 6000
    x, offset = rng.normal(size=n), rng.integers(0, 8, n).astype(float)
    truth = np.array([1.5, -0.2, 0.4])
    z = np.column_stack([x, offset, np.ones(n)])
    p = 1 / (1 + np.exp(-z @ truth))
    y = (rng.random(n) < p).astype(float)
    fit = LogisticAcceptance.fit(["entropy"], x[:, None], offset, y, ridge=0.0)
    errors = np.sqrt(np.diag(np.linalg.inv((z.T * (p * (1 - p))) @ z)))
    got = np.array([*fit.weights, fit.bias])
    assert (np.abs((got - truth) / errors) < 4).all()
    expected = 1 / (1 + math.exp(-float(np.dot(got, [0.3, 2, 1]))))
    assert fit(Token(entropy=0.3), 2) == pytest.approx(expected)


# --- bandits --------------------------------------------------------------------------


def pulls(policy: DraftPolicy, accept: float, rounds: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return sent(policy, (rng.geometric(1 - accept, rounds) - 1).tolist())


def test_paper_ucb_drifts_to_the_longest_arm_and_the_cost_aware_one_to_the_best() -> None:
    """At acceptance .5 and a draft step worth .5 targets, 1 breaks even and 8 loses 60 %."""
    cost = TextbookCost(target=1.0, draft=0.5)
    blind = pulls(UCBSpec("ucb_paper", (1, 8), cost=cost), 0.8, 3000)
    aware = pulls(UCBSpec("ucb_cost", (1, 8), cost=cost), 0.5, 3000)
    assert np.mean(np.array(blind[1500:]) == 8) > 0.5
    assert np.mean(np.array(aware[1500:]) == 1) > 0.5


def test_ucb_index_is_the_printed_one() -> None:
    policy = UCBSpec("ucb_paper", (2, 4), confidence=0.1)
    sent(policy, [2, 3])
    t, n = 3, 1
    bonus = 2 * math.sqrt((1 + n) / n**2 * (1 + 2 * math.log(2 * t**2 * math.sqrt(2) / 0.1)))
    assert policy._index(0, t) == pytest.approx(3 + bonus)
    assert policy._index(1, t) == pytest.approx(4 + bonus)


def test_greedy_code_rotates_seven_rounds_then_takes_the_best_mean() -> None:
    policy = UCBSpec("greedy_code", cost=TextbookCost(1.0, 0.1))
    lengths = sent(policy, [99] * 12)
    assert lengths[:7] == [1, 2, 3, 4, 1, 2, 3]
    assert lengths[7:] == [4] * 5


def test_exp3_weights_and_repeatability() -> None:
    policy = EXP3Spec((1, 4), seed=5)
    first = sent(policy, [0])[0]
    # A rejected draft of the longest arm loses L / L over a chance of 1/2; so does the shorter.
    assert policy._losses.tolist() == [2.0 * (first == 1), 2.0 * (first == 4)]
    policy.begin_round(Load(1, 9, 0))
    rate = math.sqrt(math.log(2) / (2 * 2))
    odds = math.exp(-rate * 2.0)
    hit = 0 if first == 1 else 1
    assert policy._chances[hit] == pytest.approx(odds / (1 + odds))
    assert pulls(EXP3Spec(seed=5), 0.7, 50) == pulls(EXP3Spec(seed=5), 0.7, 50)
    assert pulls(EXP3Spec(seed=5), 0.7, 50) != pulls(EXP3Spec(seed=6), 0.7, 50)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fixed(-1), "gamma is -1, expected >= 0"),
        (lambda: Fixed(2.5), "gamma is 2.5, expected an integer >= 0"),  # type: ignore[arg-type]
        (lambda: Oracle("run+2"), "convention is 'run\\+2', expected one of"),  # type: ignore[arg-type]
        (lambda: Confidence(confidence_threshold=1.5), "is 1.5, expected between 0 and 1"),
        (lambda: Confidence(confidence_threshold=math.nan), "expected a finite number"),
        (lambda: HFHeuristic(gamma=9, gamma_max=8), "gamma is 9, expected <= gamma_max = 8"),
        (lambda: HFHeuristic(persist="persistent", roc_update="in_call"), "roc_update is"),
        (lambda: GammaTune(eta=2), "eta is 2, expected between 0 and 1"),
        (lambda: GammaTune(gamma_min=5, gamma_max=4), "gamma_min is 5, expected <= gamma_max"),
        (lambda: AdaEDL(keep_trigger_token=1), "keep_trigger_token is 1"),  # type: ignore[arg-type]
        (lambda: CMASD(weights=(1, 1, 0)), "weights is \\[1, 1, 0\\], expected three numbers"),
        (lambda: CMASD(vocab_size=1), "vocab_size is 1, expected >= 2"),
        (lambda: UCBSpec(gammas=()), "one or more distinct lengths"),
        (lambda: IsotonicAcceptance("prob", [0.1, 0.1], [0, 1]), "strictly rising"),
        (lambda: LogisticAcceptance(["prob"], [1.0], 0.0), "expected one more"),
    ],
)
def test_impossible_parameters_are_named_with_their_bound(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
