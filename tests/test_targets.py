"""Service-level objectives as people write them."""

from __future__ import annotations

import math

import pytest

from simulator.targets import Targets, parse_targets, parse_time
from traces.errors import DraftsimError


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("tpot=0.05", Targets(tpot_s=0.05)),
        ("ttft=0.2, tpot=0.05", Targets(0.2, 0.05)),
        ("ttft=200ms,tpot=30ms", Targets(0.2, 0.03)),
        ("ttft = 2 s, tpot=30 ms, p=0.9", Targets(2.0, 0.03, 0.9)),
        ("ttft=1e3ms", Targets(1.0)),
    ],
)
def test_times_have_units_or_are_seconds(text: str, targets: Targets) -> None:
    assert parse_targets(text) == targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "bound nothing: give ttft, tpot or both"),
        (
            "ttft",
            "'ttft' is not of the form key=value (targets: ttft, tpot, p), as in "
            "ttft=200ms,tpot=0.03,p=0.95",
        ),
        ("itl=1", "has no target 'itl': choose from ttft, tpot, p"),
        ("ttft=x", "ttft is 'x', expected a time such as 200ms, 0.2s or 0.2"),
        ("ttft=ms", "ttft is 'ms', expected a time"),
        ("ttft=2h", "ttft is '2h', expected a time"),
        ("tpot=nan", "tpot is 'nan', expected more than 0 seconds"),
        ("tpot=-3ms", "tpot is '-3ms', expected more than 0 seconds"),
        ("ttft=0.1,ttft=0.2", "target 'ttft' is given twice"),
        ("ttft=1,p=most", "p is 'most', expected a number such as 0.95"),
        ("ttft=1,p=0", "share is 0.0, expected above 0"),
        ("ttft=1,p=1.5", "share is 1.5, expected above 0"),
        ("p=0.9", "bound nothing"),
    ],
)
def test_what_is_no_objective_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(DraftsimError) as error:
        parse_targets(text)
    assert message in str(error.value)
    assert str(error.value).startswith(f"--slo {text}")
    assert "\n" not in str(error.value)


def test_other_options_are_named_and_impossible_targets_refused() -> None:
    assert parse_time("30ms", "--tpot") == 0.03
    with pytest.raises(DraftsimError, match="--tpot is '0', expected more than 0"):
        parse_time("0", "--tpot")
    with pytest.raises(DraftsimError, match="expected > 0 seconds"):
        Targets(math.nan)


def test_targets_are_said_in_words() -> None:
    assert str(Targets(0.2, 0.03)) == "TTFT 200 ms and TPOT 30 ms"
    assert str(Targets(tpot_s=0.03)) == "TPOT 30 ms"


@pytest.mark.parametrize("share", [True, False])
def test_the_example_of_an_error_is_read(share: bool) -> None:
    with pytest.raises(DraftsimError) as error:
        parse_targets("foo", share=share)
    found = parse_targets(str(error.value).split(", as in ")[1], share=share)
    assert found == Targets(0.2, 0.03)
