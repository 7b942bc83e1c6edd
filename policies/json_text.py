"""JSON that people and other programs wrote, parsed within bounds.

Python's own parser ends in a ``RecursionError`` on a text of 1,000 nested lists, and in an error
about its own settings on a number of 5,000 digits.  `parse_json` refuses both, and everything else
that is no JSON, with one kind of error.  It is the only place of the project that calls
``json.loads``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 64
"""Deepest nesting of lists and objects that is read."""
MOST_DIGITS = 40
"""Longest whole number that is read, in digits: any of 128 bits."""

_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_LONG = b"0" * (MOST_DIGITS + 1)


class JSONError(ValueError):
    """A text that is no JSON, or is beyond the bounds; the message says why in a few words."""


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text; bytes are read as UTF-8.

    ``pairs`` makes each object of its names and values; without it the last of two names counts.

    Raises JSONError if the text is no JSON, nests deeper than `MOST_DEPTH`, holds a whole number of
    more than `MOST_DIGITS` digits, or a text with half a surrogate pair, which no file can hold.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        # Both searches are quick, and hardly any text needs what they guard.
        long = _TOO_LONG in text.encode("utf-8").translate(_AS_ZEROS)
        value = json.loads(text, parse_int=_whole if long else None, object_pairs_hook=pairs)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise JSONError(f"nested deeper than {MOST_DEPTH} levels") from None
    except UnicodeDecodeError:
        raise JSONError("not UTF-8") from None
    except UnicodeEncodeError:
        raise JSONError("a text holds half a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise JSONError(f"{error.msg}: line {error.lineno} column {error.colno}") from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _too_deep(value):
        raise JSONError(f"nested deeper than {MOST_DEPTH} levels")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise JSONError(f"a number of {len(digits)} digits, more than {MOST_DIGITS}")
    return int(digits)


def _too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 1):
        items = (own.values() if isinstance(own, dict) else own for own in level)
        level = [x for own in items for x in own if isinstance(x, list | dict)]
    return bool(level)
