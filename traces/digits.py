"""Figures as they are shown: three significant digits, and counts with their noun."""

from __future__ import annotations

import math


def three_digits(value: float) -> str:
    """Return a number with three significant digits, whole from a hundred on.

    >>> [three_digits(x) for x in (0.00123, 0.05, 0.1234, 1.234, 12.34, 123.4, 12345.6)]
    ['0.00123', '0.0500', '0.123', '1.23', '12.3', '123', '12,346']
    """
    size = abs(value)
    if not math.isfinite(value) or size >= 1e9 or 0 < size < 0.0995:
        return f"{value:#.3g}"
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def counted(count: int, name: str) -> str:
    """Return a count with its noun, whose plural ends in s.

    >>> [counted(n, "token") for n in (0, 1, 2, 1234)]
    ['0 tokens', '1 token', '2 tokens', '1,234 tokens']
    """
    return f"{count:,} {name}{'s' * (count != 1)}"
