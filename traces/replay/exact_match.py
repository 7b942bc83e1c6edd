"""A task's score by exact match: whether a text ends in the right number.

The convention of GSM8K (Cobbe et al. 2021, https://github.com/openai/grade-school-math): a
reference ends in ``#### 72``, and of an answer that does not, the last number counts.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = (
    r"((?:(?<![0-9A-Za-z)%])[-\u2212])?)\$?"  # a sign, not the minus of a difference
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*\$?{_NUMBER}")
_ALONE = re.compile(rf"\A\s*\$?{_NUMBER}\s*[%$]?\s*\.?\s*\Z")


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


def _value(found: re.Match[str]) -> Decimal:
    sign, digits = found.groups()
    return Decimal(("-" if sign else "") + digits.replace(",", ""))
