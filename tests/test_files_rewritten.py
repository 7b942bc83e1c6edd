"""Recordings as another program would write them: what is wrong with them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import traces.store.parquet
from tests.stored import assert_same, small_trace
from traces.errors import FileError
from traces.latency.table import LatencyTable
from traces.store.files import read_latency, read_trace, write_latency


def rewrite(
    file: Path,
    *,
    drop: str | None = None,
    header: dict[str, Any] | None = None,
    column: tuple[str, Any] | None = None,
    checksum: bool = True,
) -> Path:
    """The file as another program would write it; its checksum is right if it has one."""
    parquet = pq.ParquetFile(file)
    table = parquet.read()
    if drop is not None:
        table = table.drop_columns([drop])
    if column is not None:
        table = table.set_column(table.column_names.index(column[0]), column[0], column[1])
    text = json.loads(parquet.metadata.metadata[b"draftsim"]) | (header or {})
    path = file.parent / "rewritten"
    metadata = {"draftsim": json.dumps(text)}
    if checksum:
        metadata["draftsim.sha256"] = "0" * 64
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    content = sink.getvalue().to_pybytes()
    path.write_bytes(traces.store.parquet.sealed(content) if checksum else content)
    return path


def test_another_writer_is_read_but_only_with_a_checksum(trace_file: Path) -> None:
    assert_same(read_trace(rewrite(trace_file)), small_trace())
    with pytest.raises(FileError, match="rewritten: has no checksum"):
        read_trace(rewrite(trace_file, checksum=False))


@pytest.mark.parametrize("name", ["request", "position", "offset", "match"])
def test_a_removed_key_column_is_named(trace_file: Path, name: str) -> None:
    with pytest.raises(FileError, match=f"rewritten: lacks the column.* {name}"):
        read_trace(rewrite(trace_file, drop=name))


def test_a_removed_latency_column_is_named(tmp_path: Path) -> None:
    write_latency(LatencyTable.constant(1, 1), tmp_path / "l")
    with pytest.raises(FileError, match="lacks the column 'spread_s'"):
        read_latency(rewrite(tmp_path / "l", drop="spread_s"))


def test_wrong_dtype_and_missing_values_are_named(trace_file: Path) -> None:
    count = len(small_trace())
    doubles = pa.array(np.zeros(count))
    with pytest.raises(FileError, match="column 'draft_entropy' is of type double, expected float"):
        read_trace(rewrite(trace_file, column=("draft_entropy", doubles)))
    holes = pa.array([None] * count, pa.float32())
    with pytest.raises(FileError, match=f"'draft_entropy' has {count} missing"):
        read_trace(rewrite(trace_file, column=("draft_entropy", holes)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_signal_that_is_not_finite_is_named(trace_file: Path, value: float) -> None:
    values = np.array(small_trace().columns["draft_entropy"])
    values[5] = value
    with pytest.raises(FileError, match=r"rewritten: .*'draft_entropy' is .*logits"):
        read_trace(rewrite(trace_file, column=("draft_entropy", pa.array(values))))


def test_arrays_that_disagree_are_named_with_the_file(trace_file: Path) -> None:
    header = {"requests": [vars(r) for r in small_trace().requests[:2]]}
    with pytest.raises(FileError, match=r"rewritten: .*names request 2, the table has 2"):
        read_trace(rewrite(trace_file, header=header))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"schema": 99}, "schema version 99.*upgrade draftsim"),
        ({"schema": 0}, "schema version 0.*record it again"),
        ({"schema": "1"}, "names no schema version"),
        ({"kind": 7}, "of kind 7"),
        ({"max_gamma": "4"}, "'max_gamma' is '4'"),
        ({"meta": []}, "'meta' is missing or no table"),
        ({"requests": 3}, "'requests' is missing or no list"),
        ({"requests": [{}]}, "request 0 .* fields"),
    ],
)
def test_a_wrong_header_is_named(trace_file: Path, header: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_trace(rewrite(trace_file, header=header))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", "7"), ("tokens", True), ("id", 3), ("ended", "stop"), ("prompt_ids", "ab"),
        ("prompt_ids", [1.5]), ("wall_s", "1"), ("wall_s", float("inf")), ("prompt_length", None),
    ],
)  # fmt: skip
def test_a_wrong_request_is_named(trace_file: Path, field: str, value: object) -> None:
    rows = [{**vars(r)} for r in small_trace().requests]
    rows[1][field] = value
    with pytest.raises(FileError, match="request 1 "):
        read_trace(rewrite(trace_file, header={"requests": rows}))


def test_numbers_beyond_64_bits_are_refused(trace_file: Path) -> None:
    rows = [{**vars(r)} for r in small_trace().requests]
    rows[1] |= {"tokens": 1 << 70, "max_new_tokens": 1 << 70, "ended": "length"}
    with pytest.raises(
        FileError, match="request 1 of the header has tokens=1180591620717411303424"
    ):
        read_trace(rewrite(trace_file, header={"requests": rows}))
