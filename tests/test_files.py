"""Reading and writing recordings: exact round trips, and one error type for bad files."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import traces.store.writing
from policies.lengths.basic import Fixed
from tests.stored import assert_same, small_trace
from traces.acceptance.trace import Request, Trace
from traces.errors import FileError
from traces.latency.table import CELL_COLUMNS, LatencyTable
from traces.replay.run import replay
from traces.store import parquet
from traces.store.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.store.parquet import read_file, write_file
from traces.store.recordings import BUNDLED

QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.invariant(13)
def test_trace_comes_back_bit_for_bit(trace_file: Path) -> None:
    assert_same(read_trace(trace_file), small_trace())
    assert stat.S_IMODE(trace_file.stat().st_mode) == 0o644


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
    log = replace(log, drafter="eagle", takes_verified=True)
    write_rounds(log, tmp_path / "r")
    again = read_rounds(tmp_path / "r")
    assert again.rounds.tobytes() == log.rounds.tobytes()
    assert list(again.requests) == list(log.requests)
    for name in (
        "policy", "source", "verify", "fidelity", "reads", "first", "mismatched", "drafter",
        "takes_verified",
    ):  # fmt: skip
        assert getattr(again, name) == getattr(log, name)


def test_one_kind_read_as_another_says_so(trace_file: Path) -> None:
    with pytest.raises(FileError, match="is an acceptance trace, not a latency table"):
        read_latency(trace_file)
    with pytest.raises(FileError, match="is an acceptance trace, not a round log"):
        read_rounds(trace_file)


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


@pytest.mark.invariant(13)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    before = trace_file.read_bytes()

    def fail(descriptor: int) -> None:
        raise stop

    monkeypatch.setattr(traces.store.writing.os, "fsync", fail)
    with pytest.raises((KeyboardInterrupt, FileError)):
        write_trace(small_trace().select([0]), trace_file)
    assert trace_file.read_bytes() == before
    assert list(trace_file.parent.iterdir()) == [trace_file]


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


@pytest.mark.invariant(13)
@given(st.data())
@QUIET
def test_every_truncation_is_found(trace_file: Path, data: st.DataObject) -> None:
    whole = trace_file.read_bytes()
    cut = trace_file.parent / "cut"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(FileError, match=r"truncated|is empty|not a Parquet file|damaged"):
        read_trace(cut)


@pytest.mark.invariant(13)
@given(st.data())
@settings(QUIET, max_examples=300)
def test_a_changed_byte_is_found(trace_file: Path, data: st.DataObject) -> None:
    whole = trace_file.read_bytes()
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    changed = trace_file.parent / "changed"
    changed.write_bytes(bytes(content))
    if content == whole:
        assert_same(read_trace(changed), small_trace())
        return
    with pytest.raises(FileError, match="changed: ") as caught:
        read_trace(changed)
    assert "\n" not in str(caught.value)


def test_damage_to_the_checksum_itself_does_not_hide_other_damage(trace_file: Path) -> None:
    content = trace_file.read_bytes()
    for broken in (b"draftsim.sha255", b"draftsim.shb256"):
        changed = content.replace(b"draftsim.sha256", broken)
        assert changed != content
        (trace_file.parent / "changed").write_bytes(changed)
        with pytest.raises(FileError, match="changed: has no checksum"):
            read_trace(trace_file.parent / "changed")


def test_a_phase_of_an_older_table_has_its_name_of_today(tmp_path: Path) -> None:
    made = LatencyTable.constant(1.0, 0.1)
    old = made.cells.assign(phase="beside").iloc[:1]
    cells = pd.concat([made.cells, old], ignore_index=True)
    arrays = {
        name: pa.array(cells[name].to_numpy(object if dtype == "str" else dtype))
        for name, (dtype, _) in CELL_COLUMNS.items()
    }
    header = {"meta": dict(made.meta)}
    traces.store.parquet.write_file(tmp_path / "l", "latency", pa.table(arrays), header)
    assert read_latency(tmp_path / "l").has("target", "with_prompts")


def table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    logits = (20 + rng.normal(size=rows)).astype(np.float32)
    logits[::7] = np.nan
    return pa.table(
        {
            "token": np.arange(rows, dtype=np.int32) // 3,
            "name": pa.array([f"n{i % 5}" for i in range(rows)], pa.string()),
            "logit": logits,
            "seconds": rng.random(rows),
            "exits": pa.FixedSizeListArray.from_arrays(
                pa.array(rng.normal(size=2 * rows).astype(np.float32)), 2
            ),
            "calls": pa.array([[i, i] for i in range(rows)], pa.list_(pa.int32())),
        }
    )


def encodings(path: Path) -> dict[str, tuple[str, ...]]:
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return {column.path_in_schema.split(".")[0]: column.encodings for column in columns}


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_what_is_written_is_read(tmp_path: Path, rows: int) -> None:
    write_file(tmp_path / "a.parquet", "trace", table(rows), {})
    _, found = read_file(tmp_path / "a.parquet", "trace")
    expected = table(rows)
    for name in expected.column_names:
        one, other = (t.column(name).combine_chunks() for t in (found, expected))
        if name == "logit":  # NaN, bit by bit
            assert one.to_numpy().tobytes() == other.to_numpy().tobytes()
        else:
            assert one.to_pylist() == other.to_pylist()


def test_numbers_are_split_by_bytes_and_the_rest_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_file(path, "trace", table(5000), {})
    split = {n for n, used in encodings(path).items() if "BYTE_STREAM_SPLIT" in used}
    assert split == {"logit", "seconds", "exits"}
    assert "RLE_DICTIONARY" in encodings(path)["token"]


def test_a_real_trace_takes_less_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, recorded = read_file(BUNDLED / "bundled" / "trace.parquet", "trace")
    write_file(tmp_path / "now.parquet", "trace", recorded, header)
    monkeypatch.setattr(parquet, "_leaves", lambda schema: ([], schema.names))
    write_file(tmp_path / "before.parquet", "trace", recorded, header)
    assert "BYTE_STREAM_SPLIT" not in encodings(tmp_path / "before.parquet")["draft_top1"]
    now, before = (read_file(tmp_path / f"{n}.parquet", "trace") for n in ("now", "before"))
    assert now[0] == before[0]
    for name in recorded.column_names:  # NaN, bit by bit
        one, other = (part[1].column(name).to_numpy().tobytes() for part in (now, before))
        assert one == other
    sizes = [(tmp_path / f"{n}.parquet").stat().st_size for n in ("now", "before")]
    assert sizes[0] < 0.75 * sizes[1]
