"""Recordings of draft sources: arrays along one trace, their checks, and their files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.acceptance.sampling import Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError, FileError
from traces.store.header import PathLike, file_error, meta_of, starts_of
from traces.store.parquet import columns_of, lists_of, read_file, write_file

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of one row of every array."""

MOST_LAYERS = 4096
"""Most layers of a model, and of a tree of drafts."""
LOGITS = ("top1", "top2", "logsumexp", "entropy")
"""Signals recorded of a draft: of its drafter's raw logits, and the entropy in nats, at T = 1."""
DRAWN = ("log_prob", "raw_log_prob")
"""Further arrays along sampled outputs: log-probability that the token was drawn with, and its own
at T = 1 without top-p.
"""


@dataclass(frozen=True, eq=False)
class SourceRecording:
    """A source's drafts along the outputs of one trace.

    Parameters
    ----------
    arrays:
        By name, as `layout` says; the first axis of each are the rows. Those of `DRAWN` exist
        along sampled outputs alone.
    request_starts:
        First row of each request, and the number of these rows at the end.
    meta:
        Provenance, and what the replay needs to know.

    Raises
    ------
    DraftsimError
        If the arrays disagree.
    """

    kind: ClassVar[str]
    """Kind of its files."""
    said: ClassVar[str]
    """Its name in messages."""
    starts_field: ClassVar[str] = "request_starts"
    """Header field of `request_starts`."""

    arrays: Mapping[str, npt.NDArray[Any]]
    request_starts: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (_, row) in self.layout(self.header).items():
            expected, values = (self.rows, *row), self.arrays.get(name)
            if values is None and name in DRAWN:
                continue
            if values is None or values.shape != expected:
                shape = None if values is None else values.shape
                raise DraftsimError(
                    f"{self.said}: {name} has shape {shape}, expected {expected}: record it again"
                )

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.arrays[name]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.request_starts[-1]

    @property
    def header(self) -> dict[str, Any]:
        """Fields of its file's header in addition to `request_starts` and `meta`."""
        raise NotImplementedError

    @classmethod
    def layout(cls, header: Mapping[str, Any]) -> Layout:
        """Return the arrays of a recording with this header."""
        raise NotImplementedError

    @cached_property
    def sampling(self) -> Sampling:
        """How the outputs and drafts that it follows were drawn."""
        return Sampling.of(self.meta.get("sampling", self.meta))

    def drafted(self, where: Any) -> dict[str, npt.NDArray[Any]]:
        """Return what its drafter said of the drafts at some places, as columns of a trace."""
        # Drawn greedily, a token is the likeliest.
        likeliest = self["top1"] - self["logsumexp"]
        found = {name: self.arrays.get(name, likeliest)[where] for name in (*DRAWN, *LOGITS)}
        return {f"draft_{name.replace('log_', 'log')}": values for name, values in found.items()}

    def check_follows(self, key: str, trace: Trace, first: int) -> None:
        """Raise DraftsimError unless it, named `key`, can be replayed along `trace`."""
        if first < 1:
            raise DraftsimError(f"{key} is recorded after the prefill: replay with first=1")
        if np.diff(self.request_starts).tolist() != [r.tokens for r in trace.requests]:
            raise DraftsimError(
                f"the recording of {key!r} drafts is of other requests than the trace: record both "
                "in one run"
            )
        if self.sampling != trace.sampling:
            raise DraftsimError(
                f"the recording of {key!r} drafts is of outputs decoded {self.sampling.label}, "
                f"and the trace's were {trace.sampling.label}: record both in one run"
            )

    def write(self, path: PathLike) -> None:
        """Write it into a file: a row per row, a list where a row has more than one value."""
        columns = {n: _column(self[n]) for n in self.layout(self.header) if n in self.arrays}
        header = {
            **self.header, self.starts_field: self.request_starts, "meta": dict(self.meta),
        }  # fmt: skip
        write_file(path, self.kind, pa.table(columns), header)

    @classmethod
    def read(cls, path: PathLike) -> Self:
        """Return the recording at `path`; FileError if it is missing or damaged."""
        header, table = read_file(path, cls.kind)
        meta_of(path, header)
        try:
            fields = cls.checked(path, header)
            starts = starts_of(path, header, cls.starts_field, table.num_rows)
            layout = cls.layout(header).items()
            arrays = {
                name: _array(path, table, name, dtype, row) for name, (dtype, row) in layout
                if name not in DRAWN or name in table.column_names
            }  # fmt: skip
            cls.check_rows(path, arrays, starts)
            return cls(arrays, starts, header["meta"], **fields)
        except FileError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, DraftsimError) as error:
            raise file_error(path, f"header and columns do not fit together ({error})") from error

    @classmethod
    def checked(cls, path: PathLike, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return further arguments that a file's header has; FileError if one is impossible."""
        raise NotImplementedError

    @classmethod
    def check_rows(
        cls, path: PathLike, arrays: Mapping[str, npt.NDArray[Any]], starts: Sequence[int]
    ) -> None:
        """Raise FileError if a row of a file is impossible."""


Recordings = Mapping[str, SourceRecording]
"""Recordings along one trace, by their name (`Source.key`)."""


def _column(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), math.prod(values.shape[1:]))


def _array(
    path: PathLike, table: pa.Table, name: str, dtype: str, row: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Return a column of numbers of exactly this type, or of lists, as an array of such rows."""
    if not row and name in table.column_names and table.column(name).null_count:
        raise file_error(path, f"column {name!r} is of type {dtype}, expected one without gaps")
    if not row:
        return columns_of(path, table, {name: dtype})[name]
    (found, lengths), width = lists_of(path, table, name, dtype), math.prod(row)
    if (lengths != width).any():
        raise file_error(path, f"column {name!r} does not hold {width} values in every row")
    if not (np.isfinite(found).all() if found.dtype.kind == "f" else (found >= -1).all()):
        raise file_error(path, f"column {name!r} holds a value that is not finite, or below -1")
    return np.asarray(found, dtype=dtype).reshape(table.num_rows, *row)
