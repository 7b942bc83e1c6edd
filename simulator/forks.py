"""Independent parts of one answer, computed in forked processes that share what is loaded."""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from traceback import format_exc
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from simulator.executors import cores
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Result = TypeVar("Result")

MOST = 8
"""Processes of an answer: each takes some milliseconds to fork."""
FEWEST_TOKENS = 100_000
"""Of all parts together, below which an answer is there almost before a process is forked."""
PLACE = 2
"""Bytes of a part's place; a pipe holds tens of thousands."""


class Done(NamedTuple):
    """What came of a part: its result or the error it ended with, and what it said meanwhile."""

    result: Any
    error: Exception | None
    said: list[Any]
    """Pieces of text for standard error, and the arguments of warnings."""


def results_of(
    parts: Sequence[Callable[[], Result]], tokens: int, shared: Sequence[object] = ()
) -> list[Result]:
    """The result of every part, in their order; which process computed it makes no difference.

    The parts run in this process and in forks of it, one per core, each of which takes the next
    part when it is done with one: the longest ones should come first.  Unlike the processes of
    `simulator.executors.Local`, forks start at once and have all that is loaded, and what they
    load and cache is lost with them.  All parts run here, one after another, where there is one
    core or little to do, and where a fork is not safe: off Linux, beside other threads, and
    in a worker process.

    What a part says on standard error, and warnings, come out here, part by part.

    Parameters
    ----------
    tokens:
        Recorded tokens that all parts together go through.
    shared:
        Objects that stay themselves in results, such as a trace that all parts read: no copies
        of them come back.

    Raises
    ------
    DraftsimError
        If a process was killed.
    Exception
        What the first of the parts that failed raised, after what was said before.
    """
    count = min(len(parts), cores(), MOST) if tokens >= FEWEST_TOKENS and _can_fork() else 1
    if count < 2:
        return [part() for part in parts]
    places, filled = os.pipe()
    os.write(filled, b"".join(i.to_bytes(PLACE, "little") for i in range(len(parts))))
    os.close(filled)

    def work() -> dict[int, Done]:
        done = {}
        while taken := os.read(places, PLACE):
            place = int.from_bytes(taken, "little")
            done[place] = _done(parts[place])
            if done[place].error is not None:
                # All parts before it were taken, and those after it would not have been begun.
                while os.read(places, 1 << 16):
                    pass
        return done

    def forked(sender: Connection) -> None:
        # Ctrl-C ends it without a word.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        gc.freeze()  # a collection would copy all that is shared
        sender.send_bytes(_packed(work(), shared))

    workers: list[tuple[Any, Connection]] = []
    context = get_context("fork")
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(count - 1):
                receiver, sender = context.Pipe(duplex=False)
                worker = context.Process(target=forked, args=(sender,), daemon=True)
                worker.start()
                sender.close()
                workers.append((worker, receiver))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        done = work()
        for _, receiver in workers:
            done |= _unpacked(receiver, shared)
    finally:
        os.close(places)
        for worker, receiver in workers:
            worker.terminate()
            worker.join()
            receiver.close()
    return _said_and_raised([done[place] for place in sorted(done)])


def _can_fork() -> bool:
    alone = threading.active_count() == 1 and parent_process() is None
    return sys.platform == "linux" and alone


def _done(part: Callable[[], Any]) -> Done:
    said: list[Any] = []
    with _heard(said):
        try:
            return Done(part(), None, said)
        except Exception as error:
            if not isinstance(error, DraftsimError):
                error.add_note(format_exc())  # of another process its traceback is lost
            return Done(None, error, said)


class _Ear:
    """A stream as it is, but for what is written."""

    def __init__(self, stream: Any, said: list[Any]) -> None:
        self.stream, self.said = stream, said

    def write(self, text: str) -> int:
        self.said.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _heard(said: list[Any]) -> Iterator[None]:
    """Append to `said` what is written to standard error, and warnings."""

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        said.append((message, category, filename, lineno))

    stream, shown = sys.stderr, warnings.showwarning
    sys.stderr, warnings.showwarning = _Ear(stream, said), showwarning  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr, warnings.showwarning = stream, shown


def _said_and_raised(done: Sequence[Done]) -> list[Any]:
    """The results, after all that was said; the first error is raised in its place."""
    registry: dict[Any, Any] = {}  # so that what several parts warn of is said once
    for one in done:
        for said in one.said:
            if isinstance(said, str):
                sys.stderr.write(said)
            else:
                warnings.warn_explicit(*said, registry=registry)
        if one.error is not None:
            raise one.error
    return [one.result for one in done]


def _packed(done: dict[int, Done], shared: Sequence[object]) -> bytes:
    numbers = {id(item): i for i, item in enumerate(shared)}

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: object) -> int | None:
            return numbers.get(id(item))

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(done)
    return file.getvalue()


def _unpacked(receiver: Connection, shared: Sequence[object]) -> dict[int, Done]:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> object:
            return shared[number]

    try:
        content = receiver.recv_bytes()
    except EOFError:
        raise DraftsimError(
            "a forked process was killed, perhaps for want of memory: run the same command again "
            "with more of it free, or on one core"
        ) from None
    found: dict[int, Done] = Unpickler(io.BytesIO(content)).load()
    return found
