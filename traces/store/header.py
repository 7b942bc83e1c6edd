"""Fields of a recording's header and of its rows, checked by type and bound.

The checksum of a file says that it is as it was written.  These checks say that what was written
can be a recording, whichever program wrote it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from reprlib import repr as shown
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from traces.acceptance.trace import MOST_TOKENS, Request
from traces.errors import DraftsimError, FileError

PathLike = str | os.PathLike[str]
FieldCheck = Callable[[Any], bool]

MOST = 2**31 - 1
"""Largest whole number of a header, but of those with a smaller bound of their own."""
AGAIN = "record it again, or copy it again"


def file_error(path: PathLike, problem: str, remedy: str = AGAIN) -> FileError:
    """Return a one-line `FileError` about the content of `path`."""
    return FileError(f"{path}: {problem}: {remedy}")


def is_whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Return whether `value` is a whole number from `least` to `most`."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def are_wholes(value: Any, least: int = 0, most: int = MOST) -> bool:
    """Return whether `value` is a list of whole numbers from `least` to `most`."""
    return isinstance(value, list) and all(is_whole(v, least, most) for v in value)


def _none_or(check: FieldCheck) -> FieldCheck:
    return lambda value: value is None or check(value)


def _is(*kinds: type) -> FieldCheck:
    return lambda value: isinstance(value, kinds)


def _size(value: Any) -> bool:
    return is_whole(value, 1, 2**53)


def _model(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, dict)
        and all(_none_or(check)(value.get(name)) for name, check in MODEL.items())
    )


MODEL: Mapping[str, FieldCheck] = {
    "layers": _size, "hidden_size": _size, "vocab_size": _size, "kv_values": _size,
    "parameters": _size, "tied": _is(bool), "fingerprint": _is(str), "path": _is(str),
}  # fmt: skip
"""Fields of the provenance of a model."""

TEXT, TABLE = _none_or(_is(str)), _none_or(_is(dict))
META: Mapping[str, tuple[FieldCheck, str]] = {
    **dict.fromkeys(("target", "draft"), (_none_or(_model), "a name, or a table of a model")),
    **dict.fromkeys(
        ("kind", "dtype", "mode", "attention", "estimator", "drafts", "drafter", "fidelity",
         "run_id", "recorded_with", "model", "outputs_sha256", "heads", "adapter", "pair"),
        (TEXT, "text"),
    ),
    **dict.fromkeys(
        ("sampling", "imputed", "versions", "tokenizer", "near_ties", "recording_s", "machine",
         "models", "control_s", "baseline", "measured", "shapes", "prompt_texts"),
        (TABLE, "a table"),
    ),
    **dict.fromkeys(
        ("vocab_size", "threads", "cores", "layers", "modules", "topk"),
        (_none_or(_size), "a whole number >= 1"),
    ),
    **dict.fromkeys(("eos_token_ids", "skip"), (_none_or(are_wholes), "a list of whole numbers")),
    **dict.fromkeys(
        ("draft_lengths_known", "takes_verified", "drafts_end", "finds_nothing", "chat_template",
         "quick"),
        (_none_or(_is(bool)), "true or false"),
    ),
    "first": (_none_or(lambda value: is_whole(value, 0, 1)), "0 or 1"),
    "tensor_parallel": (
        _none_or(lambda value: isinstance(value, dict) and are_wholes([*value.values()], 1)),
        "a table of whole numbers >= 1",
    ),
}  # fmt: skip
"""For each field of a recording's provenance: its check, and the expected value in words."""


def check(path: PathLike, name: str, value: Any, sound: bool, expected: str) -> None:
    """Raise FileError, naming the file, the header field `name` and its `value`, unless `sound`."""
    if not sound:
        raise file_error(path, f"header field {name!r} is {shown(value)}, expected {expected}")


@contextmanager
def named(path: PathLike, remedy: str = "record it again") -> Iterator[None]:
    """Turn an error about an object's contents into an error of its file."""
    try:
        yield
    except DraftsimError as error:
        text = str(error)
        raise FileError(f"{path}: {text}" + f": {remedy}" * (": " not in text)) from error
    except OverflowError as error:
        raise file_error(path, "the header holds a number beyond 64 bits") from error


def meta_of(path: PathLike, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance in a header; FileError if a field that is read is impossible."""
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise file_error(path, "header field 'meta' is missing or no table")
    for name, (sound, expected) in META.items():
        check(path, f"meta.{name}", meta.get(name), sound(meta.get(name)), expected)
    return meta


def starts_of(path: PathLike, header: Mapping[str, Any], name: str, rows: int) -> tuple[int, ...]:
    """Return the first row of each request and their end, which must be `rows` at most."""
    starts: Any = header.get(name)
    rising = are_wholes(starts, 0, rows) and starts == sorted(starts) and starts[:1] == [0]
    check(path, name, starts, rising and len(starts) > 1, f"rows that rise from 0 to {rows}")
    return tuple(starts)


def requests_of(path: PathLike, header: Mapping[str, Any]) -> list[Request]:
    """Return the request table in a header; FileError naming the request and field if damaged."""
    rows = header.get("requests")
    if not isinstance(rows, list):
        raise file_error(path, "header field 'requests' is missing or no list")
    found = []
    for i, row in enumerate(rows):
        one = from_row(Request, f"{path}: request {i} of the header", row, _REQUEST, AGAIN)
        ids = one.prompt_ids
        found.append(one if ids is None else replace(one, prompt_ids=tuple(ids)))
    return found


_REQUEST: Mapping[str, FieldCheck] = {
    "id": _is(str), "category": _is(str),
    "prompt_length": lambda value: is_whole(value, 0, MOST_TOKENS),
    "tokens": lambda value: is_whole(value, 1, MOST_TOKENS),
    "max_new_tokens": lambda value: is_whole(value, 1),
    "ended": lambda value: value in ("eos", "length"), "prompt_ids": _none_or(are_wholes),
    "wall_s": _none_or(lambda value: is_number(value) and value >= 0),
}  # fmt: skip
"""The check of each field of a request."""

Made = TypeVar("Made")


def from_row(
    kind: type[Made], where: str, row: object, checks: Mapping[str, FieldCheck], remedy: str
) -> Made:  # fmt: skip
    """Return the object of a dataclass that a document's row holds.

    Raises FileError, naming `where` it is and ending with the `remedy`, unless the row has the
    fields of `checks`, at least those without a default, and passes each field's check.
    """
    needed = {f.name for f in fields(kind) if f.default is MISSING}  # type: ignore[arg-type]
    if not isinstance(row, dict) or not needed <= set(row) <= set(checks):
        raise FileError(f"{where} does not have the fields {sorted(checks)}: {remedy}")
    for name, value in row.items():
        if not checks[name](value):
            raise FileError(f"{where} has {name}={shown(value)}: {remedy}")
    return kind(**row)


def check_rows(path: PathLike, checks: Mapping[str, npt.NDArray[np.bool_]]) -> None:
    """Raise FileError, naming the first row, where one of the `checks` of all rows is False.

    The key of a check says what it expects, as in ``accepted <= drafted``.
    """
    for expected, sound in checks.items():
        if not sound.all():
            row = int(np.flatnonzero(~sound)[0])
            raise file_error(path, f"row {row} breaks {expected}")
