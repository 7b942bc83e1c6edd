"""CM-ASD: its confidence and its windows."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import CMASD, CMASDConfidence
from tests.policy_rounds import Token, one_round, sent


def confidence(entropy: Any, logit_margin: Any, prob_margin: Any, *args: Any, **named: Any) -> Any:
    """Return the confidence of these signals under the other parameters."""
    signals = {"entropy": entropy, "logit_margin": logit_margin, "prob_margin": prob_margin}
    return CMASDConfidence.of(*args, **named)(signals.__getitem__)


@given(st.floats(0, 1), st.floats(0, 50), st.floats(0, 1), st.integers(2, 10**6))
def test_cmasd_confidence_components(
    share: float, logit_margin: float, prob_margin: float, vocab_size: int
) -> None:
    entropy = share * math.log(vocab_size)
    args = (entropy, logit_margin, prob_margin, vocab_size)
    intended = confidence(*args, weights=(1, 0, 0))
    literal = confidence(*args, weights=(1, 0, 0), entropy_sign="literal")
    assert intended == pytest.approx(1 - share)
    assert literal == pytest.approx(1 - intended)
    assert 0.5 <= confidence(*args, weights=(0, 1, 0)) <= 1
    softmax = confidence(*args, weights=(0, 0, 1))
    assert softmax == pytest.approx(min(1.0, prob_margin * vocab_size / (vocab_size - 1)))
    parts = [confidence(*args, weights=w) for w in np.eye(3).tolist()]
    assert confidence(*args, weights=(0.2, 0.3, 0.5)) == pytest.approx(
        np.dot((0.2, 0.3, 0.5), parts)
    )


def test_cmasd_confidence_of_arrays_is_that_of_their_elements() -> None:
    rng = np.random.default_rng(0)
    h, m, s = rng.exponential(1, 50), rng.exponential(4, 50), rng.random(50)
    whole = confidence(h, m, s, 5000, beta=0.7)
    single = [
        confidence(float(a), float(b), float(c), 5000, beta=0.7)
        for a, b, c in zip(h, m, s, strict=True)
    ]
    np.testing.assert_allclose(whole, single, rtol=1e-12)


@pytest.mark.parametrize("sign", ["intended", "literal"])
@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.2, 0.3, 0.5)])
def test_cmasd_policy_scores_tokens_alike(sign: Any, weights: Any) -> None:
    rng = np.random.default_rng(2)
    policy = CMASD(weights=weights, entropy_sign=sign, beta=0.6, vocab_size=50)
    for h, m, s in zip(rng.exponential(1, 40), rng.exponential(4, 40), rng.random(40), strict=True):
        token = Token(entropy=float(h), logit_margin=float(m), prob_margin=float(s))
        expected = confidence(float(h), float(m), float(s), 50, 0.6, weights, sign)
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


@given(
    st.lists(st.tuples(st.floats(0, 12), st.floats(0, 50), st.floats(0, 1)), max_size=14),
    st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.2, 0.3, 0.5)]),
    st.sampled_from(["intended", "literal"]),
    st.floats(0, 3),
    st.integers(1, 4),
    st.integers(4, 12),
)
def test_cmasd_goes_on_while_the_mean_confidence_allows_more(
    signals: list[tuple[float, float, float]],
    weights: Any,
    sign: Any,
    alpha: float,
    low: int,
    high: int,
) -> None:
    """The causal window is the printed one over the tokens so far, to the last bit."""
    policy = CMASD("causal", low, high, alpha, 0.7, weights, sign, vocab_size=5000)
    tokens = [Token(entropy=h, logit_margin=m, prob_margin=s) for h, m, s in signals]
    assert policy.keep_drafting([])
    for n, total in enumerate(accumulate(map(policy.confidence, tokens)), 1):
        window = min(high, max(low, math.floor(max(0.0, alpha * (total / n) * high))))
        assert policy.keep_drafting(tokens[:n]) is (n < window)
