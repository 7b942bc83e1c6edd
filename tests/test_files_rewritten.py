"""Recordings as another program would write them: what is wrong with them is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import traces.store.parquet
from policies.lengths.basic import Fixed
from tests.random_sources import random_outputs, random_recordings
from tests.stored import assert_same, small_trace
from traces.acceptance.synthetic import synthetic_trace
from traces.acceptance.trace import Trace
from traces.errors import FileError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.sources.exit_recording import ExitRecording
from traces.sources.found import write_recordings
from traces.sources.starts.sources import StartRecording
from traces.sources.starts.trees import TreeRecording
from traces.store.engine_runs import MeasuredRuns, read_measured, write_measured
from traces.store.files import (
    read_latency,
    read_rounds,
    read_trace,
    write_latency,
    write_rounds,
    write_trace,
)
from traces.store.parquet import write_file

READERS: dict[str, Callable[[Path], Any]] = {
    "starts": StartRecording.read, "exits": ExitRecording.read, "trees": TreeRecording.read,
}  # fmt: skip


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


def replayed(folder: Path) -> Path:
    """A round log with two requests' rounds, written."""
    write_rounds(replay(small_trace(), Fixed(2), name="fixed"), folder / "rounds")
    return folder / "rounds"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("catch_up", -7, "row 3 breaks 0 <= catch_up <= the tokens before the round"),
        ("catch_up", 2**31 - 1, "row 3 breaks 0 <= catch_up"),
        ("draft_forwards", 2**31 - 1, "row 3 breaks 0 <= draft_forwards <= 4096"),
        ("drafted", -1, "row 3 breaks 0 <= accepted <= drafted <= 4096"),
        ("emitted", 0, "row 3 breaks 1 <= emitted"),
        ("position", 0, "row 2 breaks position . emitted = the next round's position"),
        ("request", 9, "row 3 breaks 0 <= request < 3"),
    ],
)
def test_rounds_that_cannot_have_been_are_named(
    tmp_path: Path, name: str, value: int, message: str
) -> None:
    file = replayed(tmp_path)
    values = read_rounds(file).rounds[name].copy()
    values[3] = value
    with pytest.raises(FileError, match=f"rewritten: {message}"):
        read_rounds(rewrite(file, column=(name, pa.array(values))))


def test_a_log_without_its_last_rounds_is_named(tmp_path: Path) -> None:
    log = replay(small_trace(), Fixed(2), name="fixed")
    for rounds, message in ((log.rounds[:-1], "in its last round"), (log.rounds[:0], "no round")):
        write_rounds(replace(log, rounds=rounds), tmp_path / "cut")
        with pytest.raises(FileError, match=message):
            read_rounds(tmp_path / "cut")


MEASURED: dict[str, list[Any]] = {
    "policy": ["a"] * 4, "verify": ["exact"] * 4, "batch": [1] * 4, "forced": [True] * 4,
    "repeat": [0, 0, 1, 1], "request": ["x", "y"] * 2, "wall_s": [0.1, 0.2, 0.1, 0.2],
    "rounds": [3, 4] * 2,
}  # fmt: skip


def test_measured_runs_that_are_whole_are_read(tmp_path: Path) -> None:
    write_measured(MeasuredRuns(pd.DataFrame(MEASURED)), tmp_path / "m")
    assert read_measured(tmp_path / "m").times.to_dict("list") == MEASURED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({name: [] for name in MEASURED}, "holds no run"),
        ({name: values[:3] for name, values in MEASURED.items()},
         "a / exact has 3 runs of the 4 that its requests and repeats make"),
        ({"repeat": [0, 0, 1, 0]}, "holds a run twice: .*'request': 'y'"),
        ({"rounds": list("3434")}, "column 'rounds' is of type string"),
        ({"policy": ["a", None, "a", "a"]}, "column 'policy' is of type string, with 1 gaps"),
        ({"wall_s": [0.1, float("nan"), 0.1, 0.2]}, "row 1 breaks 0 <= wall_s"),
        ({"batch": [1, 0, 1, 1]}, "row 1 breaks 1 <= batch"),
    ],
)  # fmt: skip
def test_measured_runs_that_are_none_are_named(
    tmp_path: Path, changed: dict[str, list[Any]], message: str
) -> None:
    times = pa.table({**MEASURED, **changed})
    write_file(tmp_path / "m", "measured", times, {"meta": {}})
    with pytest.raises(FileError, match=message):
        read_measured(tmp_path / "m")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of other draft sources."""
    folder = tmp_path_factory.mktemp("sources")
    write_recordings(random_recordings(random_outputs(3), 3, missing=0.0), folder)
    return folder


@pytest.mark.parametrize("name", ["starts-medusa", "exits", "trees-eagle2.eagle"])
@pytest.mark.parametrize(
    "meta",
    [[], "text", -1, None, {"sampling": []}, {"layers": "x"}, {"tensor_parallel": {"target": "x"}}],
)
def test_a_source_whose_provenance_is_no_table_is_named(
    sources: Path, name: str, meta: object
) -> None:
    file = rewrite(sources / f"{name}.parquet", header={"meta": meta})
    with pytest.raises(FileError, match="rewritten: header field 'meta"):
        READERS[name.partition("-")[0]](file)


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("exits", {"layers": 10**12}, "'layers' is 1000000000000, expected 1 to 4096"),
        ("exits", {"path_starts": [0, 5, 3]}, "'path_starts' is .0, 5, 3., expected rows"),
        ("exits", {"settings": [[0.5, 0.3, 0.5, None, "x"]]}, "'settings' is .*expected tau"),
        ("starts-medusa", {"offsets": 10**9}, "'offsets' is 1000000000, expected 1 to 4096"),
        ("starts-medusa", {"request_starts": None}, "'request_starts' is None, expected rows"),
        ("trees-eagle2.eagle", {"layers": -1}, "'layers' is -1, expected 1 to 4096"),
    ],
)
def test_a_sources_header_is_checked(
    sources: Path, name: str, header: dict[str, Any], message: str
) -> None:
    with pytest.raises(FileError, match=message):
        READERS[name.partition("-")[0]](rewrite(sources / f"{name}.parquet", header=header))


def test_a_source_without_rows_or_with_gaps_is_named(sources: Path) -> None:
    exits = pq.read_table(sources / "exits.parquet")
    header = json.loads(pq.read_metadata(sources / "exits.parquet").metadata[b"draftsim"])
    for table, message in (
        (exits.slice(0, 0), "header field 'path_starts'"),
        (exits.set_column(3, "token", pa.array([None] * len(exits), pa.int32())), "'token' is of"),
        (exits.set_column(4, "argmax", pa.array([[1]] * len(exits))), "'argmax' is of type"),
    ):
        write_file(sources / "changed", "exits", table, header)
        with pytest.raises(FileError, match=message):
            ExitRecording.read(sources / "changed")


def test_a_draft_vocabulary_may_be_padded_beyond_the_targets(tmp_path: Path) -> None:
    """Its tokens are no damage; those beyond both vocabularies are."""
    made, path = synthetic_trace(0.5, requests=2, tokens=6, seed=3), tmp_path / "trace.parquet"
    trace = Trace(made.columns, made.requests, 4, made.meta)
    token = np.full(len(trace), 110, np.int32)
    columns = {**trace.columns, "draft_token": token}
    for padded, read in ((128, True), (105, False)):
        meta = {**trace.meta, "target": {"vocab_size": 100}, "draft": {"vocab_size": padded}}
        write_trace(Trace(columns, trace.requests, trace.max_gamma, meta), path)
        if read:
            assert read_trace(path).columns["draft_token"].max() == 110
        else:
            with pytest.raises(FileError, match="token 110, of a vocabulary of 105"):
                read_trace(path)
