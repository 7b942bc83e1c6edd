"""The container every recording is kept in: one checked Parquet file, written whole.

A file is a Parquet table plus a JSON header in the key-value metadata (key ``draftsim``)
naming the schema version and the kind of recording.  A second key holds the SHA-256 of
the file itself, taken with the digest blanked, so that damage is found before any of it
is interpreted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import FileError

SCHEMA = 1
"""Version of the file layout; raised whenever a reader of the old one would misread."""

KINDS = {
    "trace": "an acceptance trace",
    "latency": "a latency table",
    "rounds": "a round log",
    "exits": "a recording of early exits",
    "starts": "a recording of drafts by start",
}

HEADER_KEY, DIGEST_KEY = b"draftsim", b"draftsim.sha256"
_BLANK = b"0" * 64
# The two bytes between key and value are the footer's own field header and length.
_DIGEST = re.compile(re.escape(DIGEST_KEY) + rb".{2}([0-9a-f]{64})", re.DOTALL)
_MAGIC = b"PAR1"


def write_file(
    path: str | os.PathLike[str], kind: str, table: pa.Table, header: Mapping[str, Any]
) -> None:
    """Write `table` with its header to `path`, whole or not at all.

    Raises
    ------
    FileError
        If the file cannot be written there.
    """
    text = json.dumps({"schema": SCHEMA, "kind": kind, **header}, default=_plain)
    table = table.replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    # The Arrow schema is left out: it would hold the header a second time.
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEADER_KEY: text, DIGEST_KEY: _BLANK})
    blank: bytes = sink.getvalue().to_pybytes()
    found = _find_digest(blank)
    assert found is not None, "the Parquet writer left the digest out"
    digest = hashlib.sha256(blank).hexdigest().encode()
    write_atomically(path, blank[: found.start(1)] + digest + blank[found.end(1) :])


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Put `content` at `path` in one step, so that no half-written file is ever seen.

    Raises
    ------
    FileError
        If the file cannot be written there.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".part", dir=path.parent
        )
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error.strerror or error}): choose another place for it"
        ) from error
    finally:
        # Reached on Ctrl-C as well, which is no OSError.
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def read_file(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], pa.Table]:
    """The header and the table of a file of this kind.

    Raises
    ------
    FileError
        If the file is missing, truncated, damaged, not Parquet, not draftsim's, of
        another schema version or of another kind.
    """
    path = Path(path)
    content = _content(path)
    if (found := _find_digest(content)) is not None:
        blank = content[: found.start(1)] + _BLANK + content[found.end(1) :]
        if hashlib.sha256(blank).hexdigest().encode() != found.group(1):
            raise FileError(
                f"{path}: the content does not match its checksum, so the file was damaged or "
                "edited after it was written: copy it again, or record it again"
            )
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        metadata = file.metadata.metadata or {}
        header = _header(path, metadata.get(HEADER_KEY), kind)
        return header, file.read()
    except FileError:
        raise
    except Exception as error:  # pyarrow raises a dozen types on damaged input
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FileError(
            f"{path}: damaged Parquet file ({reason}): copy it again, or record it again"
        ) from error


def file_error(path: str | os.PathLike[str], problem: str, remedy: str = "") -> FileError:
    """A one-line `FileError` about the content of `path`."""
    return FileError(f"{path}: {problem}: {remedy or 'record it again, or copy it again'}")


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file: check the path") from error
    except IsADirectoryError as error:
        raise FileError(f"{path}: is a directory: name a .parquet file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read ({reason}): check its permissions") from error
    if not content:
        raise FileError(f"{path}: is empty: copy it again, or record it again")
    if not content.startswith(_MAGIC):
        raise FileError(
            f"{path}: not a Parquet file: draftsim reads what `draftsim profile` or "
            "`draftsim import` wrote"
        )
    if len(content) < 12 or not content.endswith(_MAGIC):
        raise FileError(
            f"{path}: truncated (the Parquet footer is missing): copy it again, or record it again"
        )
    return content


def _find_digest(content: bytes) -> re.Match[bytes] | None:
    footer = int.from_bytes(content[-8:-4], "little")
    matches = list(_DIGEST.finditer(content, max(0, len(content) - 8 - footer)))
    return matches[-1] if matches else None


def _header(path: Path, text: bytes | None, kind: str) -> dict[str, Any]:
    if text is None:
        raise FileError(
            f"{path}: has no draftsim header in its metadata: it was not written by draftsim"
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise file_error(path, "the draftsim header is not JSON") from error
    if not isinstance(header, dict) or type(header.get("schema")) is not int:
        raise file_error(path, "the draftsim header names no schema version")
    version = header["schema"]
    if version > SCHEMA:
        raise FileError(
            f"{path}: schema version {version}, this draftsim reads {SCHEMA}: upgrade draftsim"
        )
    if version < SCHEMA:
        raise FileError(
            f"{path}: schema version {version}, this draftsim reads {SCHEMA}: record it again, "
            "or read it with an older draftsim"
        )
    if (found := header.get("kind")) != kind:
        what = KINDS.get(str(found), f"a file of kind {found!r}")
        raise FileError(f"{path}: is {what}, not {KINDS[kind]}: name the other file")
    return header


def _plain(value: object) -> object:
    """JSON form of what provenance may hold: numpy values, paths, versions."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
