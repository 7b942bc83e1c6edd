"""Reading and writing recordings: exact round trips, and one error type for bad files."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import traces.parquet
from policies.basic import Fixed
from traces.errors import FileError
from traces.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.latency import LatencyTable
from traces.replay import replay
from traces.synthetic import synthetic_trace
from traces.trace import Request, Trace

QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def small_trace() -> Trace:
    return synthetic_trace(
        0.6, requests=3, tokens=12, concentration=3.0, max_gamma=4, eos_fraction=0.5
    )


def assert_same(left: Trace, right: Trace) -> None:
    assert list(left.requests) == list(right.requests)
    assert left.max_gamma == right.max_gamma
    assert json.dumps(left.meta, default=list) == json.dumps(right.meta, default=list)
    assert set(left.columns) == set(right.columns)
    for name, values in left.columns.items():
        other = right.columns[name]
        assert values.dtype == other.dtype
        assert values.tobytes() == other.tobytes(), name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    write_trace(small_trace(), path)
    return path


def test_trace_comes_back_bit_for_bit(file: Path) -> None:
    assert_same(read_trace(file), small_trace())
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@QUIET
def test_any_float32_signal_comes_back(tmp_path: Path, values: list[float]) -> None:
    count = len(values)
    columns = {
        "request": np.zeros(count, np.int32),
        "position": np.arange(count),
        "offset": np.zeros(count, np.int16),
        "match": np.ones(count, np.int8),
        "draft_entropy": np.array(values, np.float32),
    }
    request = Request("ä\n'", "", 2, count, count, "length", (3, 4), 0.1)
    trace = Trace(columns, [request], 5, {"seed": np.int64(3)})
    write_trace(trace, tmp_path / "t")
    back = read_trace(tmp_path / "t")
    assert back.columns["draft_entropy"].tobytes() == np.array(values, np.float32).tobytes()
    assert back.requests == [request]
    assert back.meta == {"seed": 3}


def test_latency_and_rounds_come_back(tmp_path: Path) -> None:
    table = LatencyTable.constant(0.1 + 0.2, 1e-9, verify=1 / 3, host_round=0.0)
    write_latency(table, tmp_path / "l")
    back = read_latency(tmp_path / "l")
    assert back.cells.equals(table.cells)
    assert back.meta == table.meta

    log = replay(small_trace(), Fixed(2), name="fixed")
    write_rounds(log, tmp_path / "r")
    again = read_rounds(tmp_path / "r")
    assert again.rounds.tobytes() == log.rounds.tobytes()
    assert list(again.requests) == list(log.requests)
    for name in ("policy", "source", "verify", "fidelity", "reads", "first", "mismatched"):
        assert getattr(again, name) == getattr(log, name)


READERS: dict[str, Callable[[Path], Any]] = {
    "trace": read_trace, "latency": read_latency, "rounds": read_rounds,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(data=st.binary(max_size=300), framed=st.booleans())
@QUIET
def test_random_bytes(
    tmp_path: Path, reader: Callable[[Path], Any], data: bytes, framed: bool
) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b"PAR1" + data + b"PAR1" if framed else data)
    with pytest.raises(FileError, match="noise") as caught:
        reader(path)
    assert "\n" not in str(caught.value)


@given(st.data())
@QUIET
def test_every_truncation_is_found(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    cut = file.parent / "cut"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(FileError, match=r"truncated|is empty|not a Parquet file|damaged"):
        read_trace(cut)


@given(st.data())
@settings(QUIET, max_examples=300)
def test_a_changed_byte_is_found(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    changed = file.parent / "changed"
    changed.write_bytes(bytes(content))
    if content == whole:
        assert_same(read_trace(changed), small_trace())
        return
    with pytest.raises(FileError, match="changed: ") as caught:
        read_trace(changed)
    assert "\n" not in str(caught.value)


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
    path.write_bytes(traces.parquet.sealed(content) if checksum else content)
    return path


def test_another_writer_is_read_but_only_with_a_checksum(file: Path) -> None:
    assert_same(read_trace(rewrite(file)), small_trace())
    with pytest.raises(FileError, match="rewritten: has no checksum"):
        read_trace(rewrite(file, checksum=False))


def test_damage_to_the_checksum_itself_does_not_hide_other_damage(file: Path) -> None:
    content = file.read_bytes()
    for broken in (b"draftsim.sha255", b"draftsim.shb256"):
        changed = content.replace(b"draftsim.sha256", broken)
        assert changed != content
        (file.parent / "changed").write_bytes(changed)
        with pytest.raises(FileError, match="changed: has no checksum"):
            read_trace(file.parent / "changed")


@pytest.mark.parametrize("name", ["request", "position", "offset", "match"])
def test_a_removed_key_column_is_named(file: Path, name: str) -> None:
    with pytest.raises(FileError, match=f"rewritten: lacks the column.* {name}"):
        read_trace(rewrite(file, drop=name))


def test_a_removed_latency_column_is_named(tmp_path: Path) -> None:
    write_latency(LatencyTable.constant(1, 1), tmp_path / "l")
    with pytest.raises(FileError, match="lacks the column 'spread_s'"):
        read_latency(rewrite(tmp_path / "l", drop="spread_s"))


def test_wrong_dtype_and_missing_values_are_named(file: Path) -> None:
    count = len(small_trace())
    doubles = pa.array(np.zeros(count))
    with pytest.raises(FileError, match="column 'draft_entropy' is of type double, expected float"):
        read_trace(rewrite(file, column=("draft_entropy", doubles)))
    holes = pa.array([None] * count, pa.float32())
    with pytest.raises(FileError, match=f"'draft_entropy' has {count} missing"):
        read_trace(rewrite(file, column=("draft_entropy", holes)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_signal_that_is_not_finite_is_named(file: Path, value: float) -> None:
    values = np.array(small_trace().columns["draft_entropy"])
    values[5] = value
    with pytest.raises(FileError, match=r"rewritten: .*'draft_entropy' is .*logits"):
        read_trace(rewrite(file, column=("draft_entropy", pa.array(values))))


def test_arrays_that_disagree_are_named_with_the_file(file: Path) -> None:
    header = {"requests": [vars(r) for r in small_trace().requests[:2]]}
    with pytest.raises(FileError, match=r"rewritten: .*names request 2, the table has 2"):
        read_trace(rewrite(file, header=header))


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
def test_a_wrong_header_is_named(file: Path, header: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_trace(rewrite(file, header=header))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", "7"), ("tokens", True), ("id", 3), ("ended", "stop"), ("prompt_ids", "ab"),
        ("prompt_ids", [1.5]), ("wall_s", "1"), ("wall_s", float("inf")), ("prompt_length", None),
    ],
)  # fmt: skip
def test_a_wrong_request_is_named(file: Path, field: str, value: object) -> None:
    rows = [{**vars(r)} for r in small_trace().requests]
    rows[1][field] = value
    with pytest.raises(FileError, match="request 1 "):
        read_trace(rewrite(file, header={"requests": rows}))


def test_numbers_beyond_64_bits_are_refused(file: Path) -> None:
    rows = [{**vars(r)} for r in small_trace().requests]
    rows[1] |= {"tokens": 1 << 70, "max_new_tokens": 1 << 70, "ended": "length"}
    with pytest.raises(FileError, match="beyond 64 bits"):
        read_trace(rewrite(file, header={"requests": rows}))


def test_one_kind_read_as_another_says_so(file: Path) -> None:
    with pytest.raises(FileError, match="is an acceptance trace, not a latency table"):
        read_latency(file)
    with pytest.raises(FileError, match="is an acceptance trace, not a round log"):
        read_rounds(file)


def test_missing_directory_text_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_trace(tmp_path / "none.parquet")
    with pytest.raises(FileError, match="is a directory"):
        read_trace(tmp_path)
    (tmp_path / "text").write_text("a,b\n1,2\n")
    with pytest.raises(FileError, match="not a Parquet file"):
        read_trace(tmp_path / "text")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign")
    with pytest.raises(FileError, match="not written by draftsim"):
        read_trace(tmp_path / "foreign")
    with pytest.raises(FileError, match="cannot be written"):
        write_trace(small_trace(), tmp_path / "no" / "folder")
    with pytest.raises(FileError, match="cannot be written"):
        write_trace(small_trace(), tmp_path)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    before = file.read_bytes()

    def fail(descriptor: int) -> None:
        raise stop

    monkeypatch.setattr(traces.parquet.os, "fsync", fail)
    with pytest.raises((KeyboardInterrupt, FileError)):
        write_trace(small_trace().select([0]), file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
