"""Which run a recording belongs to, and that the files of one folder belong together.

A run has a random id, kept in the provenance of everything it records (``run_id``).  Files
from before that have none: they are accepted where what both hold of the pair agrees, the
fingerprints of the weights and the precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traces.errors import FileError
from traces.store.parquet import read_meta
from traces.store.text import read_object

RUN_ID = "run_id"


def identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a recording's provenance says of its run: as far as known, by name."""
    found = {RUN_ID: meta.get(RUN_ID), "dtype": meta.get("dtype")}
    for role in ("target", "draft"):
        about = meta.get(role)
        found[f"{role}'s weights"] = about.get("fingerprint") if isinstance(about, dict) else None
    return {name: value for name, value in found.items() if value is not None}


def check_together(metas: Mapping[str, Mapping[str, Any]]) -> None:
    """FileError unless the files named belong to one run, as far as they say."""
    held: dict[str, tuple[str, Any]] = {}
    for file, meta in metas.items():
        for name, value in identity(meta).items():
            other, before = held.setdefault(name, (file, value))
            if before != value:
                what = "runs" if name == RUN_ID else f"runs: the {name} differ"
                raise FileError(
                    f"{other} and {file} are of two {what}: measure again with `draftsim profile "
                    "--latency-only` or record with --force, or name the one meant by its file"
                )


def check_folder(folder: Path, rounds: Sequence[Path] = ()) -> None:
    """FileError unless trace, latencies and `rounds` of a run folder belong together.

    Only provenance is read; a file that is damaged is left to whoever reads it.
    """
    metas: dict[str, Mapping[str, Any]] = {}
    for name in ("trace", "latency"):
        if (path := folder / f"{name}.parquet").is_file():
            metas[str(path)] = read_meta(path)
    for path in rounds:
        try:
            metas[str(path)] = dict(read_object(path.with_suffix(".json"))["meta"])
        except (FileError, ValueError, TypeError, KeyError):
            continue
    check_together(metas)
