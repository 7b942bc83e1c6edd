"""A results file written row by row, readable whatever happens to the run that writes it.

One JSON object a line: a header, the rows with their numbers, and a last line that marks the file
complete.  Without that line the run was cut off, and the rows are those that it had finished.
Every line ends with a checksum of itself, so that a damaged one is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa

from policies.json_text import JSONError, parse_json
from traces.aliases import Say, silent
from traces.errors import FileError
from traces.store.parquet import write_file
from traces.store.text import plain, reading
from traces.store.writing import only_writer, refused, write_atomically

SCHEMA = 2
OPTIONAL = {"rate", "scale", "concurrency", "router", "requests"}
"""Fields of a row that may have no value; others that JSON lacks are NaN."""
_SUM = re.compile(rb', "sha256": "([0-9a-f]{16})"}$')


@dataclass
class Results:
    """The lines of a results file."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    """Empty if the first line is not a header."""
    numbered: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows by their numbers."""
    complete: bool = False
    """False: the run that wrote them did not come to its end."""
    damaged: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows in the order of their numbers."""
        return [self.numbered[number] for number in sorted(self.numbered)]

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata stored with the rows."""
        return dict(self.header.get("meta") or {})

    @property
    def problem(self) -> str:
        """Return in words which lines are damaged."""
        lines = ", ".join(map(str, self.damaged))
        return f"results file {self.path}, line {lines}: damaged, or edited after it was written"


class ResultsFile:
    """Writes rows as they come; use it as a context manager.

    A row is on disk when `add` returns.  Leaving by an exception leaves the file marked
    incomplete.  Nobody else may write the file meanwhile.

    Parameters
    ----------
    path, meta, command:
        Where, and what the header holds.
    key:
        A digest of all that the rows depend on.  The rows of an unfinished file with the same key
        are kept, in `kept`, and further rows are appended; None starts a new file.
    say:
        Called with a sentence on rows that are lost: damaged ones, or those of another key.
    finishes:
        False if the caller makes something else of the rows at the end.  The file is never marked
        complete then, so that a run stopped before that continues.

    Raises
    ------
    FileError
        On entering, if `path` cannot be written or holds anything but results of `command`.
    DraftsimError
        On entering, if another process writes there.
    """

    def __init__(
        self,
        path: str | Path,
        meta: Mapping[str, Any] | None = None,
        *,
        command: str = "serve",
        key: str | None = None,
        say: Say = silent,
        finishes: bool = True,
    ) -> None:
        self.path = Path(path)
        self.meta = {**(meta or {}), **({} if key is None else {"key": key})}
        self.command, self.key, self.say, self.finishes = command, key, say, finishes
        self.kept: dict[int, dict[str, Any]] = {}
        """Rows taken over from an unfinished file, by their numbers."""
        self._numbers: list[int] = []
        self._file: BinaryIO | None = None
        self._open = ExitStack()

    def __enter__(self) -> ResultsFile:
        with ExitStack() as opened:
            opened.enter_context(only_writer(self.path))
            header = {"schema": SCHEMA, "command": self.command, "meta": self.meta}
            content = b"".join(self._kept_lines() or [_line(header)])
            try:
                if self.path.exists() and not self.path.is_file():  # a device or a FIFO
                    self._file = opened.enter_context(self.path.open("wb"))
                    self._write(content)
                else:
                    write_atomically(self.path, content)
                    self._file = opened.enter_context(self.path.open("ab"))
            except OSError as error:
                raise refused(self.path, error) from None
            self._open = opened.pop_all()
        return self

    def _kept_lines(self) -> list[bytes]:
        """Return header and rows of an unfinished run of the same question; none to start again."""
        if not self.path.is_file() or not self.path.stat().st_size:
            return []
        found = _parsed(self.path)
        if found.header.get("command") != self.command:
            raise FileError(
                f"{self.path} holds something else than results of `draftsim {self.command}`: "
                "name another file, or remove it"
            )
        if found.complete or not found.numbered:
            return []
        if self.key is None or found.meta.get("key") != self.key:
            self.say(
                f"{self.path} held {len(found.numbered)} finished row(s) of a stopped run with "
                "other options or of another version of draftsim: they are overwritten"
            )
            return []
        if found.damaged:
            self.say(f"{found.problem}: missing rows are computed again")
        self.kept = dict(sorted(found.numbered.items()))
        self._numbers = list(self.kept)
        return [_line(found.header), *(_row_line(n, row) for n, row in self.kept.items())]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._open:
            if self._file is not None and kind is None and self.finishes:
                end = {"complete": True, "rows": len(self._numbers)}
                self._write(_line(end))
                if self._numbers != sorted(self._numbers):
                    found = _parsed(self.path)
                    rows = [_row_line(n, row) for n, row in sorted(found.numbered.items())]
                    write_atomically(self.path, b"".join([_line(found.header), *rows, _line(end)]))
        self._file = None

    def add(self, row: Mapping[str, Any], number: int | None = None) -> None:
        """Write one finished row; ``number`` is its place among all rows, by default the next."""
        number = max(self._numbers, default=-1) + 1 if number is None else number
        self._numbers.append(number)
        self._write(_row_line(number, row))

    def _write(self, line: bytes) -> None:
        if self._file is None:
            raise FileError(f"results file {self.path} is not open: use it in a with statement")
        try:
            self._file.write(line)
            self._file.flush()
            if self.path.is_file():
                os.fsync(self._file.fileno())
        except OSError as error:
            raise refused(self.path, error) from None


def read_results(path: str | Path) -> Results:
    """Return the rows written so far, and whether the run that wrote them came to its end.

    Raises
    ------
    FileError
        If the file is missing, is no results file or of another schema, or a line other
        than an unfinished last one is damaged.
    """
    found = _parsed(Path(path))
    if found.header.get("schema") != SCHEMA:
        raise FileError(
            f"results file {path} has no header of schema {SCHEMA}: it is another file, or of "
            "another draftsim"
        )
    if found.damaged:
        raise FileError(f"{found.problem}: the command that wrote it computes its row again")
    return found


def _parsed(path: Path) -> Results:
    """Return the lines of a file; FileError if it cannot be read."""
    with reading(path, "a results file"):
        content = path.read_bytes()
    found, rows = Results(path), None
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        value = _checked(line)
        if number == 1:
            if value is None or "schema" not in value:
                break  # another file
            found.header = value
        elif value is not None and value.get("complete") is True:
            rows = value.get("rows")
        elif value is not None and "row" in value and value.get("number") not in found.numbered:
            found.numbered[value["number"]] = value["row"]
        elif line and number < len(lines):  # else killed while writing it
            found.damaged.append(number)
    found.complete = rows == len(found.numbered) and not found.damaged
    return found


def _line(value: Mapping[str, Any]) -> bytes:
    """Return a line of a results file, with its checksum."""
    text = json.dumps(plain(value), allow_nan=False).encode()
    return text[:-1] + b', "sha256": "%s"}\n' % _digest(text)


def _row_line(number: int, row: Mapping[str, Any]) -> bytes:
    return _line({"row": row, "number": number})


def _checked(line: bytes) -> dict[str, Any] | None:
    """Return the object on a line, if the line is as `_line` wrote it."""
    match = _SUM.search(line)
    if match is None:
        return None
    text = line[: match.start()] + b"}"
    if _digest(text) != match[1]:
        return None
    try:
        value = parse_json(text)
    except JSONError:
        return None
    return value if isinstance(value, dict) else None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def flat(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the rows with nested values as columns, ``ttft_s_mean`` and so on."""
    parts = [{**plain(row), "unpriced": ", ".join(row.get("unpriced", ()))} for row in rows]
    return pd.json_normalize(parts, sep="_")


def write_table(
    rows: Sequence[Mapping[str, Any]],
    path: str | Path,
    meta: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> None:
    """Write rows as a Parquet table, whole or not at all: ``ttft_s_mean``, ``ttft_s_p50``, ...

    The header says whether the run that made them came to its end.

    Raises FileError if the file cannot be written there.
    """
    table = pa.Table.from_pandas(flat(rows), preserve_index=False)
    write_file(path, "serve", table, {"complete": complete, "meta": dict(meta or {})})


def restored(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it was before it was written: JSON has no NaN and no infinity."""

    def number(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: number(k, v) for k, v in value.items()}
        if value is not None or key in OPTIONAL:
            return value
        return math.inf if key.endswith("_target_s") else math.nan

    return {key: number(key, value) for key, value in row.items()}
