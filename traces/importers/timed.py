"""Shared helpers of the importers of operator timings: CSV columns and folder names."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traces.errors import DraftsimError, FileError
from traces.importers.base import Options
from traces.operators.devices import Device, find_device
from traces.operators.shapes import Architecture, find_architecture
from traces.store.text import read_text

Floats = npt.NDArray[np.float64]


def read_frame(file: Path) -> pd.DataFrame:
    """Return the rows of a CSV file, gzipped or not; FileError for other files."""
    try:
        frame = pd.read_csv(io.StringIO(read_text(file)), skipinitialspace=True)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise FileError(f"{file}: cannot be read as CSV: {error}") from None
    if frame.empty:
        raise FileError(f"{file}: holds no timings, only a header")
    return frame


MOST = 1e10
"""Largest number of a timing: ten seconds in nanoseconds, ten gigabytes sent at once."""


def numbers(file: Path, frame: pd.DataFrame, column: str) -> Floats:
    """A column's numbers; FileError naming the file where it is missing or holds anything else."""
    if column not in frame:
        raise FileError(f"{file}: lacks the column {column}")
    values: Floats = pd.to_numeric(frame[column], errors="coerce").to_numpy(float)
    bad = ~(values >= 0) | (values > MOST)
    if bad.any():
        row = int(bad.argmax())
        raise FileError(
            f"{file}: row {row + 1}: {column} is {str(frame[column].iloc[row])[:40]}, expected a "
            f"number from 0 to {MOST:g}"
        )
    return values


def place_of(
    file: Path, options: Options, needs_model: bool = True, folders: Sequence[str] | None = None
) -> tuple[Device, Any, int | None]:
    """(GPU, model, tensor parallel) of a file, by its folders where they are not given.

    ``folders`` are their names, innermost first; by default those of the path.

    Raises
    ------
    FileError
        If neither the folders nor the options say them.
    """
    if folders is None:
        folders = [part.name for part in file.resolve().parents if part.name]
    device = _named(find_device, options.device, folders)
    if device is None:
        raise FileError(f"{file}: no folder above it is a GPU's: name the GPU with --device")
    shape: Architecture | None = None
    if needs_model:
        shape = _named(find_architecture, options.model, folders)
        if shape is None:
            raise FileError(f"{file}: no folder above it is a model's: name it with --model")
    shared = next((int(f[2:]) for f in folders if re.fullmatch(r"tp\d+", f)), None)
    return device, shape, shared


def _named(find: Any, given: str | None, folders: Sequence[str]) -> Any:
    if given is not None:
        return find(given)
    for name in folders:
        try:
            return find(name)
        except DraftsimError:
            continue
    return None
