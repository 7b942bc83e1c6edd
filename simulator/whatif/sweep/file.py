"""Files of a sweep: its table, and the parts finished before it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from policies.json_text import parse_json
from simulator.whatif.sweep.cells import COLUMNS, TEXT, Part
from traces.errors import FileError
from traces.store.writing import write_atomically

Columns = dict[str, npt.NDArray[Any]]

SCHEMA = 4
_DIGEST = hashlib.sha256().digest_size


class KeptParts:
    """Finished parts as files in a folder; without one, nothing is kept.

    A file is a Parquet table behind the SHA-256 of it.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder = folder
        self.key = key

    def read(self, parts: Iterable[Part]) -> Iterator[tuple[int, Columns]]:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot keep parts in {self.folder}: {error.strerror}") from None
        for i, part in enumerate(parts):
            path = self._path(part)
            if path.is_file():
                kept = path.read_bytes()
                content = kept[_DIGEST:]
                if hashlib.sha256(content).digest() == kept[:_DIGEST]:
                    yield i, _columns(pq.read_table(pa.BufferReader(content)))
                else:
                    path.unlink(missing_ok=True)  # damaged: computed again

    def write(self, part: Part, columns: Columns) -> None:
        if self.folder is not None:
            content = _bytes(columns, {})
            write_atomically(self._path(part), hashlib.sha256(content).digest() + content)

    def clear(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, part: Part) -> Path:
        import joblib

        assert self.folder is not None
        return self.folder / f"{joblib.hash([self.key, asdict(part)])}.kept"


def write_sweep(frame: pd.DataFrame, path: str | Path, description: Mapping[str, Any]) -> None:
    """Write a sweep's table to `path`, with what it was made from in the header.

    Raises
    ------
    FileError
        If the file cannot be written there.
    """
    columns = {k: frame[k].astype(object).to_numpy() if k in TEXT else frame[k].to_numpy()
               for k in COLUMNS}  # fmt: skip
    write_atomically(path, _bytes(columns, description))


def write_thresholds(
    rows: pd.DataFrame, out: str | Path, description: Mapping[str, Any]
) -> Path:  # fmt: skip
    """Write `rows` of `simulator.whatif.sweep.thresholds` beside the sweep's file `out`; its path.

    Raises
    ------
    FileError
        If the file cannot be written there.
    """
    beside = Path(out).with_suffix(".breakeven.parquet")
    header = {"schema": SCHEMA, "kind": "break-even", "sweep": dict(description)}
    table = pa.Table.from_pandas(rows, preserve_index=False).replace_schema_metadata(
        {"draftsim": json.dumps(header, default=_plain)}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomically(beside, sink.getvalue().to_pybytes())
    return beside


def read_sweep(path: str | Path) -> pd.DataFrame:
    """The table of a sweep; what it was made from is in ``.attrs["sweep"]``.

    Raises
    ------
    FileError
        If the file is missing, damaged or no sweep.
    """
    try:
        table = pq.read_table(path)
        header = (table.schema.metadata or {}).get(b"draftsim")
        found = None if header is None else parse_json(header)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise FileError(f"{path}: cannot be read as Parquet ({error}): sweep again") from None
    if not isinstance(found, dict) or found.get("kind") != "sweep":
        raise FileError(f"{path}: is no table of `draftsim sweep`")
    if found.get("schema") != SCHEMA or set(COLUMNS) - set(table.column_names):
        raise FileError(
            f"{path}: is of schema {found.get('schema')}, expected {SCHEMA}: sweep again"
        )
    columns = _columns(table)
    frame = pd.DataFrame(
        {k: pd.Categorical(columns[k]) if k in TEXT else columns[k] for k in COLUMNS}
    )
    frame.attrs["sweep"] = found["sweep"]
    return frame


def _bytes(columns: Columns, description: Mapping[str, Any]) -> bytes:
    arrays = {
        k: pa.array(v.tolist(), pa.string()).dictionary_encode() if k in TEXT else pa.array(v)
        for k, v in columns.items()
    }
    header = {"schema": SCHEMA, "kind": "sweep", "sweep": dict(description)}
    table = pa.table(arrays).replace_schema_metadata(
        {"draftsim": json.dumps(header, default=_plain)}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _columns(table: pa.Table) -> Columns:
    return {
        name: np.array(table.column(name).to_pylist(), dtype=object) if name in TEXT
        else table.column(name).to_numpy()
        for name in table.column_names
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return str(value)
