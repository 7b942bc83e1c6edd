"""Parameters of a rule: their meaning, those it takes from the run, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from policies.confidence import CMASDConfidence
from policies.rules.context import CSD, FLy
from policies.rules.ratio import Ensemble, Lenience
from policies.rules.threshold import (
    BiLDRollback,
    CMASDVerification,
    GlobalThreshold,
    SpecVerification,
    TypicalAcceptance,
)
from tests.rule_positions import V, accept, positions


def unsure_and_sure() -> tuple[SimpleNamespace, SimpleNamespace]:
    """A drafted token of an unsure drafter, and one of a sure one."""
    unsure = SimpleNamespace(entropy=math.log(V), logit_margin=0.0, prob_margin=0.0)
    return unsure, SimpleNamespace(entropy=0.0, logit_margin=50.0, prob_margin=1 - 1 / V)


def test_cmasd_intended_is_strict_where_the_drafter_is_unsure_and_literal_lenient() -> None:
    unsure, sure = unsure_and_sure()
    entropy_only: dict[str, Any] = {
        "weights": (1, 0, 0),
        "vocab_size": V,
        "tau_base": 0.1,
        "gamma": 2,
    }
    intended = CMASDVerification(**entropy_only)
    literal = CMASDVerification(**entropy_only, tau_sign="literal")
    assert intended.threshold(unsure) == pytest.approx(0.1)
    assert intended.threshold(sure) == pytest.approx(2.1)
    assert literal.threshold(unsure) == pytest.approx(2.1)
    assert literal.threshold(sure) == pytest.approx(0.1)
    # Both literal signs together cancel for entropy alone, and give the prose's behaviour.
    both = CMASDVerification(**entropy_only, tau_sign="literal", entropy_sign="literal")
    assert both.threshold(unsure) == pytest.approx(intended.threshold(unsure))
    assert both.threshold(sure) == pytest.approx(intended.threshold(sure))


def test_cmasd_threshold_uses_the_shared_confidence() -> None:
    token = SimpleNamespace(entropy=1.1, logit_margin=0.7, prob_margin=0.2)
    rule = CMASDVerification(gamma=2, beta=3, vocab_size=V)
    confidence = CMASDConfidence.of(V, beta=3)(vars(token).__getitem__)
    assert rule.threshold(token) == pytest.approx(0.1 + 2 * confidence)


def test_a_component_of_weight_zero_is_not_read() -> None:
    rule = CMASDVerification(weights=(0, 0, 1), vocab_size=V)
    assert rule.reads == ("prob_margin",)
    assert rule.threshold(SimpleNamespace(prob_margin=0.0)) == pytest.approx(0.1)


@pytest.mark.parametrize("rule", [CMASDVerification(), FLy(window=0)])
def test_vocabulary_size_comes_from_the_run_or_is_asked_for(rule: Any) -> None:
    with pytest.raises(ValueError, match="give it vocab_size"):
        rule.fresh().begin_run(None, 0.0)
    mine = rule.fresh()
    mine.begin_run(V, 0.0)
    own = type(rule)(vocab_size=V)
    own.begin_run(999, 0.0)
    drafted = positions(3)
    assert mine.vocab_size == own.vocab_size == V
    assert 0 <= accept(mine, drafted) <= len(drafted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpecVerification(beta=0), "beta is 0, expected >= 1"),
        (lambda: SpecVerification(tau=-1), "tau is -1, expected >= 0"),
        (lambda: CMASDVerification(weights=(1, 1, 1)), "sum to 1"),
        (lambda: CMASDVerification(tau_sign="up"), "tau_sign is 'up', expected one of intended"),  # type: ignore[arg-type]
        (lambda: GlobalThreshold(0), "tau is 0, expected above 0"),
        (lambda: GlobalThreshold(1.5), "tau is 1.5, expected between 0 and 1"),
        (lambda: TypicalAcceptance(temperature=0.7), "temperature is 0.7, expected 0 or 1"),
        (lambda: Lenience(0), "factor is 0"),
        (lambda: Ensemble(1.1), "weight is 1.1"),
        (lambda: Ensemble(mode="hot"), "mode is 'hot', expected one of greedy, sample"),  # type: ignore[arg-type]
        (lambda: BiLDRollback(-1), "threshold is -1"),
        (lambda: CSD(threshold=-1), "threshold is -1"),
        (lambda: CSD(threshold=math.nan), "threshold is nan"),
        (lambda: CSD(use_memory=False, use_gate=False), "would accept every token"),
        (lambda: CSD(capacity=0), "capacity is 0"),
        (lambda: FLy(window=-1), "window is -1"),
        (lambda: FLy(vocab_size=1), "vocab_size is 1"),
    ],
)
def test_impossible_parameters_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_modes_that_do_not_fit_the_temperature_are_refused() -> None:
    with pytest.raises(ValueError, match="sampled at temperature 1, not 0"):
        Lenience(mode="sample").begin_run(V, 0.0)
    with pytest.raises(ValueError, match="use mode=greedy"):
        Ensemble(mode="sample").begin_run(V, 0.0)
    with pytest.raises(ValueError, match="use mode=sample"):
        Ensemble().begin_run(V, 0.7)
    Lenience(mode="sample").begin_run(V, 1.0)
    with pytest.raises(ValueError, match=r"not 1 with top-p 0\.9"):
        Lenience(mode="sample").begin_run(V, 1.0, 0.9)
    Ensemble(mode="sample").begin_run(V, 1.0, 0.9)
