"""How numbers are laid out in files: floating-point ones split by bytes, and read as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.store import parquet
from traces.store.parquet import read_file, write_file
from traces.store.recordings import BUNDLED


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
