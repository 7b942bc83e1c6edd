"""Files of what was recorded for sources other than a draft model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.acceptance.schema import MOST_DRAFTED
from traces.errors import DraftsimError, FileError
from traces.sources.base import Recordings
from traces.sources.columns import DRAWN
from traces.sources.exits.recording import NODE_COLUMNS, ExitRecording, ExitSetting
from traces.sources.exits.recording import SIGNALS as EXIT_SIGNALS
from traces.sources.starts.recording import START_SIGNALS, StartRecording
from traces.sources.starts.trees import TREE_SIGNALS, TreeRecording
from traces.store.header import (
    PathLike,
    are_wholes,
    check,
    check_rows,
    is_number,
    is_whole,
    meta_of,
    starts_of,
)
from traces.store.parquet import file_error, read_file, write_file

EXITS, STARTS, TREES = "exits", "starts", "trees"
ADAPTER_FILE = "exits-kangaroo.parquet"
STARTS_FILE = "starts-{}.parquet"
SAMPLED_STARTS_FILE = "sampled-starts-{}.parquet"
TREES_FILE = "trees-{}.parquet"
MOST_LAYERS = 4096
"""Most layers of a model."""


def write_exits(recording: ExitRecording, path: PathLike) -> None:
    """Write an early-exit recording: one row per node, a list per exit layer."""
    columns = {name: pa.array(recording.nodes[name]) for name in NODE_COLUMNS}
    columns["argmax"] = _lists(recording.argmax)
    columns["log_confidence"] = _lists(recording.log_confidence.reshape(len(recording.argmax), -1))
    columns |= {name: _lists(recording.signals[name]) for name in EXIT_SIGNALS}
    columns |= _drawn_lists(recording)
    header = {
        "exit_layers": recording.exit_layers, "layers": recording.layers,
        "omegas": recording.omegas, "settings": recording.settings,
        "path_starts": recording.path_starts, "meta": dict(recording.meta),
    }  # fmt: skip
    write_file(path, EXITS, pa.table(columns), header)


def read_exits(path: PathLike) -> ExitRecording:
    """Return the early-exit recording at `path`; FileError if it is missing or damaged."""
    with _read(path, EXITS) as (header, table):
        layers: Any = header.get("layers")
        check(path, "layers", layers, is_whole(layers, 1, MOST_LAYERS), f"1 to {MOST_LAYERS}")
        for name in ("exit_layers", "omegas", "settings"):
            check(path, name, header.get(name), isinstance(header.get(name), list), "a list")
        exits, omegas = tuple(header["exit_layers"]), tuple(header["omegas"])
        sound = are_wholes(list(exits), 1, MOST_LAYERS)
        check(path, "exit_layers", exits, sound, f"layers from 1 to {MOST_LAYERS}")
        check(path, "omegas", omegas, all(is_number(w) and w >= 0 for w in omegas), "numbers >= 0")
        for setting in header["settings"]:
            check(path, "settings", setting, _sound(setting), "tau, omega, depth, layers, gamma")
        settings = tuple(
            ExitSetting(tau, omega, depth, None if layers is None else tuple(layers), gamma_max)
            for tau, omega, depth, layers, gamma_max in header["settings"]
        )
        starts = starts_of(path, header, "path_starts", table.num_rows)
        nodes = {name: _column(path, table, name, dtype) for name, dtype in NODE_COLUMNS.items()}
        _check_nodes(path, nodes, starts)
        shape = (table.num_rows, len(exits))
        return ExitRecording(
            nodes,
            _matrix(path, table, "argmax", shape, "int32"),
            _matrix(path, table, "log_confidence", (*shape, len(omegas)), "float32"),
            {name: _matrix(path, table, name, shape, "float32") for name in EXIT_SIGNALS},
            exits, layers, omegas, settings, starts, header["meta"],
            **_drawn(path, table, shape),
        )  # fmt: skip


def write_starts(recording: StartRecording, path: PathLike) -> None:
    """Write a recording of drafts by start: one row per start, a list per offset."""
    columns = {"token": _lists(recording.token), "rank": _lists(recording.rank)}
    columns |= {name: _lists(recording.signals[name]) for name in START_SIGNALS}
    columns |= _drawn_lists(recording)
    header = {
        "offsets": recording.offsets, "request_starts": recording.request_starts,
        "meta": dict(recording.meta),
    }  # fmt: skip
    write_file(path, STARTS, pa.table(columns), header)


def read_starts(path: PathLike) -> StartRecording:
    """Return the recording of drafts by start at `path`; FileError if it is missing or damaged."""
    with _read(path, STARTS) as (header, table):
        offsets = header.get("offsets")
        check(path, "offsets", offsets, is_whole(offsets, 1, MOST_DRAFTED), f"1 to {MOST_DRAFTED}")
        shape = (table.num_rows, header["offsets"])
        return StartRecording(
            _matrix(path, table, "token", shape, "int32"),
            {name: _matrix(path, table, name, shape, "float32") for name in START_SIGNALS},
            _matrix(path, table, "rank", shape, "int32"),
            starts_of(path, header, "request_starts", table.num_rows), header["meta"],
            **_drawn(path, table, shape),
        )  # fmt: skip


def write_trees(recording: TreeRecording, path: PathLike) -> None:
    """Write a recording of draft trees: one row per start, a list per layer.

    ``rank`` lists, for the true token of every layer in turn, its rank in the trees that reach so
    deep.
    """
    own, within = np.triu_indices(recording.layers)
    columns = {"rank": _lists(recording.rank[:, own, within])}
    columns |= {name: _lists(recording.signals[name]) for name in TREE_SIGNALS}
    header = {
        "layers": recording.layers, "request_starts": recording.request_starts,
        "meta": dict(recording.meta),
    }  # fmt: skip
    write_file(path, TREES, pa.table(columns), header)


def read_trees(path: PathLike) -> TreeRecording:
    """Return the recording of draft trees at `path`; FileError if it is missing or damaged."""
    with _read(path, TREES) as (header, table):
        rows, meta = table.num_rows, header["meta"]
        layers: Any = header.get("layers")
        check(path, "layers", layers, is_whole(layers, 1, MOST_LAYERS), f"1 to {MOST_LAYERS}")
        check(path, "meta.topk", meta.get("topk"), is_whole(meta.get("topk"), 1), "1 or more")
        own, within = np.triu_indices(layers)
        rank = np.full((rows, layers, layers), -1, np.int32)
        rank[:, own, within] = _matrix(path, table, "rank", (rows, len(own)), "int32")
        signals = {n: _matrix(path, table, n, (rows, layers), "float32") for n in TREE_SIGNALS}
        starts = starts_of(path, header, "request_starts", rows)
        return TreeRecording(rank, signals, starts, meta)


def exits_file(sampled: bool) -> str:
    """Name of the early-exit recording along greedy or sampled outputs in a run folder."""
    return "exits-sampled.parquet" if sampled else "exits.parquet"


def write_recordings(recordings: Recordings, folder: Path) -> None:
    """Write what was recorded: ``exits*``, ``[sampled-]starts-<source>`` and ``trees-<source>``."""
    if recordings.exits is not None:
        sampled = not recordings.exits.sampling.greedy
        write_exits(recordings.exits, folder / exits_file(sampled))
    if recordings.adapter is not None:
        write_exits(recordings.adapter, folder / ADAPTER_FILE)
    for name, recording in recordings.starts.items():
        named = STARTS_FILE if recording.sampling.greedy else SAMPLED_STARTS_FILE
        write_starts(recording, folder / named.format(name))
    for name, trees in recordings.trees.items():
        write_trees(trees, folder / TREES_FILE.format(name))


def read_recordings(folder: Path, *, sampled: bool = False) -> Recordings:
    """Read the files in `folder` that `write_recordings` wrote, as far as they exist.

    ``sampled``: what follows sampled outputs instead: early exits, and drafters on features.
    """
    exits, adapter = folder / exits_file(sampled), folder / ADAPTER_FILE
    starts = _named(folder, SAMPLED_STARTS_FILE if sampled else STARTS_FILE)
    trees = {} if sampled else _named(folder, TREES_FILE)
    return Recordings(
        read_exits(exits) if exits.exists() else None,
        {name: read_starts(path) for name, path in starts.items()},
        read_exits(adapter) if adapter.exists() and not sampled else None,
        {name: read_trees(path) for name, path in trees.items()},
    )


def _named(folder: Path, pattern: str) -> dict[str, Path]:
    """Files of a kind in `folder`, by the name of their source."""
    before, after = pattern.split("{}")
    paths = sorted(folder.glob(pattern.format("*")))
    return {p.name.removeprefix(before).removesuffix(after): p for p in paths}


@contextmanager
def _read(path: PathLike, kind: str) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Header and table of a file; FileError also if no recording can be made of them."""
    header, table = read_file(path, kind)
    meta_of(path, header)
    try:
        yield header, table
    except FileError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, DraftsimError) as error:
        raise file_error(path, f"header and columns do not fit together ({error})") from error


def _sound(setting: Any) -> bool:
    """Return True if a header's list is a valid `ExitSetting`."""
    if not isinstance(setting, list) or len(setting) != 5:
        return False
    tau, omega, depth, layers, gamma_max = setting
    return (
        all(is_number(value) and value >= 0 for value in (tau, omega, depth))
        and 0 < depth <= 1
        and tau <= 1
        and (layers is None or (are_wholes(layers, 1, MOST_LAYERS) and layers != []))
        and is_whole(gamma_max, 1, MOST_DRAFTED)
    )


def _check_nodes(
    path: PathLike, nodes: Mapping[str, npt.NDArray[Any]], starts: Sequence[int]
) -> None:
    """Raise FileError if a node of an early-exit recording cannot be, naming its row."""
    rows = np.arange(len(nodes["token"]))
    on_path = rows < starts[-1]
    parent, request = nodes["parent"].astype(np.int64), nodes["request"]
    # Path nodes of the requests come first, in turn; a branch follows its parent.
    of = np.searchsorted(np.asarray(starts), rows, side="right") - 1
    check_rows(
        path,
        {
            "0 <= request": request >= 0,
            "the order of requests on the path": ~on_path | (request == of),
            "-1 <= parent < its own row": (parent >= -1) & (parent < np.maximum(rows, 1)),
            "parent = -1 on the path": (parent == -1) | ~on_path,
            "0 <= position": nodes["position"] >= 0,
            "0 <= token": nodes["token"] >= 0,
        },
    )


def _drawn_lists(recording: ExitRecording | StartRecording) -> dict[str, pa.Array]:
    """Return the columns that it has along sampled outputs."""
    drawn = {name: getattr(recording, name) for name in DRAWN}
    return {name: _lists(values) for name, values in drawn.items() if values is not None}


def _drawn(
    path: PathLike, table: pa.Table, shape: tuple[int, int]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays that `_drawn_lists` made."""
    return {n: _matrix(path, table, n, shape, "float32") for n in DRAWN if n in table.column_names}


def _lists(values: npt.NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def _column(path: PathLike, table: pa.Table, name: str, dtype: str) -> npt.NDArray[Any]:
    """Return a column of numbers of exactly this type, none of them missing."""
    if name not in table.column_names:
        raise file_error(path, f"lacks the column {name!r}")
    column, expected = table.column(name), pa.from_numpy_dtype(np.dtype(dtype))
    if column.type != expected or column.null_count:
        raise file_error(
            path, f"column {name!r} is of type {column.type}, expected {expected} without gaps"
        )
    return np.asarray(column.to_numpy(), dtype=dtype)


def _matrix(
    path: PathLike, table: pa.Table, name: str, shape: tuple[int, ...], dtype: str
) -> npt.NDArray[Any]:
    """A column of lists as an array of this shape, a row a list; all lists are equally long."""
    if name not in table.column_names:
        raise file_error(path, f"lacks the column {name!r}")
    lists, expected = table.column(name).combine_chunks(), pa.from_numpy_dtype(np.dtype(dtype))
    if not pa.types.is_list(lists.type) or lists.type.value_type != expected:
        raise file_error(
            path, f"column {name!r} is of type {lists.type}, expected lists of {expected}"
        )
    values, lengths = lists.flatten(), lists.value_lengths()
    width = math.prod(shape[1:])
    if lists.null_count or values.null_count or (lengths.to_numpy() != width).any():
        raise file_error(path, f"column {name!r} does not hold {width} values in every row")
    found = values.to_numpy()
    if not (np.isfinite(found).all() if found.dtype.kind == "f" else (found >= -1).all()):
        raise file_error(path, f"column {name!r} holds a value that is not finite, or below -1")
    return np.asarray(found, dtype=dtype).reshape(shape)
