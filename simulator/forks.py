"""Independent parts of one answer at the same time, in processes forked off this one.

The workers of `simulator.executors.Local` last for a study, and take a second to start.  A forked
process has at once all that this one has loaded, so that a fraction of a second is worth sharing.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from contextvars import ContextVar
from multiprocessing import parent_process
from typing import Any, NoReturn, TypeVar

from simulator.executors import cores

Result = TypeVar("Result")
Parts = Sequence[Callable[[], Any]]

MOST = 8
"""Processes of an answer: each takes some milliseconds to fork."""
FEWEST_TOKENS = 100_000
"""Seconds of all parts together below which a fork would take as long as the answer."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])}
"""Signals that stop an answer."""
NUMBER = 4
"""Bytes of a part's number among those to be taken."""

_in_part: ContextVar[bool] = ContextVar("in_part", default=False)


def results_of(
    parts: Sequence[Callable[[], Result]],
    tokens: int,
    shared: Sequence[object] = (),
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Result]:
    """Return the results of `parts`, in their order.

    Parts are taken one by one, so put the longest first.  This process computes them together with
    one forked process per further core.  It computes alone if there is little to do, if it is not
    on Linux, has threads, or is itself a worker or within a part.
    where it is not on Linux, has threads, or is itself a worker or within a part.

    A part may change nothing that outlives it: what it caches may be lost with its process.  One
    that raises an error or says anything, as a warning or on a standard stream, and one whose
    process was killed, is done again by this process when those before it are done: what is
    raised and said is what it would be without other processes.

    Parameters
    ----------
    tokens:
        Recorded tokens that all parts together go through.
    shared:
        Objects that stay themselves in results, such as a trace that all parts read: no copies
        of them come back.
    progress:
        Called between the parts that this process computes, with the number of parts that are
        done or begun by any process, and of all parts.
    """
    helpers = min(cores(), len(parts), MOST) - 1
    if helpers < 1 or tokens < FEWEST_TOKENS or not _may_fork():
        alone: list[Result] = []
        for part in parts:
            progress(len(alone), len(parts))
            alone.append(part())
        return alone
    queue = os.memfd_create("parts")
    os.write(queue, b"".join(i.to_bytes(NUMBER, "big") for i in range(len(parts))))
    os.lseek(queue, 0, os.SEEK_SET)
    started: list[_Helper] = []
    within = _in_part.set(True)
    try:
        for _ in range(helpers):
            try:
                started.append(_Helper(parts, queue, shared))
            except OSError:
                break  # no room for another process
        found: dict[int, Any] = {}
        for place, result in _taken(parts, queue):
            found[place] = result
            # The place in the file is one for all processes.
            progress(os.lseek(queue, 0, os.SEEK_CUR) // NUMBER, len(parts))
        for helper in started:
            found |= helper.results(shared)
        progress(len(parts), len(parts))  # others may have taken them all
    finally:
        _in_part.reset(within)
        for helper in started:
            helper.end()
        os.close(queue)
    return [found[i] if i in found else part() for i, part in enumerate(parts)]


def _may_fork() -> bool:
    """Return True if a fork is possible, safe, and useful to a process whose cores are its own."""
    if sys.platform != "linux" or _in_part.get():
        return False
    return threading.active_count() == 1 and parent_process() is None


class _Helper:
    """A process forked off this one, which takes parts until none is left."""

    def __init__(self, parts: Parts, queue: int, shared: Sequence[object]) -> None:
        self.file = io.FileIO(os.memfd_create("results"), "r+")
        owner = os.getpid()
        # They wait until it is decided what they do there.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process = os.fork()
            if self.process == 0:
                self._help(owner, parts, queue, shared)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _help(self, owner: int, parts: Parts, queue: int, shared: Sequence[object]) -> NoReturn:
        try:
            # It ends without a word: the process that it belongs to has the last one.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            for found in _taken(parts, queue):
                if os.getppid() != owner:
                    break  # nobody waits for the rest
                packed = io.BytesIO()
                try:
                    _Packer(packed, shared).dump(found)
                except Exception:
                    continue  # no result to hand over: the part is done again
                self.file.write(packed.getbuffer())
        finally:
            os._exit(0)  # nothing of what the other process would do at its end

    def results(self, shared: Sequence[object]) -> dict[int, Any]:
        """Wait for the end, and return the complete results by the places of their parts."""
        os.waitpid(self.process, 0)
        self.process = 0
        self.file.seek(0)
        packed, found = io.BytesIO(self.file.readall()), dict[int, Any]()
        while True:
            try:
                place, result = _Unpacker(packed, shared).load()
            except (EOFError, pickle.UnpicklingError):
                return found
            found[place] = result

    def end(self) -> None:
        """End it, wherever it is."""
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        self.file.close()


def _taken(parts: Parts, queue: int) -> Iterator[tuple[int, Any]]:
    """(place, result) of parts that nobody else took, those left out that are to be done again."""
    # The place in the file is one for all processes: who reads a number has it alone.
    while number := os.read(queue, NUMBER):
        place, said = int.from_bytes(number, "big"), io.StringIO()
        with warnings.catch_warnings(record=True) as warned:
            try:
                with redirect_stdout(said), redirect_stderr(said):
                    result = parts[place]()
            except Exception:
                continue
        if not warned and not said.getvalue():
            yield place, result


class _Packer(pickle.Pickler):
    """A pickler that names what the other process has."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.places = {id(one): i for i, one in enumerate(shared)}

    def persistent_id(self, one: object) -> int | None:
        return self.places.get(id(one))


class _Unpacker(pickle.Unpickler):
    """The reader of what a `_Packer` wrote."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, place: Any) -> object:
        return self.shared[place]
