"""Files of what was recorded for sources other than a draft model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.errors import DraftsimError
from traces.sources.base import Recordings
from traces.sources.columns import DRAWN
from traces.sources.exits.recording import NODE_COLUMNS, ExitRecording, ExitSetting
from traces.sources.exits.recording import SIGNALS as EXIT_SIGNALS
from traces.sources.starts.recording import START_SIGNALS, StartRecording
from traces.sources.starts.trees import TREE_SIGNALS, TreeRecording
from traces.store.files import PathLike
from traces.store.parquet import file_error, read_file, write_file

EXITS, STARTS, TREES = "exits", "starts", "trees"
ADAPTER_FILE = "exits-kangaroo.parquet"
STARTS_FILE = "starts-{}.parquet"
SAMPLED_STARTS_FILE = "sampled-starts-{}.parquet"
TREES_FILE = "trees-{}.parquet"


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
    """The early-exit recording at `path`; FileError if it is missing or damaged."""
    with _read(path, EXITS) as (header, table):
        exits, omegas = tuple(header["exit_layers"]), tuple(header["omegas"])
        settings = tuple(
            ExitSetting(tau, omega, depth, None if layers is None else tuple(layers), gamma_max)
            for tau, omega, depth, layers, gamma_max in header["settings"]
        )
        nodes = {name: _column(table, name, dtype) for name, dtype in NODE_COLUMNS.items()}
        shape = (table.num_rows, len(exits))
        return ExitRecording(
            nodes,
            _matrix(table, "argmax", shape, "int32"),
            _matrix(table, "log_confidence", (*shape, len(omegas)), "float32"),
            {name: _matrix(table, name, shape, "float32") for name in EXIT_SIGNALS},
            exits, int(header["layers"]), omegas, settings, tuple(header["path_starts"]),
            header["meta"],
            **_drawn(table, shape),
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
    """The recording of drafts by start at `path`; FileError if it is missing or damaged."""
    with _read(path, STARTS) as (header, table):
        shape = (table.num_rows, int(header["offsets"]))
        return StartRecording(
            _matrix(table, "token", shape, "int32"),
            {name: _matrix(table, name, shape, "float32") for name in START_SIGNALS},
            _matrix(table, "rank", shape, "int32"),
            tuple(header["request_starts"]), header["meta"],
            **_drawn(table, shape),
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
    """The recording of draft trees at `path`; FileError if it is missing or damaged."""
    with _read(path, TREES) as (header, table):
        rows, layers = table.num_rows, int(header["layers"])
        own, within = np.triu_indices(layers)
        rank = np.full((rows, layers, layers), -1, np.int32)
        rank[:, own, within] = _matrix(table, "rank", (rows, len(own)), "int32")
        signals = {n: _matrix(table, n, (rows, layers), "float32") for n in TREE_SIGNALS}
        meta = {**header["meta"], "topk": int(header["meta"]["topk"])}
        return TreeRecording(rank, signals, tuple(header["request_starts"]), meta)


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
    """What `write_recordings` left in `folder`, as far as it is there.

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
    try:
        yield header, table
    except (KeyError, TypeError, ValueError, DraftsimError) as error:
        raise file_error(path, f"header and columns do not fit together ({error})") from error


def _drawn_lists(recording: ExitRecording | StartRecording) -> dict[str, pa.Array]:
    """The columns that it has along sampled outputs."""
    drawn = {name: getattr(recording, name) for name in DRAWN}
    return {name: _lists(values) for name, values in drawn.items() if values is not None}


def _drawn(table: pa.Table, shape: tuple[int, int]) -> dict[str, npt.NDArray[np.float32]]:
    """What `_drawn_lists` made."""
    return {n: _matrix(table, n, shape, "float32") for n in DRAWN if n in table.column_names}


def _lists(values: npt.NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def _column(table: pa.Table, name: str, dtype: str) -> npt.NDArray[Any]:
    return np.asarray(table.column(name).to_numpy(), dtype=dtype)


def _matrix(table: pa.Table, name: str, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    column = table.column(name).combine_chunks()
    return np.asarray(column.flatten().to_numpy(), dtype=dtype).reshape(shape)
