"""The rows of a trace that the rounds of a finished run imply."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policies.json_text import JSONError, parse_json
from traces.acceptance.schema import MATCH, MISMATCH, UNKNOWN
from traces.errors import FileError
from traces.store.text import json_lines, read_text

Row = tuple[str, dict[str, Any]]
"""File and line or entry, for error messages, and the JSON object there."""


class LoggedTurn(NamedTuple):
    """One decoded request of a log that holds its rounds in order."""

    where: str
    """File, row and request, for error messages."""
    tokens: int
    """Output tokens."""
    limit: int
    """Token limit that the request was decoded under."""
    accepted: list[int]
    """Accepted drafts of each round."""
    wall_s: float | None = None
    """Measured seconds of decoding it."""


class LoggedRound(NamedTuple):
    """One round of a log."""

    accepted: int
    drafted: int
    """Tokens that are known to have been drafted, at least."""


def matches(rounds: Sequence[LoggedRound], tokens: int, first: int = 0) -> npt.NDArray[np.int8]:
    """Return per output position whether the draft matched, shape (tokens,), as far as is known.

    A round at s with A accepted says that s ... s + A - 1 matched.  Position s + A was
    emitted by the target: a mismatch if a draft stood there, that is if more than A were
    drafted; otherwise it is the bonus, never drafted and so unknown, as are the
    positions before `first`.  Positions beyond `tokens` are dropped.
    """
    match = np.full(tokens + sum(r.accepted + 1 for r in rounds), UNKNOWN, dtype=np.int8)
    start = first
    for accepted, drafted in rounds:
        match[start : start + accepted] = MATCH
        if drafted > accepted:
            match[start + accepted] = MISMATCH
        start += accepted + 1
    return match[:tokens]


def only_file(name: str, files: Sequence[Path]) -> Path:
    """Return the one file of a format that takes one; FileError for several."""
    if len(files) != 1:
        raise FileError(f"{name} takes one file, not {len(files)}: import them one at a time")
    return files[0]


def read_json_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Return the objects of a JSON or JSON Lines file, each with where it is from.

    Raises
    ------
    FileError
        If the file is missing, is no text, or a line is not a JSON object.
    """
    text = read_text(path)
    found = _whole(path, text)
    if found is None:
        lines = json_lines(path, text, "is it truncated? copy the file again")
        found = [(f"{path} line {number}", item) for number, item in lines]
    if not found:
        raise FileError(f"{path}: holds no rows: expected JSON or JSON Lines")
    for where, item in found:
        if not isinstance(item, dict):
            raise FileError(f"{where}: is no JSON object: expected one object a row")
    return found


def _whole(path: str | os.PathLike[str], text: str) -> list[tuple[str, Any]] | None:
    """Return the entries of a text that is one JSON document, None if it is not."""
    try:
        document = parse_json(text)
    except JSONError:
        return None
    items = document if isinstance(document, list) else [document]
    return [(f"{path} entry {i}", item) for i, item in enumerate(items, 1)]
