"""Rules and their text form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import PRESETS, RULES, describe_rule, parse_rule
from policies.rules.threshold import CMASDVerification
from policies.spec import parameters


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
    path = OnlineCorrectionMemory().calibrate([(1, 2)]).save(tmp_path / "ocm.npz")
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
