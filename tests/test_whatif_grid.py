"""Grids as text, and grids that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import parse_policy
from simulator.whatif.axes import expand, parse_axis, with_gammas
from simulator.whatif.cells import Prices
from simulator.whatif.sweep import Sweep
from tests.studies import recorded, study
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("0.1:0.4:4", (0.1, 0.2, 0.3, 0.4)),
        ("0.01:1:3log", (0.01, 0.1, 1.0)),
        ("1..4", (1, 2, 3, 4)),
        ("2..8..3", (2, 5, 8)),
        ("0.3,0.5,0.3", (0.3, 0.5)),
        ("7", (7,)),
    ],
)
def test_axes(text: str, points: tuple[float, ...]) -> None:
    assert parse_axis(text, "c") == pytest.approx(points)


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.integers(2, 50))
def test_axis_ends_and_counts(a: float, b: float, count: int) -> None:
    for suffix in ("", "log"):
        points = parse_axis(f"{a!r}:{b!r}:{count}{suffix}", "c")
        assert points[0] == pytest.approx(a)
        assert points[-1] == pytest.approx(b)
        assert len(points) <= count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "'x' is no number"),
        ("1:2", "no number"),
        ("0:1:5log", "both ends above 0"),
        ("1:2:0", "asks for 0 points"),
        ("1:2:9999999", "asks for 9999999 points"),
        ("4..1", "counts from 4 up to 1"),
        ("-1", "--c holds -1, expected at least 0"),
        ("nan", "not finite"),
    ],
)
def test_axis_errors(text: str, message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        parse_axis(text, "c", low=0)


def test_whole_axes_round_ranges_and_refuse_fractions() -> None:
    assert parse_axis("1:10:4log", "batch", whole=True) == (1, 2, 5, 10)
    with pytest.raises(DraftsimError, match="no whole number"):
        parse_axis("1.5", "batch", whole=True)


def test_braces_multiply() -> None:
    assert expand(["a:x={1..2},y={u,v}", "b"]) == [
        "a:x=1,y=u", "a:x=1,y=v", "a:x=2,y=u", "a:x=2,y=v", "b",
    ]  # fmt: skip
    table = 'batch-table:table=[[1,2]],extra={"a":1}'
    assert expand([table]) == [table]  # a JSON object is no list of alternatives
    with pytest.raises(DraftsimError, match="neither"):
        expand(["fixed:gamma={1,}"])


def test_gammas_go_to_the_policies_that_have_one() -> None:
    assert with_gammas(["fixed", "svip", "confidence:gamma=4"], [1, 2]) == [
        "fixed:gamma=1", "fixed:gamma=2", "svip", "confidence:gamma=4",
    ]  # fmt: skip
    with pytest.raises(DraftsimError, match="none of svip has a parameter gamma"):
        with_gammas(["svip"], [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alphas": (1.0,)}, "alpha is 1, expected strictly"),
        ({"batches": (0,)}, "batches are"),
        ({"method": "guess"}, "tilt is 'guess'"),
        ({"resamples": -1}, "resamples is -1"),
    ],
)
def test_impossible_grids(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsimError, match=message):
        study(**changes)


def test_impossible_prices_and_policies() -> None:
    with pytest.raises(DraftsimError, match="nothing to price with"):
        Prices()
    with pytest.raises(DraftsimError, match="c is -1"):
        Prices((-1.0,))
    with pytest.raises(DraftsimError, match="verify is 0"):
        Prices((0.1,), verify=0)
    with pytest.raises(DraftsimError, match="no policy"):
        Sweep(recorded(), {}, Prices((0.1,)))
    bare = synthetic_trace(0.5, requests=2, tokens=20)
    with pytest.raises(DraftsimError, match="policy svip reads"):
        Sweep(bare, {"svip": parse_policy("svip")}, Prices((0.1,)))
