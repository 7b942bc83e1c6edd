"""Defaults and bounds of every policy, rule and source are those that are written down."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import pytest

from policies.batch.base import KeptInStep, SingleStream
from policies.batch.goodput import Goodput
from policies.batch.sglang import DEFAULT_CONFIG
from policies.batch.tables import BatchTable
from policies.core import Load, Round
from policies.estimators import ConstantAcceptance, IsotonicAcceptance
from policies.registry import POLICIES
from policies.rules.registry import RULES
from tests import parameters
from traces.errors import DraftsimError
from traces.sources.registry import SOURCES

TABLES: list[tuple[Mapping[str, Any], dict[str, dict[str, parameters.Limits]]]] = [
    (POLICIES, parameters.POLICIES),
    (RULES, parameters.RULES),
    (SOURCES, parameters.SOURCES),
]
CASES = [
    pytest.param(kinds[name], parameter, limits, id=f"{name}-{parameter}")
    for kinds, table in TABLES
    for name, known in table.items()
    for parameter, limits in known.items()
]


@pytest.mark.parametrize(("kind", "parameter", "limits"), CASES)
def test_defaults_and_bounds(kind: Any, parameter: str, limits: parameters.Limits) -> None:
    default, least, most = limits
    assert inspect.signature(kind).parameters[parameter].default == default
    kind(**{parameter: least})
    refused: list[float] = [least - 1 if isinstance(least, int) else least - parameters.TINY]
    if most is None:
        kind(**{parameter: 10**6})
    else:
        kind(**{parameter: most})
        refused.append(most + (1 if isinstance(most, int) else 1e-12))
    refused += [math.nan, "1"]  # type: ignore[list-item]
    for value in refused:
        with pytest.raises(
            (ValueError, DraftsimError), match=rf"\b(gamma|m.._suffix|m.._n|{parameter})\b"
        ):
            kind(**{parameter: value})


@pytest.mark.parametrize(("kinds", "table"), TABLES)
def test_none_is_left_out(
    kinds: Mapping[str, type], table: dict[str, dict[str, parameters.Limits]]
) -> None:
    described = {kinds[name] for name in table}
    for kind in set(kinds.values()):
        numbers = {
            name
            for name, parameter in inspect.signature(kind).parameters.items()
            if type(parameter.default) in (int, float)
        }
        known = next((set(table[n]) for n in table if kinds[n] is kind), set())
        assert numbers <= known, kind
        assert kind in described or not numbers


def test_flags_are_as_written_down_where_they_are_not_given() -> None:
    for name, kind in [*POLICIES.items(), *RULES.items(), *SOURCES.items()]:
        flags = {
            parameter.name: parameter.default
            for parameter in inspect.signature(kind).parameters.values()
            if isinstance(parameter.default, bool)
        }
        if flags:
            assert flags == parameters.FLAGS[name.removesuffix("-ocm").removesuffix("-scg")], name


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_estimate_is_a_probability_ends_included(value: float) -> None:
    assert ConstantAcceptance(value)(None, 0) == value
    IsotonicAcceptance("entropy", [0.0, 1.0], [1.0 - value, value])
    for wrong in (value - 1.001, value + 1.001):
        with pytest.raises(ValueError, match="is "):
            ConstantAcceptance(wrong)
        with pytest.raises(ValueError, match="outside \\[0, 1\\]"):
            IsotonicAcceptance("entropy", [0.0, 1.0], [wrong, value])


def test_a_batch_policy_in_a_single_stream_lives_as_long_as_its_engine() -> None:
    """Its measurements of one request decide for the next."""
    run = SingleStream(Goodput(gamma_max=4, warmup=1, acceptance=0.9)).for_run()
    first = run.fresh()
    first.begin_round(Load(1, 10))
    assert first.keep_drafting([])
    first.observe(Round(0, 1, 0, 1, 1, 1), [])
    second = run.fresh()
    second.begin_round(Load(1, 10))
    draft: list[Any] = [None]
    assert second.submit(draft) == 0, "nothing was ever accepted"


def test_tables_that_come_along() -> None:
    """K by batch; SGLang's tiers are those of adaptive_spec_params.py."""
    table = BatchTable()
    lengths = {1: 5, 4: 5, 5: 3, 16: 3, 17: 1, 64: 1, 65: 0, 999: 0}
    assert {batch: table.plan([Load(batch, 9)] * batch) for batch in lengths} == lengths
    steps = {"1": [1, 3, 5, 7], "8": [0, 1, 3], "32": [0, 1], "64": [0]}
    assert {k: list(v["candidate_steps"]) for k, v in DEFAULT_CONFIG.items()} == steps
    assert {k: v["down_hysteresis"] for k, v in DEFAULT_CONFIG.items()} == {
        "1": -0.25, "8": 0.0, "32": 0.0, "64": 0.0,
    }  # fmt: skip


def test_an_engine_in_step_reserves_one_draft_and_no_more() -> None:
    class Never(KeptInStep):
        def __init__(self, longest: int, in_step: bool = True) -> None:
            self.in_step = in_step
            self.draft_up_to(longest)

        def plan(self, loads: Any) -> int:
            return 0

    assert (Never(0).longest, Never(0, in_step=False).longest, Never(3).longest) == (1, 0, 3)
