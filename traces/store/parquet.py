"""The container every recording is kept in: one checked Parquet file, written whole.

A file is a Parquet table plus a JSON header in the key-value metadata (key ``draftsim``)
naming the schema version and the kind of recording.  A second key holds the SHA-256 of
the file itself, taken with the digest blanked, so that damage is found before any of it
is interpreted.  A file without it is refused: damage to that very key would otherwise
switch the check off.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from policies.json_text import JSONError, parse_json
from traces.errors import FileError
from traces.store.header import PathLike, file_error
from traces.store.text import reading
from traces.store.writing import write_atomically

SCHEMA = 1
"""Version of the file layout; raised whenever a reader of the old one would misread."""

KINDS = {
    "trace": "an acceptance trace",
    "latency": "a latency table",
    "operators": "an operator table",
    "rounds": "a round log",
    "exits": "a recording of early exits",
    "starts": "a recording of drafts by start",
    "trees": "a recording of draft trees",
    "measured": "times of measured runs",
}

ColumnTypes = Mapping[str, tuple[str, str]]
"""For each column of a kind of file: its type and its meaning."""
HEADER_KEY, DIGEST_KEY = b"draftsim", b"draftsim.sha256"
_BLANK = b"0" * 64
_SPLIT = "BYTE_STREAM_SPLIT"
# The two bytes between key and value are the footer's own field header and length.
_DIGEST = re.compile(re.escape(DIGEST_KEY) + rb".{2}([0-9a-f]{64})", re.DOTALL)
_MAGIC = b"PAR1"


def write_file(path: PathLike, kind: str, table: pa.Table, header: Mapping[str, Any]) -> None:
    """Write `table` with its header to `path`, whole or not at all; FileError if it cannot be."""
    check_no_recording(path, but=kind)
    text = json.dumps({"schema": SCHEMA, "kind": kind, **header}, default=_plain)
    table = table.replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    floats, others = _leaves(table.schema)
    # Of measured numbers hardly two are equal, but their first bytes are much alike.
    encoding = {"use_dictionary": others, "column_encoding": dict.fromkeys(floats, _SPLIT)}
    # The Arrow schema is left out: it would hold the header a second time.
    with pq.ParquetWriter(
        sink, table.schema, compression="zstd", store_schema=False, **encoding
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEADER_KEY: text, DIGEST_KEY: _BLANK})
    write_atomically(path, sealed(sink.getvalue().to_pybytes()))


def _leaves(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """Return paths of the columns that hold floating-point numbers, and of the others."""
    floats: list[str] = []
    others: list[str] = []
    for field in schema:
        path, kind = field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        (floats if pa.types.is_floating(kind) else others).append(path)
    return floats, others


def sealed(content: bytes) -> bytes:
    """Return a file with its digest put in its place; ValueError if the metadata has no place."""
    place = _digest_place(content)
    if place is None:
        raise ValueError("no place for the digest among the metadata")
    return content[: place.start] + _digest(content, place) + content[place.stop :]


def read_file(path: PathLike, kind: str) -> tuple[dict[str, Any], pa.Table]:
    """Return the header and the table of a file of this kind.

    Raises FileError if the file is missing, truncated, damaged, not Parquet, not draftsim's, of
    another schema version or of another kind.
    """
    path = Path(path)
    content = _content(path)
    place = _digest_place(content)
    if place is not None and _digest(content, place) != content[place]:
        raise FileError(
            f"{path}: the content does not match its checksum, so the file was damaged or "
            "edited after it was written: copy it again, or record it again"
        )
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        metadata = file.metadata.metadata or {}
        header = _header(path, metadata.get(HEADER_KEY), kind)
        if place is None:
            raise FileError(
                f"{path}: has no checksum, so the file was damaged, or rewritten by another "
                "program: copy it again, or write it with draftsim"
            )
        # Threads of its own, on the way out of a short run, have been seen to abort the process.
        return header, file.read(use_threads=False)
    except FileError:
        raise
    except Exception as error:  # pyarrow raises a dozen types on damaged input
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FileError(
            f"{path}: damaged Parquet file ({reason}): copy it again, or record it again"
        ) from error


def columns_of(
    path: PathLike, table: pa.Table, dtypes: Mapping[str, str]
) -> dict[str, npt.NDArray[Any]]:
    """Return the named columns as arrays of exactly these dtypes.

    Raises FileError if a column is missing, of another type, or lacks a value.
    """
    columns = {}
    for name, dtype in dtypes.items():
        if name not in table.column_names:
            raise file_error(path, f"lacks the column {name!r}")
        column = table.column(name)
        expected = pa.string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
        if column.type != expected:
            raise file_error(path, f"column {name!r} is of type {column.type}, expected {expected}")
        if column.null_count:
            raise file_error(path, f"column {name!r} has {column.null_count} missing value(s)")
        columns[name] = (
            np.array(column.to_pylist(), dtype=object) if dtype == "str" else column.to_numpy()
        )
    return columns


def table_of(frame: pd.DataFrame, columns: ColumnTypes) -> pa.Table:
    """Return the `columns` of a frame."""
    return pa.table({
        name: pa.array([str(v) for v in frame[name]], pa.string()) if dtype == "str"
        else pa.array(frame[name].to_numpy(dtype))
        for name, (dtype, _) in columns.items()
    })  # fmt: skip


def frame_of(path: PathLike, table: pa.Table, columns: ColumnTypes) -> pd.DataFrame:
    """Return the frame of which `table_of` made a table; FileError as `columns_of`."""
    dtypes = {name: dtype for name, (dtype, _) in columns.items()}
    return pd.DataFrame(columns_of(path, table, dtypes))


def lists_of(
    path: PathLike, table: pa.Table, name: str, dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the values of a column of lists, one list after another, and the lists' lengths.

    Raises FileError as `columns_of` does.
    """
    if name not in table.column_names:
        raise file_error(path, f"lacks the column {name!r}")
    lists, expected = table.column(name).combine_chunks(), pa.from_numpy_dtype(np.dtype(dtype))
    if not pa.types.is_list(lists.type) or lists.type.value_type != expected:
        raise file_error(
            path, f"column {name!r} is of type {lists.type}, expected lists of {expected}"
        )
    values = lists.flatten()
    if lists.null_count or values.null_count:
        raise file_error(path, f"column {name!r} has missing values")
    found, lengths = (a.to_numpy(zero_copy_only=False) for a in (values, lists.value_lengths()))
    return found, lengths


def read_meta(path: PathLike) -> dict[str, Any]:
    """Read the provenance of a file, without its content or its checksum; empty if it has none."""
    meta = _header_of(path).get("meta")
    return meta if isinstance(meta, dict) else {}


def kind_of(path: PathLike) -> str:
    """Return the kind that draftsim wrote into a Parquet file's header; "None" if there is none."""
    return str(_header_of(path).get("kind"))


def check_no_recording(path: PathLike, but: str = "") -> None:
    """Raise FileError if `path` holds a recording of another kind than `but`."""
    found = kind_of(path)
    if found in KINDS and found != but:
        raise FileError(f"{path}: holds {KINDS[found]}: name another file, or remove it")


def is_parquet(path: PathLike) -> bool:
    """Return True if the file can be read and begins as Parquet does, whatever its name."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:  # what is wrong with it, `read_file` says
        return False


def _content(path: Path) -> bytes:
    with reading(path, "a .parquet file"):
        content = path.read_bytes()
    if not content:
        raise FileError(f"{path}: is empty: copy it again, or record it again")
    if not content.startswith(_MAGIC):
        raise FileError(
            f"{path}: not a Parquet file: draftsim reads what `draftsim profile` or "
            "`draftsim import` wrote"
        )
    if len(content) < 12 or not content.endswith(_MAGIC):
        raise FileError(
            f"{path}: truncated (the Parquet footer is missing): copy it again, or record it again"
        )
    return content


def _digest_place(content: bytes) -> slice | None:
    """Return the place of the digest in the footer; None if there is none."""
    footer = int.from_bytes(content[-8:-4], "little")
    matches = list(_DIGEST.finditer(content, max(0, len(content) - 8 - footer)))
    return slice(*matches[-1].span(1)) if matches else None


def _digest(content: bytes, place: slice) -> bytes:
    # Part by part: a copy with the digest blanked takes longer than to read it.
    whole = memoryview(content)
    taken = hashlib.sha256(whole[: place.start])
    taken.update(_BLANK)
    taken.update(whole[place.stop :])
    return taken.hexdigest().encode()


def _header(path: Path, text: bytes | None, kind: str) -> dict[str, Any]:
    if text is None:
        raise FileError(
            f"{path}: has no draftsim header in its metadata: it was not written by draftsim"
        )
    try:
        header = parse_json(text)
    except JSONError as error:
        raise file_error(path, f"the draftsim header is not JSON ({error})") from error
    if not isinstance(header, dict) or type(header.get("schema")) is not int:
        raise file_error(path, "the draftsim header names no schema version")
    version = header["schema"]
    if version != SCHEMA:
        older = "record it again, or read it with an older draftsim"
        raise FileError(
            f"{path}: schema version {version}, this draftsim reads {SCHEMA}: "
            f"{'upgrade draftsim' if version > SCHEMA else older}"
        )
    if (found := header.get("kind")) != kind:
        what = KINDS.get(str(found), f"a file of kind {found!r}")
        raise FileError(f"{path}: is {what}, not {KINDS[kind]}: name the other file")
    return header


def _header_of(path: PathLike) -> dict[str, Any]:
    """Return the header of a file, unchecked; empty if it has none."""
    if not Path(path).is_file():
        return {}
    try:
        if not is_parquet(path):
            return {}
        header = parse_json((pq.read_metadata(path).metadata or {}).get(HEADER_KEY, b"{}"))
    except Exception:  # what is wrong with it, `read_file` says
        return {}
    return header if isinstance(header, dict) else {}


def _plain(value: object) -> object:
    """Return the JSON form of what provenance may hold: numpy values, paths, versions."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
