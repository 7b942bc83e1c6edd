"""Each rule against a reading of its definition on full distributions, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rules.base import ExactMatch, RejectionSampling
from policies.rules.context import CSD, FLy
from policies.rules.ratio import Ensemble, Lenience
from policies.rules.threshold import (
    BiLDRollback,
    CMASDVerification,
    GlobalThreshold,
    SpecVerification,
    TypicalAcceptance,
)
from tests.rule_positions import Position, V, accept, leading, positions, relaxed, seeds


def typical(x: Position, epsilon: float, delta: float) -> bool:
    spread = -sum(v * math.log(v) for v in x.p)
    return bool(x.p[x.d] > min(epsilon, delta * math.exp(-spread)))


def cmasd_gap(x: Position) -> float:
    t = x.token
    confidence = (
        (1 - t.entropy / math.log(V)) * 0.5
        + 0.3 / (1 + math.exp(-2 * t.logit_margin))
        + 0.2 * min(1, t.prob_margin / (1 - 1 / V))
    )
    return float(0.2 + 1.5 * confidence)


DEFINITIONS: list[tuple[Any, Callable[[Position], bool]]] = [
    (ExactMatch(), lambda x: x.d == x.best),
    (RejectionSampling(), lambda x: x.d == x.best),
    (
        SpecVerification(beta=3, tau=1.0),
        lambda x: (
            x.d in np.argsort(-x.p)[:3].tolist() and math.log(x.p[x.best] / x.p[x.d]) <= 1 + 1e-9
        ),
    ),
    (
        CMASDVerification(
            tau_base=0.2, gamma=1.5, top=4, beta=2, weights=(0.5, 0.3, 0.2), vocab_size=V
        ),
        lambda x: (
            x.d in np.argsort(-x.p)[:4].tolist()
            and math.log(x.p[x.best] / x.p[x.d]) <= cmasd_gap(x) + 1e-9
        ),
    ),
    (GlobalThreshold(0.6), lambda x: x.p[x.d] / x.p[x.best] >= 0.6 - 1e-12),
    (Lenience(0.4), lambda x: x.p[x.d] >= (0.4 - 1e-12) * x.p[x.best]),
    (TypicalAcceptance(), lambda x: typical(x, 0.09, 0.3)),
    (TypicalAcceptance(0.5, 0.9), lambda x: typical(x, 0.5, 0.9)),
    (BiLDRollback(1.5), lambda x: x.d == x.best or -math.log(x.p[x.d]) <= 1.5 + 1e-9),
    (
        CSD(tau=0.3, use_memory=False),
        lambda x: x.d == x.best or x.p[x.d] / x.p[x.best] >= 0.3 - 1e-12,
    ),
]


@pytest.mark.parametrize(
    ("rule", "holds"), DEFINITIONS, ids=[type(rule).__name__ for rule, _ in DEFINITIONS]
)
@given(seed=seeds)
@relaxed
def test_rule_is_its_definition(rule: Any, holds: Callable[[Position], bool], seed: int) -> None:
    drafted = positions(seed)
    assert accept(rule, drafted) == leading([holds(x) for x in drafted])


@given(seed=seeds, weight=st.floats(0.05, 1))
@relaxed
def test_greedy_ensemble_brackets_the_argmax_of_the_mixture(seed: int, weight: float) -> None:
    certain, possible = Ensemble(weight), Ensemble(weight, undecided="accept")
    for x in positions(seed):
        truly = int((weight * x.p + (1 - weight) * x.q).argmax()) == x.d
        assert accept(certain, [x]) <= truly <= accept(possible, [x])


@given(seed=seeds, weight=st.floats(0.05, 1))
@relaxed
def test_greedy_ensemble_leaves_open_only_what_the_leading_values_do(
    seed: int, weight: float
) -> None:
    for x in positions(seed):
        second = np.sort(x.q)[-2]
        mine = weight * x.p[x.d] + (1 - weight) * x.q[x.d]
        # No other token has more than the best of both; the best target token has at least
        # its own share.
        certain = x.match or mine > weight * x.p.max() + (1 - weight) * second
        possible = x.match or mine > weight * x.p.max()
        assert accept(Ensemble(weight), [x]) == certain
        assert accept(Ensemble(weight, undecided="accept"), [x]) == possible


def test_greedy_ensemble_decides_most_positions() -> None:
    drafted = [x for seed in range(60) for x in positions(seed) if not x.match]
    open_ = sum(
        accept(Ensemble(0.5), [x]) != accept(Ensemble(0.5, undecided="accept"), [x])
        for x in drafted
    )
    assert 0 < open_ < len(drafted) / 2


@given(seed=seeds, window=st.integers(0, 4), theta=st.floats(0, 1))
@relaxed
def test_fly_is_its_definition(seed: int, window: int, theta: float) -> None:
    drafted = positions(seed)
    n, expected = len(drafted), 0
    for i, x in enumerate(drafted):
        unsure = -(x.p * np.log(x.p)).sum() / math.log(V) >= theta
        returns = i + window < n and all(y.match for y in drafted[i + 1 : i + window + 1])
        if not (x.match or (unsure and returns)):
            break
        expected += 1
    assert accept(FLy(theta, window, vocab_size=V), drafted) == expected


@given(seed=seeds)
@relaxed
def test_limits_in_which_a_lossy_rule_is_exact(seed: int) -> None:
    drafted = positions(seed)
    exact = accept(ExactMatch(), drafted)
    for rule in (
        SpecVerification(beta=1, tau=0),
        SpecVerification(beta=5, tau=0),
        CMASDVerification(tau_base=0, gamma=0, vocab_size=V),
        CMASDVerification(tau_base=3, top=1, vocab_size=V),
        CSD(threshold=math.inf),
        CSD(use_memory=False, tau=1),
        CSD(use_gate=False, threshold=math.inf),
        GlobalThreshold(1),
        TypicalAcceptance(temperature=0),
        Lenience(1),
        Ensemble(1),
        BiLDRollback(0),
        FLy(entropy_threshold=1.01, window=0, vocab_size=V),
        FLy(entropy_threshold=0, window=len(drafted), vocab_size=V),
    ):
        assert accept(rule, drafted) == exact, type(rule).__name__


@given(seed=seeds)
@relaxed
def test_looser_parameters_accept_no_less(seed: int) -> None:
    drafted = positions(seed)
    for strict, loose in (
        (SpecVerification(2, 1), SpecVerification(4, 2)),
        (CMASDVerification(0.1, 1, vocab_size=V), CMASDVerification(0.5, 2, vocab_size=V)),
        (GlobalThreshold(0.8), GlobalThreshold(0.1)),
        (TypicalAcceptance(0.2, 0.6), TypicalAcceptance(0.1, 0.3)),
        (BiLDRollback(1), BiLDRollback(3)),
        (Ensemble(0.8), Ensemble(0.3)),
        (FLy(0.6, 2, vocab_size=V), FLy(0.2, 1, vocab_size=V)),
    ):
        assert accept(strict, drafted) <= accept(loose, drafted), type(strict).__name__
