"""Files that are written whole or not at all, and by one writer at a time."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from policies.json_text import parse_json
from traces.errors import DraftsimError, FileError

try:
    import fcntl
except ImportError:  # Windows: a killed process leaves its files, and no writer is kept out
    fcntl = None  # type: ignore[assignment]

PART = ".part"
"""End of the name of a file that is being written."""


class AtomicFile:
    """A binary file that replaces the one at `path` when it is complete.

    Use it as a context manager.  If the block ends with an error, nothing has changed.

    An existing file keeps its mode and owner; the umask decides the mode of a new one.  A symbolic
    link stays, and the file that it names is replaced.  A device, FIFO or socket is no file that
    could be replaced: it is opened and written to.

    Raises FileError if the file cannot be written there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._target = self.path
        self._part: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._opened()
        except OSError as error:
            self.discard()
            raise refused(self.path, error) from error
        except BaseException:
            self.discard()
            raise
        return self

    def write(self, content: bytes) -> None:
        """Append `content`."""
        if self._file is None:
            raise FileError(f"{self.path} is not open: use it in a with statement")
        try:
            self._file.write(content)
        except OSError as error:
            self.discard()
            raise refused(self.path, error) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._file is not None:
                self._file.flush()
                if self._part is not None:
                    os.fsync(self._file.fileno())
                    os.replace(self._part, self._target)
                    self._part = None
        except OSError as failure:
            raise refused(self.path, failure) from failure
        finally:
            self.discard()

    def _opened(self) -> BinaryIO:
        try:
            held: os.stat_result | None = os.stat(self.path)
        except FileNotFoundError:
            held = None
        if held is not None and not stat.S_ISREG(held.st_mode):
            return self.path.open("wb")  # a folder is refused here
        self._target = Path(os.path.realpath(self.path))
        _remove_left_over(self._target)
        # Nobody may read a private file while it is written either.
        file = self._made(0o666 if held is None else 0o600)
        assert self._part is not None
        if held is not None:
            own = os.fstat(file.fileno())
            if (own.st_uid, own.st_gid) != (held.st_uid, held.st_gid):
                with suppress(OSError):
                    os.chown(self._part, held.st_uid, held.st_gid)
            os.chmod(self._part, stat.S_IMODE(held.st_mode) & 0o777)
        return file

    def _made(self, mode: int) -> BinaryIO:
        """Create a file next to the target, locked as long as it is open."""
        while True:
            name = f"{_prefix(self._target)}{secrets.token_hex(4)}{PART}"
            self._part = self._target.with_name(name)
            descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            file = os.fdopen(descriptor, "wb")
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return file
            file.close()  # another process took it for left over before it was locked

    def discard(self) -> None:
        """Drop what was written: the file at `path` stays as it is."""
        file, part = self._file, self._part
        self._file = self._part = None
        with suppress(OSError):
            if file is not None:
                file.close()
        if part is not None:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def is_device(path: str | os.PathLike[str]) -> bool:
    """Return True for a device, FIFO or socket, which is written to and cannot be replaced."""
    path = Path(path)
    return path.exists() and not (path.is_file() or path.is_dir())


def make_folder(folder: Path, remedy: str) -> None:
    """Make a folder if it is missing; raise DraftsimError, with the `remedy`, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise DraftsimError(f"{folder}: cannot be written to ({reason}): {remedy}") from None


def refused(path: str | os.PathLike[str], error: OSError) -> FileError:
    """Return the error that says that the file at `path` cannot be written, why, and what to do."""
    room = "free some space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    reason = error.strerror or error
    return FileError(f"{path}: cannot be written ({reason}): {room}choose another place for it")


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Put `content` at `path` in one step; FileError if it cannot be written (see `AtomicFile`)."""
    with AtomicFile(path) as file:
        file.write(content)


def _prefix(target: Path) -> str:
    """Return the beginning of the names of the files that are to replace `target`."""
    return f".{target.name[:50]}."


def _remove_left_over(target: Path) -> None:
    """Remove files that killed processes were writing to replace `target`: nobody locks them."""
    if fcntl is None:
        return
    prefix = _prefix(target)
    try:
        with os.scandir(target.parent) as entries:
            found = [e.path for e in entries if e.name.startswith(prefix) and e.name.endswith(PART)]
    except OSError:  # a folder that may not be listed can perhaps be written to
        return
    for path in found:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


@contextmanager
def only_writer(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the file at `path` against other processes that write it this way; no device is held.

    Raises DraftsimError if another process writes it, with its name, or nothing can be written.
    """
    path = Path(path)
    if is_device(path):
        yield
        return
    target = Path(os.path.realpath(path))
    with locked(target.with_name(f".{target.name}.lock"), path, "name another file"):
        yield


@contextmanager
def locked(lock: Path, what: Path, remedy: str) -> Iterator[None]:
    """Make the file `lock` if it is missing, and hold it while `what` is written.

    The operating system releases the lock when its holder ends, so a file left over blocks no
    writer.  Raises DraftsimError if another process holds it (naming it), or, with the `remedy`, it
    cannot be made.
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
