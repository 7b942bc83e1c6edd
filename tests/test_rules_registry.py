"""Rules and their text form."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policies.confidence import CMASDConfidence
from policies.rules.context import CSD, FLy
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import PRESETS, RULES, describe_rule, parse_rule
from policies.rules.threshold import (
    BiLDRollback,
    CMASDVerification,
    Ensemble,
    GlobalThreshold,
    Lenience,
    SpecVerification,
    TypicalAcceptance,
)
from policies.spec import parameters
from tests.rule_positions import V, accept, positions


@pytest.mark.parametrize("name", list(RULES))
def test_a_name_makes_its_class_with_defaults_and_is_its_own_text(name: str) -> None:
    rule = parse_rule(name)
    assert type(rule) is RULES[name]
    assert describe_rule(rule) == name
    for key, parameter in parameters(type(rule)).items():
        assert getattr(rule, key) == PRESETS.get(name, {}).get(key, parameter.default)


@pytest.mark.parametrize(
    "text",
    [
        "csd:threshold=3,tau=0.1",
        "csd:threshold=inf",
        "csd-ocm:threshold=2,count_rescued=true",
        "csd-scg:tau=0.3",
        "csd:capacity=100",
        "cm-asd:tau_sign=literal,weights=[1,0,0],vocab_size=2048",
        "spec-verification:beta=1,tau=0",
        "lenience:mode=sample,seed=7",
        "fly:window=2",
    ],
)
def test_text_form_round_trips(text: str) -> None:
    rule = parse_rule(text)
    again = parse_rule(describe_rule(rule))
    assert type(again) is type(rule)
    assert all(getattr(again, key) == getattr(rule, key) for key in parameters(type(rule)))
    assert describe_rule(rule) == describe_rule(again)


def test_values_have_their_types() -> None:
    rule = parse_rule("csd:threshold=inf,tau=0.5,capacity=none,count_first=true")
    assert isinstance(rule, CSD)
    assert (rule.threshold, rule.tau, rule.capacity, rule.count_first) == (
        math.inf, 0.5, None, True,
    )  # fmt: skip


def test_resources_fill_what_the_text_leaves_open() -> None:
    filled = parse_rule("cm-asd", vocab_size=77, elsewhere=1)
    given = parse_rule("cm-asd:vocab_size=5", vocab_size=77)
    assert isinstance(filled, CMASDVerification)
    assert isinstance(given, CMASDVerification)
    assert (filled.vocab_size, given.vocab_size) == (77, 5)
    assert parse_rule("exact", vocab_size=77).lossless


def test_a_calibrated_memory_is_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ocm.npz"
    path.write_bytes(OnlineCorrectionMemory().calibrate([(1, 2)]).content())
    rule = parse_rule(f"csd:memory={path}")
    assert isinstance(rule, CSD)
    assert rule.table.count(1, 2) == 1
    assert describe_rule(rule) == f"csd:memory={path}"
    with pytest.raises(ValueError, match=r"rule 'csd': .*no such correction memory"):
        parse_rule(f"csd:memory={tmp_path / 'absent.npz'}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("typcal", "unknown rule 'typcal': did you mean 'typical'"),
        ("zzz", "unknown rule 'zzz': choose from exact, "),
        ("csd:treshold=3", "rule 'csd' has no parameter 'treshold': did you mean 'threshold'"),
        ("csd-ocm:use_gate=true", "rule 'csd-ocm' has no parameter 'use_gate'"),
        ("exact:beta=1", "rule 'exact' has no parameter 'beta': it takes none"),
        ("csd:tau", "'tau' is not of the form key=value"),
        ("csd:tau=1,tau=1", "parameter 'tau' is given twice"),
        ("csd:tau=2", "rule 'csd': tau is 2.0, expected between 0 and 1"),
        ("csd:count_first=yes", "expected true or false"),
        ("fly:window=x", "window=x: expected an integer"),
        ("bild:threshold=x", "threshold=x: expected a number"),
        ("lenience:mode=sampel", "did you mean 'sample'"),
        ("cm-asd:weights=1", "expected a JSON list"),
        ("cm-asd:weights=[1,", "not a JSON list"),
    ],
)
def test_malformed_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text)


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
