"""Measured runs on a device: the table that predictions are compared with, and its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from traces.store.header import MOST, PathLike, check_rows, file_error, meta_of
from traces.store.parquet import read_file, write_file

MEASURED_COLUMNS = (
    "policy", "verify", "batch", "forced", "repeat", "request", "wall_s", "rounds"
)  # fmt: skip
"""One row per run, repeat and request (or group of requests decoded together): ``request`` is its
id, ``wall_s`` decode seconds after prefill, ``rounds`` the number of verifications."""

OFF_COLUMNS = ("off_s", "repeated")
"""If it was watched: the part of ``wall_s`` without a processor, in seconds, and how often the run
was repeated because it was disturbed (the row has the least disturbed one)."""


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """Times of real runs (`MEASURED_COLUMNS`), and where they were taken."""

    times: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)


def write_measured(runs: MeasuredRuns, path: PathLike) -> None:
    """Write measured runs, atomically."""
    table = pa.Table.from_pandas(runs.times, preserve_index=False).replace_schema_metadata(None)
    write_file(path, "measured", table, {"meta": dict(runs.meta)})


def read_measured(path: PathLike) -> MeasuredRuns:
    """Return the measured runs in a file.

    Raises
    ------
    FileError
        If the file is missing or damaged, lacks a column, holds no run or an impossible value, or
        an arm lacks a run of a request and repeat that another arm has.
    """
    header, table = read_file(path, "measured")
    if missing := [c for c in MEASURED_COLUMNS if c not in table.column_names]:
        raise file_error(path, f"lacks the column(s) {', '.join(missing)}")
    meta = meta_of(path, header)
    if not table.num_rows:
        raise file_error(path, "holds no run", "measure again")
    for name, kind in _KINDS.items():
        if name in table.column_names:
            column = table.column(name)
            gaps = column.null_count if name not in OFF_COLUMNS else 0
            if not kind(column.type) or gaps:
                raise file_error(
                    path, f"column {name!r} is of type {column.type}, with {gaps} gaps"
                )
    times = table.to_pandas()
    least = {"batch": 1, "repeat": 0, "wall_s": 0, "rounds": 0, "off_s": 0, "repeated": 0}
    check_rows(
        path,
        {
            f"{low} <= {name} <= {MOST}": _within(times, name, low)
            for name, low in least.items()
            if name in times
        },
    )
    _check_whole(path, times)
    return MeasuredRuns(times, meta)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_KINDS: Mapping[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("policy", "verify", "request", "pair", "mode"), _is_text),
    **dict.fromkeys(("batch", "repeat", "rounds", "repeated"), pa.types.is_integer),
    **dict.fromkeys(("wall_s", "off_s"), pa.types.is_floating),
    "forced": pa.types.is_boolean,
}


def _within(times: pd.DataFrame, name: str, low: float) -> npt.NDArray[np.bool_]:
    """Return True for values in range; unmeasured values are NaN and allowed."""
    values = times[name].to_numpy(float)
    unwatched = np.isnan(values) & (name in OFF_COLUMNS)
    return np.asarray(unwatched | ((values >= low) & (values <= MOST)))


def _check_whole(path: PathLike, times: pd.DataFrame) -> None:
    """Raise FileError unless every arm of a batch ran every request in every repeat, once."""
    together = [name for name in ("pair", "mode", "batch", "forced") if name in times]
    runs = times.groupby([*together, "policy", "verify", "repeat", "request"]).size()
    if (runs > 1).any():
        again = dict(zip(runs.index.names, runs.index[int(runs.argmax())], strict=True))
        raise file_error(path, f"holds a run twice: {again}", "measure again")
    for _, part in times.groupby(together):
        arms = part.groupby(["policy", "verify"]).size()
        grid = part["repeat"].nunique() * part["request"].nunique()
        if (arms != grid).any():
            policy, verify = arms.index[int((arms != grid).argmax())]
            raise file_error(
                path,
                f"{policy} / {verify} has {arms[policy, verify]} runs of the {grid} that its "
                "requests and repeats make",
                "measure again",
            )
