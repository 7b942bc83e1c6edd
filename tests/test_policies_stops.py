"""Policies that stop at a token: bounds, triggers, the adaptive threshold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    SVIP,
    AdaEDL,
    BiLDFallback,
    Confidence,
    Disco,
    DraftAndVerify,
    DraftPolicy,
    GammaTunePlus,
    SpecDecPP,
)
from policies.lengths.draft_and_verify import AdaptiveThreshold
from tests.policy_rounds import Token, one_round, sent


@pytest.mark.parametrize(
    ("policy", "field", "stays", "stops"),
    [
        (Confidence(20, 0.4), "prob", 0.4, math.nextafter(0.4, 0)),
        (SVIP(), "entropy", 0.5999, 0.6001),
        (DraftAndVerify(0.8), "raw_prob", 0.8, 0.7999),
        (GammaTunePlus(gamma=20, threshold=0.4), "top_prob", 0.4, math.nextafter(0.4, 0)),
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


def test_a_rate_that_is_the_target_is_not_below_it() -> None:
    t = AdaptiveThreshold(0.8, target=0.5, rate_memory=0.0)
    t.update(drafted=4, accepted=2, at_maximum=False)
    assert t.rate == t.target
    assert t.value < 0.8


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
    tokens = [Token(top_prob=0.9), Token(top_prob=0.59), Token(top_prob=0.9)]
    policy = BiLDFallback()
    assert one_round(policy, 9, tokens) == (2, 1, 1)
    assert one_round(policy, 0, tokens) == (2, 1, 0)
    assert one_round(policy, 9, tokens) == (0, 0, 0)
    assert one_round(policy, 9, tokens) == (2, 1, 1)
    plain = BiLDFallback(target_after_rollback=False)
    assert sent(plain, [0, 0], tokens=tokens) == [1, 1]
    assert sent(BiLDFallback(target_first=True), [9, 9], tokens=tokens) == [0, 1]
