"""A results file written row by row, readable whatever happens to the run that writes it.

One JSON object a line: a header, the rows, and a last line that marks the file complete.
Without that line the run was cut off, and what is there is what it had finished.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np
import pandas as pd
import pyarrow as pa

from policies.json_text import JSONError, parse_json
from traces.errors import FileError
from traces.store.parquet import write_file

SCHEMA = 1
OPTIONAL = {"rate", "scale", "concurrency", "router", "requests"}
"""Fields of a row that may have no value; others that JSON lacks are NaN."""


class Results(NamedTuple):
    """Rows of a results file."""

    rows: list[dict[str, Any]]
    complete: bool
    """False: the run that wrote them did not come to its end."""
    meta: dict[str, Any]


class ResultsFile:
    """Writes rows as they come; use it as a context manager.

    A row is on disk when `add` returns.  Leaving by an exception leaves the file marked
    incomplete.

    Parameters
    ----------
    path, meta, command:
        Where, and what the header holds.
    key:
        A digest of all that the rows depend on.  What an unfinished file with the same key
        holds is kept, in `kept`, and written behind; None writes the file anew.
    """

    def __init__(
        self,
        path: str | Path,
        meta: Mapping[str, Any] | None = None,
        *,
        command: str = "serve",
        key: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.meta = {**(meta or {}), **({} if key is None else {"key": key})}
        self.command, self.key = command, key
        self.kept: list[dict[str, Any]] = []
        self._rows = 0
        self._file: TextIO | None = None

    def __enter__(self) -> ResultsFile:
        header = {"schema": SCHEMA, "command": self.command, "meta": self.meta}
        try:
            if self._resumes():
                self._file = self.path.open("a", encoding="utf-8")
                return self
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as e:
            raise FileError(f"results file {self.path} cannot be written: {e.strerror}") from None
        self._write(header)
        return self

    def _resumes(self) -> bool:
        """Take over the rows of a run that was cut off, and drop a line that it did not end."""
        if self.key is None or not self.path.is_file():
            return False
        try:
            found = read_results(self.path)
        except FileError:
            return False
        if found.complete or found.meta.get("key") != self.key:
            return False
        with self.path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
        self.kept, self._rows = found.rows, len(found.rows)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._file is not None:
            if kind is None:
                self._write({"complete": True, "rows": self._rows})
            self._file.close()
            self._file = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one finished row."""
        self._rows += 1
        self._write({"row": row})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise FileError(f"results file {self.path} is not open: use it in a with statement")
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_results(path: str | Path) -> Results:
    """The rows written so far, and whether the run that wrote them came to its end.

    Raises
    ------
    FileError
        If the file is missing, is no results file or of another schema, or a line other
        than an unfinished last one cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise FileError(f"results file {path} cannot be read: {e}") from None
    parsed: list[dict[str, Any]] = []
    for i, line in enumerate(lines):
        if not line:
            continue
        try:
            value = parse_json(line)
        except JSONError:
            if i == len(lines) - 1:
                break  # killed while writing it
            raise FileError(
                f"results file {path}, line {i + 1} is not JSON: it was damaged"
            ) from None
        if not isinstance(value, dict):
            raise FileError(f"results file {path}, line {i + 1} is no JSON object")
        parsed.append(value)
    if not parsed or parsed[0].get("schema") != SCHEMA:
        raise FileError(f"results file {path} has no header of schema {SCHEMA}: it is another file")
    rows = [value["row"] for value in parsed[1:] if "row" in value]
    if not all(isinstance(held, dict) for held in (parsed[0].get("meta", {}), *rows)):
        raise FileError(f"results file {path} holds a row that is no object: it was damaged")
    last = parsed[-1]
    return Results(
        rows,
        bool(last.get("complete")) and last.get("rows") == len(rows),
        parsed[0].get("meta", {}),
    )


def flat(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows with what they hold in tables of their own as columns, ``ttft_s_mean`` and so on."""
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

    Raises
    ------
    FileError
        If the file cannot be written there.
    """
    table = pa.Table.from_pandas(flat(rows), preserve_index=False)
    write_file(path, "serve", table, {"complete": complete, "meta": dict(meta or {})})


def restored(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it was before it was written: JSON has no NaN and no infinity."""

    def number(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: number(k, v) for k, v in value.items()}
        if value is not None or key in OPTIONAL:
            return value
        return math.inf if key.endswith("_target_s") else math.nan

    return {key: number(key, value) for key, value in row.items()}


def plain(value: Any) -> Any:
    """`value` as JSON knows it: numpy numbers unwrapped, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
