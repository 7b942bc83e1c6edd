"""Final numbers of answers, as GSM8K's graders read them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.replay.exact_match import final_number, reference_number, solved


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He pays 3 * 24 = <<3*24=72>>72 dollars.\n#### 72", "72"),
        ("#### 5\nso 6 are left", "5"),
        ("#### 5\n\nNo, again:\n#### 6", "6"),
        ("####-3", "-3"),
        ("#### $1,080", "1080"),
        ("#### Answer\nThe answer is 19.", "19"),
        ("The total is $1,200.00.", "1200"),
        ("1,234,567 people", "1234567"),
        ("one of 1,2 and 13,45", "45"),
        ("The answer is **72**.", "72"),
        ("so x = \\boxed{0.5}", "0.5"),
        ("it costs $.50", "0.5"),
        ("a loss of -$5", "-5"),
        ("it was -3 degrees", "-3"),
        ("it was \u22123 degrees", "-3"),
        ("10-4", "4"),
        ("(10)-4", "4"),
        ("12 - 8", "8"),
        ("a discount of 12.5%", "12.5"),
        ("3 apples, then 4 pears.", "4"),
        ("007", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17 bags x $18 = $306\n#### 306", "306"),
        ("12000", "12000"),
        (" 1,200.50 ", "1200.50"),
        ("19%", "19"),
        ("$7.", "7"),
        ("-3", "-3"),
        ("38 people", None),
        ("f(2) = 0", None),
        ("James Ray", None),
        ("", None),
    ],
)
def test_a_reference_asks_for_a_number_only_if_it_says_so(text: str, number: str | None) -> None:
    assert reference_number(text) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**12),
                   max_value=10**12))  # fmt: skip
def test_numbers_are_read_back_however_they_are_written(number: Decimal) -> None:
    for written in (f"{number:f}", f"{number:,.2f}", f"{number:f}0"):
        assert final_number(f"It is 5, so {written}.") == number
        assert final_number(f"#### {written}") == number
        told = reference_number(written)
        assert told is not None
        assert solved(f"That makes {written} in all", told)
        assert not solved(f"That makes {number + 1:f}", told)


def test_a_text_without_a_number_solves_nothing() -> None:
    assert not solved("nothing", "none")
    assert solved("7.00", "7")
    assert not solved("7.01", "7")
