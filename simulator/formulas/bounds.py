"""Argument checks and the sum that most of these formulas share."""

from __future__ import annotations

import math

from traces.errors import DraftsimError


def require(name: str, value: float, low: float, high: float = math.inf) -> float:
    """Return `value` itself if it lies in [low, high]; else a `DraftsimError` that says so."""
    if not low <= value <= high:
        bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        raise DraftsimError(f"{name} is {value}, expected {bound}")
    return value


def geometric_sum(alpha: float, terms: float) -> float:
    """Return (1 - alpha**terms) / (1 - alpha), accurate up to and at alpha = 1, for real terms."""
    require("alpha", alpha, 0, 1)
    require("terms", terms, 0)
    if terms == 1:
        return 1.0
    if alpha == 1:
        return float(terms)
    if alpha == 0 or terms == 0:
        return float(terms > 0)
    return -math.expm1(terms * math.log(alpha)) / (1 - alpha)
