"""Quality of lossy outputs: agreement, BLEU, log-likelihood, and final numbers of answers."""

from __future__ import annotations

import math
import sys
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError, SignalError
from traces.replay.quality import (
    final_number,
    output_log_likelihood,
    reference_number,
    relative_bleu,
    solved,
    token_agreement,
)

tokens = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5))
def test_token_agreement(pairs: list[tuple[list[int], list[int]]]) -> None:
    outputs, references = [a for a, _ in pairs], [b for _, b in pairs]
    longest = [max(len(a), len(b)) for a, b in pairs]
    equal = [
        [a[i : i + 1] == b[i : i + 1] for i in range(n)]
        for (a, b), n in zip(pairs, longest, strict=True)
    ]
    if sum(longest):
        assert token_agreement(outputs, references) == sum(map(sum, equal)) / sum(longest)
    else:
        with pytest.raises(DraftsimError, match="nothing to compare"):
            token_agreement(outputs, references)


def bleu(output: list[str], reference: list[str]) -> float:
    """Corpus BLEU-4 of one pair, by its definition, for texts with matching 4-grams."""
    logs = []
    for n in range(1, 5):
        grams = [
            Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
            for text in (output, reference)
        ]
        logs.append(math.log(sum((grams[0] & grams[1]).values()) / sum(grams[0].values())))
    brevity = min(0.0, 1 - len(reference) / len(output))
    return 100 * math.exp(brevity + sum(logs) / 4)


def test_relative_bleu() -> None:
    pytest.importorskip("sacrebleu")
    output = ["the", "cat", "sat", "on", "the", "mat", "and", "then", "it", "slept"]
    reference = ["the", "cat", "sat", "on", "the", "mat", "while", "it", "then", "slept", "well"]
    assert relative_bleu([" ".join(output)], [" ".join(reference)]) == pytest.approx(
        bleu(output, reference)
    )
    assert relative_bleu(["a b c d e"] * 2, ["a b c d e"] * 2) == pytest.approx(100)


def test_bleu_without_sacrebleu_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(DraftsimError, match=r"sacrebleu.*install '\.\[quality\]'`"):
        relative_bleu(["a"], ["a"])


def test_unpaired_outputs_are_refused() -> None:
    cases: list[tuple[list[list[int]], list[list[int]]]] = [([[1]], []), ([], [])]
    for outputs, references in cases:
        with pytest.raises(DraftsimError, match="one of each per request"):
            token_agreement(outputs, references)


def test_log_likelihood_is_the_mean_over_the_path() -> None:
    keys: dict[str, Any] = {
        "request": np.zeros(3, np.int32), "position": np.array([0, 0, 1], np.int32),
        "offset": np.array([0, 1, 0], np.int16), "match": np.array([0, 0, 1], np.int8),
    }  # fmt: skip
    request = Request("r", "test", 4, 2, 2, "length")
    trace = Trace(
        {**keys, "target_path_logprob": np.array([-1.0, np.nan, -2.0], np.float32)}, [request], 3
    )
    assert output_log_likelihood(trace) == pytest.approx(-1.5)
    with pytest.raises(SignalError, match="target_path_logprob"):
        output_log_likelihood(Trace(keys, [request], 3))


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
