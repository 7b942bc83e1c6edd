"""Text and JSON files of users and other programs: read whole, within bounds, or refused.

Numbers have bounds, too.  Arrays are as long as drafts and outputs, so without bounds one damaged
number could ask for any amount of memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as shown
from typing import IO, Any

from policies.json_text import JSONError, parse_json
from traces.errors import FileError

MOST_BYTES = 2**30
"""Largest text file that is read, 1 GiB: a log beyond it is to be split."""

_AT_ONCE = 2**20
GZIPPED = b"\x1f\x8b"
"""How a gzipped file begins."""
AGAIN = "copy it again, or write it again"
MOST_COUNT = 2**53
"""Largest count over many rounds: up to here a counter kept as a float is exact."""
MOST_SECONDS = 1e9
"""Longest time that a file or a text may give: sums and ratios of longer ones could leave the
range of a float."""
MOST_ID = 2**31 - 1
"""Largest token id."""


@contextmanager
def reading(path: str | os.PathLike[str], wanted: str = "a file") -> Iterator[None]:
    """Turn an error of the system about the file at `path` into a `FileError`.

    ``wanted``: the kind of file that is read, in words.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file: check the path") from error
    except IsADirectoryError as error:
        raise FileError(f"{path}: is a directory: name {wanted} in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read ({reason}): check its permissions") from error


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Return the text of a file, unpacked, without byte-order mark, with ``\\n`` as line ends.

    Raises FileError if it is missing, cannot be read, is larger than `most` bytes or is not UTF-8.
    """
    with reading(path), Path(path).open("rb") as file:
        content = _bounded(file, most)
    try:
        if content is not None and content.startswith(GZIPPED):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(most + 1)
            content = content if len(content) <= most else None
    except (EOFError, zlib.error, OSError) as error:
        raise FileError(f"{path}: is damaged (gzip): {AGAIN}") from error
    if content is None:
        raise FileError(f"{path}: is larger than {most:,} bytes: split it, or name another file")
    try:
        # Some programs and editors write a byte-order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not text in UTF-8: {AGAIN}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: str | os.PathLike[str], remedy: str = AGAIN) -> Any:
    """Return the value of a JSON file.

    Raises FileError as `read_text` does, or, ending with `remedy`, if it is no JSON.
    """
    try:
        return parse_json(read_text(path))
    except JSONError as error:
        raise FileError(f"{path}: is not JSON ({error}): {remedy}") from None


def read_object(path: str | os.PathLike[str], remedy: str = AGAIN) -> dict[str, Any]:
    """Return the object of a JSON file; raise as `read_json` does, or if it holds anything else."""
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise FileError(f"{path}: holds a {type(value).__name__}, expected an object: {remedy}")
    return value


def json_lines(
    path: str | os.PathLike[str], text: str | None = None, remedy: str = AGAIN
) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each line of JSON Lines that is not empty; ``text`` if it was read.

    Raises FileError as `read_text` does, or if a line is no JSON, with its number.
    """
    lines = (read_text(path) if text is None else text).split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except JSONError as error:
                raise FileError(f"{path} line {number}: is not JSON ({error}): {remedy}") from None


def csv_rows(
    path: str | os.PathLike[str], text: str, needed: Collection[str], known: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place and the values of each row of a CSV file with a header, by column.

    Columns are ``needed`` and ``known`` ones, in any order and case; without ``known``, any other
    is let through.  Values are stripped.  Lines that are empty or begin with ``#`` are skipped.

    Raises FileError if the header lacks a column, has an unknown one or one twice, or a row is not
    CSV or has not as many values.
    """
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for at, line in enumerate(text.split("\n"), 1):
            number = at
            if line.strip() and not line.startswith("#"):
                yield line

    reader = csv.DictReader(lines(), skipinitialspace=True, strict=True)
    try:
        names = [str(name).strip().lower() for name in reader.fieldnames or ()]
        if missing := [name for name in needed if name not in names]:
            raise FileError(f"{path}: lacks the column(s) {', '.join(missing)}")
        if known and (unknown := sorted({*names} - {*needed, *known})):
            raise FileError(
                f"{path}: has unknown column(s) {', '.join(unknown)[:80]}: expected "
                f"{', '.join(dict.fromkeys((*needed, *known)))}"
            )
        if len({*names}) < len(names):
            raise FileError(f"{path}: has a column twice: {', '.join(names)[:80]}")
        reader.fieldnames = names
        for row in reader:
            at = f"{path} line {number}"
            if None in row or None in row.values():
                raise FileError(f"{at}: has not as many values as the header has columns")
            yield at, {name: value.strip() for name, value in row.items()}
    except csv.Error as error:
        raise FileError(f"{path} line {number}: is not CSV ({error})") from None


def plain(value: Any) -> Any:
    """Return `value` as JSON knows it: numbers of numpy unwrapped, NaN and infinities null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item") and not value.shape:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _bounded(file: IO[bytes], most: int) -> bytes | None:
    """Return the content of a file; None if it holds more than `most` bytes."""
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode):
        return file.read() if about.st_size <= most else None
    # A pipe or a device may never end.
    parts, size = [], 0
    while size <= most and (part := file.read(_AT_ONCE)):
        parts.append(part)
        size += len(part)
    return b"".join(parts) if size <= most else None


def whole(where: str, name: str, value: Any, least: int = 0, most: int = MOST_COUNT) -> int:
    """Return `value` if it is a whole number from `least` to `most`; FileError otherwise."""
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
    """Return True if `value` is a number of seconds above 0 and up to `MOST_SECONDS`."""
    return type(value) in (int, float) and 0 < value <= MOST_SECONDS
