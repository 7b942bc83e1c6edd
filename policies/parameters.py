"""Parameters of policies, rules and sources: default and bounds are declared in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import Any


class Checked:
    """A base of dataclasses whose parameters are checked when an object is made."""

    def __post_init__(self) -> None:
        """Raise ValueError if a `parameter` has an impossible value; the message has the bound."""
        made: Any = self
        for one in fields(made):
            value = getattr(self, one.name)
            if "check" in one.metadata and not (value is None and one.default is None):
                one.metadata["check"](one.name, value, *one.metadata["bounds"])


def parameter(default: Any, check: Callable[..., None], *bounds: Any) -> Any:
    """Return a dataclass field whose values have to pass ``check(name, value, *bounds)``.

    None is allowed if it is the default.
    """
    return field(default=default, metadata={"check": check, "bounds": bounds})


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


def ratio(name: str, value: Any) -> None:
    """Require a number in (0, 1]."""
    within(name, value, 0, 1)
    if value == 0:
        raise ValueError(f"{name} is {value}, expected above 0 and at most 1")


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
