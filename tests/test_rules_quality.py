"""Quality measures against hand counts and an independent BLEU."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.acceptance.trace import Request, Trace
from traces.errors import DraftsimError, SignalError
from traces.replay.quality import (
    output_log_likelihood,
    relative_bleu,
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
    with pytest.raises(DraftsimError, match=r"install '\.\[quality\]'"):
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
