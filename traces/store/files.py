"""Reading and writing traces, latency tables and round logs.

Every reader returns an object that passed its own checks, or raises `FileError` in one
line that names the file, the field and what to do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from traces.acceptance.trace import COLUMNS, KEYS, Request, Trace
from traces.errors import DraftsimError, FileError
from traces.latency.schema import CELL_COLUMNS
from traces.latency.table import LatencyTable
from traces.replay.rounds import ROUND_DTYPE, Fidelity, RoundLog
from traces.store.parquet import file_error, read_file, write_file

PathLike = str | os.PathLike[str]

CHECKED = "latency-check.parquet"
"""File of a run folder that keeps latencies measured between real runs."""


def write_trace(trace: Trace, path: PathLike) -> None:
    """Write a trace: one row per drafted token, requests and provenance in the header."""
    header = {
        "max_gamma": trace.max_gamma,
        "requests": [asdict(r) for r in trace.requests],
        "meta": dict(trace.meta),
    }
    columns = {name: trace.columns[name] for name in COLUMNS if name in trace.columns}
    write_file(path, "trace", pa.table(columns), header)


def read_trace(path: PathLike) -> Trace:
    """The trace in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "trace")
    dtypes = {name: dtype for name, (dtype, _) in COLUMNS.items()}
    if unknown := sorted(set(table.column_names) - set(dtypes)):
        raise file_error(path, f"unknown column(s) {', '.join(unknown)}", "upgrade draftsim")
    columns = _columns(path, table, {n: dtypes[n] for n in dtypes if n in table.column_names})
    if missing := [name for name in KEYS if name not in columns]:
        raise file_error(path, f"lacks the column(s) {', '.join(missing)}")
    max_gamma = header.get("max_gamma")
    if max_gamma is not None and (type(max_gamma) is not int or max_gamma < 1):
        raise file_error(path, f"header field 'max_gamma' is {max_gamma!r}, expected null or >= 1")
    meta = _mapping(path, header, "meta")
    requests = _requests(path, header)
    with _named(path):
        return Trace(columns, requests, max_gamma, meta)


def write_latency(table: LatencyTable, path: PathLike) -> None:
    """Write a latency table: one row per cell, provenance in the header."""
    arrays = {}
    for name, (dtype, _) in CELL_COLUMNS.items():
        if dtype == "str":
            arrays[name] = pa.array([str(v) for v in table.cells[name]], pa.string())
        else:
            arrays[name] = pa.array(table.cells[name].to_numpy(dtype))
    write_file(path, "latency", pa.table(arrays), {"meta": dict(table.meta)})


def read_latency(path: PathLike) -> LatencyTable:
    """The latency table in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "latency")
    columns = _columns(path, table, {name: dtype for name, (dtype, _) in CELL_COLUMNS.items()})
    meta = _mapping(path, header, "meta")
    with _named(path):
        return LatencyTable(pd.DataFrame(columns), meta)


_LOG_FIELDS = ("policy", "source", "verify", "fidelity", "reads", "first", "drafter")


def write_rounds(log: RoundLog, path: PathLike) -> None:
    """Write a round log: one row per round, requests and policy in the header.

    The calls of sources other than a draft model become lists, one per round.

    The rule object a lossy run ended with is not kept, its description is (``verify``).
    """
    names = ROUND_DTYPE.names or ()
    columns = {name: np.ascontiguousarray(log.rounds[name]) for name in names}
    if log.mismatched is not None:
        columns["mismatched"] = np.asarray(log.mismatched, np.int32)
    if log.calls is not None:
        columns |= _call_lists(log.calls, len(log))
    header = {name: getattr(log, name) for name in _LOG_FIELDS}
    header["requests"] = [asdict(r) for r in log.requests]
    write_file(path, "rounds", pa.table(columns), header)


def read_rounds(path: PathLike) -> RoundLog:
    """The round log in the file at `path`.

    Raises
    ------
    FileError
        If the file is missing, damaged, of another schema or kind, or contradicts itself.
    """
    header, table = read_file(path, "rounds")
    names = ROUND_DTYPE.names or ()
    dtypes = {name: ROUND_DTYPE[name].name for name in names}
    if "mismatched" in table.column_names:
        dtypes["mismatched"] = "int32"
    columns = _columns(path, table, dtypes)
    rounds = np.empty(table.num_rows, dtype=ROUND_DTYPE)
    for name in names:
        rounds[name] = columns[name]
    requests = _requests(path, header)
    if (rounds["request"] < 0).any() or (rounds["request"] >= len(requests)).any():
        raise file_error(path, f"column 'request' names none of the {len(requests)} requests")
    for name in ("policy", "source", "verify"):
        if not isinstance(header.get(name), str):
            raise file_error(path, f"header field {name!r} is {header.get(name)!r}, expected text")
    if header.get("fidelity") not in get_args(Fidelity):
        raise file_error(path, f"header field 'fidelity' is {header.get('fidelity')!r}")
    reads, first = header.get("reads"), header.get("first")
    if not isinstance(reads, list) or not all(isinstance(name, str) for name in reads):
        raise file_error(path, f"header field 'reads' is {reads!r}, expected a list of signals")
    if first not in (0, 1):
        raise file_error(path, f"header field 'first' is {first!r}, expected 0 or 1")
    return RoundLog(
        rounds, requests, header["policy"], header["source"], header["verify"],
        header["fidelity"], tuple(reads), first, columns.get("mismatched"),
        calls=_calls(path, table), drafter=str(header.get("drafter", "draft")),
    )  # fmt: skip


CALL_FIELDS = ("verify", "kind", "new_tokens", "count")


def _call_lists(calls: npt.NDArray[np.void], rounds: int) -> dict[str, Any]:
    """The calls of each round as one list per field of theirs."""
    ordered = calls[np.argsort(calls["round"], kind="stable")]
    stops = np.searchsorted(ordered["round"], np.arange(rounds + 1)).astype(np.int32)
    return {
        f"calls_{name}": pa.ListArray.from_arrays(
            pa.array(stops), pa.array(np.ascontiguousarray(ordered[name]))
        )
        for name in CALL_FIELDS
    }


def _calls(path: PathLike, table: pa.Table) -> npt.NDArray[np.void] | None:
    """What `_call_lists` laid out; None where the rounds are those of a draft model."""
    # `traces.sources` reads its own files through this module.
    from traces.replay.calls import CALL_DTYPE, CALL_KINDS

    if not any(f"calls_{name}" in table.column_names for name in CALL_FIELDS):
        return None
    parts: dict[str, npt.NDArray[Any]] = {}
    counts: npt.NDArray[Any] | None = None
    for name in CALL_FIELDS:
        column = f"calls_{name}"
        if column not in table.column_names:
            raise file_error(path, f"lacks the column {column!r}")
        lists = table.column(column).combine_chunks()
        expected = pa.from_numpy_dtype(CALL_DTYPE[name])
        if not pa.types.is_list(lists.type) or lists.type.value_type != expected:
            raise file_error(
                path, f"column {column!r} is of type {lists.type}, expected lists of {expected}"
            )
        values = lists.flatten()
        if lists.null_count or values.null_count:
            raise file_error(path, f"column {column!r} has missing values")
        parts[name] = values.to_numpy(zero_copy_only=False)
        mine = lists.value_lengths().to_numpy(zero_copy_only=False)
        if counts is not None and not np.array_equal(counts, mine):
            raise file_error(path, f"column {column!r} has lists of other lengths than the others")
        counts = mine
    assert counts is not None
    calls = np.zeros(int(counts.sum()), dtype=CALL_DTYPE)
    calls["round"] = np.repeat(np.arange(len(counts)), counts)
    for name, values in parts.items():
        calls[name] = values
    if ((calls["kind"] < 0) | (calls["kind"] >= len(CALL_KINDS))).any():
        raise file_error(path, "column 'calls_kind' names an unknown kind", "upgrade draftsim")
    return calls


def _columns(
    path: PathLike, table: pa.Table, dtypes: Mapping[str, str]
) -> dict[str, npt.NDArray[Any]]:
    """The named columns as arrays of exactly these dtypes."""
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


def _mapping(path: PathLike, header: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = header.get(name)
    if not isinstance(value, dict):
        raise file_error(path, f"header field {name!r} is missing or no table")
    return value


def _requests(path: PathLike, header: Mapping[str, Any]) -> list[Request]:
    rows = header.get("requests")
    if not isinstance(rows, list):
        raise file_error(path, "header field 'requests' is missing or no list")
    return [_request(path, i, row) for i, row in enumerate(rows)]


def _request(path: PathLike, index: int, row: object) -> Request:
    defaults = {f.name: f.default for f in fields(Request)}
    required = {name for name, default in defaults.items() if default is MISSING}
    if not isinstance(row, dict) or not required <= set(row) <= set(defaults):
        raise file_error(
            path, f"request {index} of the header does not have the fields {sorted(defaults)}"
        )
    row = {name: row.get(name, default) for name, default in defaults.items()}
    integers = ("prompt_length", "tokens", "max_new_tokens")
    for name in ("id", "category", *integers):
        if type(row[name]) is not (int if name in integers else str):
            raise file_error(path, f"request {index} of the header has {name}={row[name]!r}")
    if row["ended"] not in ("eos", "length"):
        raise file_error(path, f"request {index} has ended={row['ended']!r}, not 'eos' or 'length'")
    ids, wall_s = row["prompt_ids"], row["wall_s"]
    if ids is not None and not _is_ids(ids):
        raise file_error(path, f"request {index} has prompt_ids that are no list of token ids")
    if wall_s is not None and not (type(wall_s) in (int, float) and math.isfinite(wall_s)):
        raise file_error(path, f"request {index} has wall_s={wall_s!r}, expected seconds")
    return Request(**{**row, "prompt_ids": None if ids is None else tuple(ids)})


def _is_ids(value: object) -> bool:
    return isinstance(value, Sequence) and all(type(item) is int for item in value)


@contextmanager
def _named(path: PathLike) -> Iterator[None]:
    """What an object says of its own contents becomes an error of the file."""
    try:
        yield
    except DraftsimError as error:
        text = str(error)
        named = f"{path}: {text}" if ": " in text else f"{path}: {text}: record it again"
        raise FileError(named) from error
    except OverflowError as error:
        raise file_error(path, "the header holds a number beyond 64 bits") from error
