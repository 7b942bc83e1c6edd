"""Quality of an output: agreement with the target's own, likelihood, BLEU, and exact match.

Exact match (`solved`) follows GSM8K (Cobbe et al. 2021,
https://github.com/openai/grade-school-math): a reference ends in ``#### 72``, and of an answer that
does not, the last number counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, SignalError, missing

_NUMBER = (
    r"((?:(?<![0-9A-Za-z)%])[-\u2212])?)\$?"  # a sign, not the minus of a difference
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*\$?{_NUMBER}")
_ALONE = re.compile(rf"\A\s*\$?{_NUMBER}\s*[%$]?\s*\.?\s*\Z")


def token_agreement(outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float:
    """Return the share of output tokens equal to the target's own output at the same position.

    One pair per request, as token ids.  Tokens beyond the end of the shorter output of
    a pair count as different: the denominator is the longer length.
    """
    _check_pairs(outputs, references)
    equal = total = 0
    for output, reference in zip(outputs, references, strict=True):
        equal += sum(a == b for a, b in zip(output, reference, strict=False))
        total += max(len(output), len(reference))
    if total == 0:
        raise DraftsimError("all outputs are empty: there is nothing to compare")
    return equal / total


def output_log_likelihood(trace: Trace) -> float:
    """Return the target's mean log-probability of the recorded output tokens, nats per token.

    The probabilities are those of the recording's sampling (T = 1 if greedy).  For the output of a
    lossy rule, pass the recording that was decoded under it, and compare with the target's greedy
    output.

    Raises SignalError if the recording does not hold the column.
    """
    if "target_path_logprob" not in trace.columns:
        raise SignalError(
            "this trace lacks the column target_path_logprob, the target's log-probability of "
            "its output: record one with `draftsim profile`"
        )
    values = trace.columns["target_path_logprob"][trace.on_path].astype(np.float64)
    return float(values.mean())


def relative_bleu(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of `outputs` against the greedy `references`, 0..100 (CM-ASD, Table V).

    Corpus BLEU of sacrebleu with its default tokenisation.  Raises DraftsimError if that is not
    installed, or the lists do not pair up.
    """
    _check_pairs(outputs, references)
    try:
        import sacrebleu
    except ImportError:
        raise missing(["sacrebleu"], "relative BLEU") from None
    return float(sacrebleu.corpus_bleu(list(outputs), [list(references)]).score)


def final_number(text: str) -> Decimal | None:
    """Return the number after the last ``####`` if there is one, else the last number of `text`.

    Thousands separators, a trailing dot, $ and % do not belong to it; None without a number.

    >>> final_number("She pays 2 * $600 = $1,200.00.")
    Decimal('1200.00')
    """
    found = [*_MARKED.finditer(text)] or [*_ANY.finditer(text)]
    return _value(found[-1]) if found else None


def reference_number(text: str) -> str | None:
    """Return the number that a reference answer gives, in digits: after ``####``, or alone.

    None for any other text: whether an answer says the same could not be told from numbers.
    """
    found = [*_MARKED.finditer(text)] or [*_ALONE.finditer(text)]
    return f"{_value(found[-1]):f}" if found else None


def solved(text: str, reference: str) -> bool:
    """Return True if an answer and its `reference` have the same final number."""
    number = final_number(text)
    return number is not None and number == final_number(reference)


def _check_pairs(outputs: Sequence[object], references: Sequence[object]) -> None:
    if len(outputs) != len(references) or not outputs:
        raise DraftsimError(
            f"{len(outputs)} outputs for {len(references)} references: expected one of each per "
            "request, and at least one"
        )


def _value(found: re.Match[str]) -> Decimal:
    sign, digits = found.groups()
    return Decimal(("-" if sign else "") + digits.replace(",", ""))
