"""Bounds of the numbers in another program's log, checked when they are read.

Arrays are as long as drafts and outputs, so without bounds one damaged number could ask for any
amount of memory.
"""

from __future__ import annotations

import math
from reprlib import repr as shown
from typing import Any

from traces.errors import FileError

MOST_COUNT = 2**53
"""Largest count over many rounds: up to here a counter kept as a float is exact."""
MOST_SECONDS = 1e9
"""Longest time that was measured."""
MOST_ID = 2**31 - 1
"""Largest token id."""


def whole(where: str, name: str, value: Any, least: int = 0, most: int = MOST_COUNT) -> int:
    """Return `value` if it is a whole number from `least` to `most`.

    Raises
    ------
    FileError
        Naming `where` it stands and the field's `name` otherwise.
    """
    if type(value) is not int or value < least:
        raise FileError(f"{where}: {name} is {shown(value)}, expected a whole number >= {least}")
    if value > most:
        raise FileError(f"{where}: {name} is {value:,}, expected at most {most:,}")
    return value


def wholes(
    where: str, name: str, values: Any, least: int = 0, most: int = MOST_COUNT
) -> list[int]:  # fmt: skip
    """Return `values` if they are a list of whole numbers from `least` to `most`; see `whole`."""
    if not isinstance(values, list) or not all(type(v) is int and v >= least for v in values):
        raise FileError(f"{where}: {name} is no list of whole numbers >= {least}")
    if values and max(values) > most:
        raise FileError(f"{where}: {name} holds {max(values):,}, expected at most {most:,}")
    return values


def digits(where: str, name: str, text: str | None, least: int = 0, most: int = MOST_COUNT) -> int:
    """Return the whole number that `text` writes in plain digits; see `whole`."""
    given = (text or "").strip()
    plain = given.isascii() and given.isdigit() and len(given) <= 20
    return whole(where, name, int(given) if plain else text, least, most)


def sparse(
    where: str, name: str, values: Any, least: int = 0, most: int = MOST_COUNT
) -> dict[int, int]:  # fmt: skip
    """Return counts by whole numbers from `least` to `most`, written as ``{"0": 8, "2": 6}``."""
    if not isinstance(values, dict):
        raise FileError(f"{where}: {name} is {shown(values)}, expected an object")
    return {
        digits(where, name, at, least, most): whole(where, name, count)
        for at, count in values.items()
    }


def decimal(text: Any) -> float:
    """Return the number that `text` writes, or is; NaN for other text."""
    try:
        return math.nan if isinstance(text, bool) or "_" in str(text) else float(text)
    except (TypeError, ValueError):
        return math.nan


def label(where: str, name: str, value: Any, default: str = "") -> str:
    """Return an id or category as text, `default` if it is missing; FileError for others."""
    if value is None:
        return default
    if type(value) not in (str, int):
        raise FileError(f"{where}: {name} is {shown(value)}, expected text or a number")
    return str(value)


def is_seconds(value: Any) -> bool:
    """Return whether `value` is a number of seconds above 0 and up to `MOST_SECONDS`."""
    return type(value) in (int, float) and 0 < value <= MOST_SECONDS
