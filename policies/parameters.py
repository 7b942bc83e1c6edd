"""Checks of constructor parameters: an impossible value is named with its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def whole(name: str, value: Any, low: int, *, none: bool = False) -> None:
    """Require an integer of at least `low` (or None where `none` allows it)."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, expected an integer >= {low}")
    if value < low:
        raise ValueError(f"{name} is {value}, expected >= {low}")


def within(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Require a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    if not low <= value <= high:
        bound = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value}, expected {bound}")


def one_of(name: str, value: Any, options: Sequence[str]) -> None:
    """Require one of the named options."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(options)}")


def flag(name: str, value: Any) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected true or false")


def ordered(low_name: str, low: float, high_name: str, high: float | None) -> None:
    """Require low <= high (None: no upper bound)."""
    if high is not None and low > high:
        raise ValueError(f"{low_name} is {low}, expected <= {high_name} = {high}")
