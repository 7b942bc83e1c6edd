"""Reading and writing operator tables."""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
import pyarrow as pa

from traces.errors import DraftsimError, FileError
from traces.operators.table import OPERATOR_COLUMNS, OperatorTable
from traces.store.parquet import file_error, read_file, write_file

PathLike = str | os.PathLike[str]


def write_operators(table: OperatorTable, path: PathLike) -> None:
    """Write an operator table: one row per timing, provenance in the header."""
    arrays = {}
    for name, (dtype, _) in OPERATOR_COLUMNS.items():
        values = table.rows[name]
        text = dtype == "str"
        arrays[name] = (
            pa.array([str(v) for v in values], pa.string()) if text
            else pa.array(values.to_numpy(dtype))
        )  # fmt: skip
    write_file(path, "operators", pa.table(arrays), {"meta": dict(table.meta)})


def read_operators(path: PathLike) -> OperatorTable:
    """The operator table in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "operators")
    columns = {}
    for name, (dtype, _) in OPERATOR_COLUMNS.items():
        if name not in table.column_names:
            raise file_error(path, f"lacks the column {name!r}")
        column = table.column(name)
        expected = pa.string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
        if column.type != expected or column.null_count:
            raise file_error(path, f"column {name!r} is of type {column.type}, expected {expected}")
        columns[name] = (
            np.array(column.to_pylist(), dtype=object) if dtype == "str" else column.to_numpy()
        )
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise file_error(path, "header field 'meta' is missing or no table")
    try:
        return OperatorTable(pd.DataFrame(columns), meta)
    except DraftsimError as error:
        raise FileError(f"{path}: {error}: import it again") from error
