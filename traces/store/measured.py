"""Measured runs on a device: the table a prediction is held against, and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa

from traces.store.parquet import file_error, read_file, write_file

MEASURED_COLUMNS = (
    "policy", "verify", "batch", "forced", "repeat", "request", "wall_s", "rounds"
)  # fmt: skip
"""One row per arm, repeat and request (or group of requests decoded together): ``request``
is its id, ``wall_s`` decoding seconds after prefill, ``rounds`` verifications it took."""

OFF_COLUMNS = ("off_s", "repeated")
"""Where it was watched: the seconds of ``wall_s`` without a processor, and how often the run was
made again because it was disturbed (the least disturbed one is in the row)."""


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """Times of real runs (`MEASURED_COLUMNS`), and where they were taken."""

    times: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)


def write_measured(runs: MeasuredRuns, path: str | os.PathLike[str]) -> None:
    """Write measured runs, atomically."""
    table = pa.Table.from_pandas(runs.times, preserve_index=False).replace_schema_metadata(None)
    write_file(path, "measured", table, {"meta": dict(runs.meta)})


def read_measured(path: str | os.PathLike[str]) -> MeasuredRuns:
    """The measured runs in a file; `FileError` names what is wrong with it."""
    header, table = read_file(path, "measured")
    if missing := [c for c in MEASURED_COLUMNS if c not in table.column_names]:
        raise file_error(path, f"lacks the column(s) {', '.join(missing)}")
    meta = header.get("meta")
    return MeasuredRuns(table.to_pandas(), meta if isinstance(meta, dict) else {})
