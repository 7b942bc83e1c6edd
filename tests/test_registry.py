"""Policies by name: parsing, describing, capping."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import (
    POLICIES,
    SVIP,
    DraftPolicy,
    DraftProbability,
    Fixed,
    Goodput,
    HFHeuristic,
    SingleStream,
    TextbookCost,
    capped,
    describe,
    parse_policy,
    parse_serving_policy,
    policy_names,
    speculate,
)
from policies.batch.base import Policy
from policies.checks import ScriptedDecoder
from policies.core import own_copy
from policies.spec import parameters, parse_spec
from traces.sources.lookups.sources import REST
from traces.sources.registry import parse_source

TABLES = (
    "batch-table", "batch-table-hysteresis", "sglang-adaptive", "sglang-throughput", "tensorrt-llm",
)  # fmt: skip
"""Their draft lengths are entries of a table, which nothing lowers."""


def settings_of(policy: Policy) -> dict[str, Any]:
    return {key: getattr(policy, key) for key in parameters(type(policy))}


@pytest.mark.parametrize("name", POLICIES)
def test_names_build_and_describe_themselves(name: str) -> None:
    policy = parse_serving_policy(name)
    assert type(policy) is POLICIES[name]
    assert describe(policy) == name
    assert isinstance(parse_policy(name), DraftPolicy)
    assert describe(parse_policy(name)) == name


def test_policies_promised_at_the_command_line() -> None:
    promised = {
        "autoregressive", "fixed", "confidence", "hf-heuristic", "gammatune", "gammatune-plus",
        "svip", "adaedl", "draft-and-verify", "oracle",
    }  # fmt: skip
    assert promised <= set(policy_names("single"))
    assert set(policy_names("single")) | set(policy_names("batch")) == set(policy_names())
    assert isinstance(parse_policy("goodput"), SingleStream)
    assert isinstance(parse_serving_policy("goodput"), Goodput)


@pytest.mark.parametrize(
    "text",
    [
        "fixed:gamma=4",
        "hf-heuristic:gamma=4,full_accept_means=budget,gamma_max=40",
        "gammatune:gamma=8,eta=0.125,delta=1.5",
        "adaedl:keep_trigger_token=false",
        "oracle:convention=run+1",
        "cm-asd:weights=[1,0,0]",
        "cm-asd:window=lagged,alpha=1e-05",
        "batch-table:table=[[1,4,5],[5,16,3]]",
        'sglang-adaptive:config={"1":{"candidate_steps":[1,3]}}',
        'tensorrt-llm:schedule={"4":4,"8":2},window=10',
        "graph-aware:gamma=2,graphs=[1,8,64]",
        "ucb:variant=ucb_paper,gammas=[1,2,8]",
    ],
)
def test_text_survives_a_round_trip(text: str) -> None:
    policy = parse_serving_policy(text)
    assert describe(policy) == text
    assert settings_of(parse_serving_policy(describe(policy))) == settings_of(policy)


@given(
    st.integers(1, 30),
    st.sampled_from(["sent", "budget"]),
    st.floats(0, 1),
    st.sampled_from(["transient", "persistent"]),
    st.one_of(st.none(), st.integers(30, 60)),
)
def test_round_trip_of_any_setting(
    gamma: int, means: Any, threshold: float, persist: Any, longest: int | None
) -> None:
    policy = HFHeuristic(gamma, means, threshold, "off", persist, longest)
    assert settings_of(parse_policy(describe(policy))) == settings_of(policy)


def test_whitespace_none_and_case_of_flags() -> None:
    policy = parse_policy(" hf-heuristic: gamma = 7 , gamma_max=none ")
    assert describe(policy) == "hf-heuristic:gamma=7"
    assert parse_policy("adaedl:keep_trigger_token=False").keep_trigger_token is False  # type: ignore[attr-defined]


@pytest.mark.invariant(15)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamatune", "unknown policy 'gamatune': did you mean 'gammatune'?"),
        ("", "unknown policy '': choose from autoregressive, fixed"),
        ("fixed:gama=3", "policy 'fixed' has no parameter 'gama': did you mean 'gamma'?"),
        ("autoregressive:gamma=1", "'autoregressive' has no parameter 'gamma': it takes none"),
        ("fixed:3", "policy 'fixed': '3' is not of the form key=value"),
        ("fixed:gamma=three", "policy 'fixed': gamma=three: expected an integer"),
        ("fixed:gamma=-1", "policy 'fixed': gamma is -1, expected >= 0"),
        ("fixed:gamma=2,gamma=3", "parameter 'gamma' is given twice"),
        ("confidence:confidence_threshold=nan", "expected a finite number"),
        ("oracle:convention=rnu+1", "did you mean 'run+1'?"),
        ("adaedl:keep_trigger_token=1", "expected true or false"),
        ("cm-asd:weights=[1,0", "not a JSON list"),
        ("cm-asd:weights=3", "expected a JSON list"),
        ('cm-asd:weights=["a",0,1]', "policy 'cm-asd': "),
        ("batch-table:table=[1,2,3]", "policy 'batch-table': "),
        ("ucb:gammas=[[1]]", "policy 'ucb': "),
        ("goodput:cost=3", "expected a JSON list"),
        ("sglang-adaptive:graph_batches=[null,2]", "graph_batches is None, expected an integer"),
        ("oracle:gamma_max=[3]", "policy 'oracle': gamma_max is [3]"),
        ("fixed:gamma=[3]", "policy 'fixed': gamma is [3], expected an integer"),
    ],
)
def test_mistakes_are_named_with_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


@pytest.mark.invariant(15)
@settings(max_examples=30)
@given(st.text(max_size=30))
def test_any_text_parses_or_raises_a_value_error(text: str) -> None:
    for prefix in ("", "fixed:", "cm-asd:weights=", "batch-table:table=["):
        with suppress(ValueError):
            assert isinstance(parse_policy(prefix + text), DraftPolicy)


class Unannotated(DraftPolicy):
    """A constructor as README writes one: types are those of the defaults."""

    def __init__(  # type: ignore[no-untyped-def]
        self, threshold=0.5, gamma=8, strict=False, mode="mean", steps=(1, 2), other=None,
        known: Nowhere | None = None, count: int = 3,  # type: ignore[name-defined]  # noqa: F821
    ):  # fmt: skip
        self.threshold, self.gamma, self.strict, self.mode = threshold, gamma, strict, mode
        self.steps, self.other, self.known, self.count = steps, other, known, count

    def keep_drafting(self, draft: Any) -> bool:
        return len(draft) < self.gamma


class Tempered(DraftPolicy):
    """Has parameters that are named as lengths are."""

    longest = 4

    def __init__(self, gamma: Any = 50.0, gammas: Any = None, k: Literal[1, 2, 3] = 2) -> None:
        self.gamma, self.gammas, self.k = gamma, gammas, k

    def keep_drafting(self, draft: Any) -> bool:
        return len(draft) < self.longest


def test_a_choice_of_numbers_is_a_number() -> None:
    assert parse_spec("mine:k=3", "policy", {"mine": Tempered})[2] == {"k": 3}
    with pytest.raises(ValueError, match="k=4: choose from 1, 2, 3"):
        parse_spec("mine:k=4", "policy", {"mine": Tempered})


def test_a_parameter_without_an_annotation_has_the_type_of_its_default() -> None:
    table = {"mine": Unannotated}
    text = "mine:threshold=1,gamma=4,strict=true,mode=max,steps=[3],count=2"
    given = parse_spec(text, "policy", table)[2]
    assert given == {
        "threshold": 1.0, "gamma": 4, "strict": True, "mode": "max", "steps": [3], "count": 2
    }  # fmt: skip
    assert type(given["threshold"]) is float
    assert type(given["gamma"]) is int
    # A whole default may be a share.
    assert parse_spec("mine:gamma=0.5", "policy", table)[2] == {"gamma": 0.5}
    for wrong, message in (
        ("threshold=much", "threshold=much: expected a number"),
        ("gamma=many", "gamma=many: expected a number"),
        ("strict=1", "expected true or false"),
        ("steps=3", "expected a JSON list"),
        ("other=3", "other=3: the constructor declares no type: annotate it, as in other: float"),
        ("known=a: b", "annotate it, as in known: float = 0.5"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_spec(f"mine:{wrong}", "policy", table)


def test_resources_reach_the_policies_that_take_them() -> None:
    cost, estimator = TextbookCost(2.0, 0.5), DraftProbability()
    extra: dict[str, Any] = {"cost": cost, "estimator": estimator}
    reached = set()
    for name in policy_names():
        policy = parse_serving_policy(name, **extra)
        for key in set(extra) & set(parameters(type(policy))):
            assert getattr(policy, key) is extra[key]
            reached.add(key)
    assert reached == set(extra)


def test_capped_lowers_defaults_and_leaves_choices_alone() -> None:
    assert describe(capped(SVIP(), 24)) == "svip:gamma_max=24"
    assert describe(capped(SVIP(gamma_max=30), 24)) == "svip:gamma_max=30"
    assert describe(capped(Fixed(), 24)) == "fixed"
    assert describe(capped(HFHeuristic(), 24)) == "hf-heuristic:gamma_max=24"
    assert describe(capped(HFHeuristic(gamma=30), 24)) == "hf-heuristic:gamma=30,gamma_max=30"
    # A first draft length is lowered although the longest is chosen.
    assert capped(HFHeuristic(gamma_max=7), 3, explicit=["gamma_max"]).gamma == 3
    # A gamma that is no length, or not the longest draft, stays as it is.
    for made in (Tempered(), Tempered(gamma=50), Tempered("auto"), Tempered(gammas=None)):
        assert capped(made, 24) is made
    # In text even a value equal to the default is a choice.
    assert describe(parse_policy("svip:gamma_max=40", max_gamma=24)) == "svip"


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in TABLES])
@pytest.mark.parametrize("longest", [1, 3, 24])
def test_capped_policies_never_draft_past_the_cap(name: str, longest: int) -> None:
    for accept in (0.6, 0.97, 1.0):
        policy = own_copy(parse_policy(name, max_gamma=longest), 1000)
        decoder = ScriptedDecoder(3, 2000, policy.reads, accept=accept, eos=False)
        assert max(r.draft_forwards for r in islice(speculate(decoder, policy), 60)) <= longest


def test_a_text_in_brackets_is_a_name_where_a_name_is_expected() -> None:
    source = parse_source("rest:corpus=[1]")
    assert isinstance(source, REST)
    assert source.corpus == "[1]"
