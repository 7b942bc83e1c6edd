"""One writer at a time, of a file or of a folder."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from policies.json_text import parse_json
from traces.errors import DraftsimError

try:
    import fcntl
except ImportError:  # Windows: nobody is kept from writing
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the file at `path` against other processes that write it this way.

    Only a regular file is held; a device, for example, is not.

    Raises
    ------
    DraftsimError
        If another process writes it (naming that process), or nothing can be written there.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield
        return
    target = Path(os.path.realpath(path))
    with locked(target.with_name(f".{target.name}.lock"), path, "name another file"):
        yield


@contextmanager
def locked(lock: Path, what: Path, remedy: str) -> Iterator[None]:
    """Hold `lock`, a file that is made for it, while `what` is written.

    The operating system releases the lock when its holder ends, in whatever way, so a file that was
    left over blocks nobody.

    Raises
    ------
    DraftsimError
        If another process holds it (naming that process), or it cannot be made (with the `remedy`).
    """
    try:
        descriptor = _acquired(lock)
    except BlockingIOError:
        raise DraftsimError(
            f"{what} is being written by {_holder(lock)}: wait for it, or end it"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise DraftsimError(f"{what}: cannot be written to ({reason}): {remedy}") from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(about).encode())
        yield
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def _acquired(lock: Path) -> int:
    """Return the descriptor of the locked file; BlockingIOError if another process holds it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it before it was locked here


def _holder(lock: Path) -> str:
    try:
        about = parse_json(lock.read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
