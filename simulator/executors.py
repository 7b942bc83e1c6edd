"""Executors: parts of an answer run in this process, on this machine's cores, or a Dask cluster.

The workers of `Local` take a second to start and last for a study.  `results_of` forks processes,
which start at once with everything loaded, so that even a fraction of a second is worth sharing.
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
from contextlib import redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from traces.errors import DraftsimError, missing

Part = TypeVar("Part")
Part_contra = TypeVar("Part_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class PartRunner(Protocol[Part_contra, Result_co]):
    """Everything that any part needs, sent once to each worker."""

    def run(self, part: Part_contra, /) -> Result_co:
        """Return the result of one part."""
        ...


class Executor(Protocol):
    """Runs parts in any order."""

    def run(
        self, runner: PartRunner[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result]]:
        """Yield (place in `parts`, its result) of every part, as they finish.

        Raises DraftsimError for lost parts once all others are done.
        """
        ...


class Local:
    """Processes of this machine, through joblib.

    Parameters
    ----------
    jobs:
        Processes; None: one per core this process may use.  With one, parts run in this
        process, in order, each when its result is asked for.
    """

    def __init__(self, jobs: int | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise DraftsimError(f"jobs is {jobs}, expected at least 1")
        self.jobs = jobs

    def run(
        self, runner: PartRunner[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result]]:
        jobs = min(self.jobs or cores(), max(len(parts), 1))
        if jobs == 1:
            for place, part in enumerate(parts):
                yield place, runner.run(part)
            return
        import joblib
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        pool: Any = joblib.Parallel(
            n_jobs=jobs, return_as="generator_unordered", pre_dispatch="2*n_jobs"
        )
        # Workers still have what they unpacked of a runner that is run again.
        if runner not in _packed:
            _packed[runner] = _Packed(runner)
        packed = _packed[runner]
        try:
            yield from pool(joblib.delayed(_numbered)(packed, i, p) for i, p in enumerate(parts))
        except TerminatedWorkerError as error:
            raise DraftsimError(
                "a worker process was killed, perhaps for want of memory: its part is lost, run "
                "the same command again with fewer --jobs"
            ) from error


class Cluster:
    """Workers of a running Dask scheduler, which must have draftsim installed.

    Parameters
    ----------
    address:
        Address of the scheduler, such as ``tcp://host:8786``.
    timeout_s:
        Seconds to wait for the scheduler.

    Notes
    -----
    Within a ``with`` block one connection serves all runs, and workers keep the runners they were
    sent; outside, every run makes its own.  The scheduler gives the parts of a lost worker to
    another one; a part that kills every worker is lost.
    """

    def __init__(self, address: str, timeout_s: float = 15.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._client: Any = None
        self._sent: dict[Any, Any] = {}
        """Benches that the workers have."""

    def __enter__(self) -> Self:
        try:
            import distributed
        except ImportError:
            raise missing(["dask", "distributed"], "--cluster") from None
        dask: Any = distributed  # untyped
        try:
            self._client = dask.Client(self.address, timeout=self.timeout_s, set_as_default=False)
        except (OSError, ValueError) as error:
            raise DraftsimError(
                f"no Dask scheduler answers at {self.address} ({error}): start one with "
                "`dask scheduler`, and workers with `dask worker ADDRESS`"
            ) from None
        return self

    def __exit__(self, *raised: object) -> None:
        self._sent.clear()
        self._client.close()
        self._client = None

    def run(
        self, runner: PartRunner[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result]]:
        if self._client is None:
            with self:
                yield from self.run(runner, parts)
            return
        import distributed
        from distributed.client import FutureCancelledError

        dask: Any = distributed  # untyped
        client = self._client
        if not client.scheduler_info()["workers"]:
            raise DraftsimError(
                f"the scheduler at {self.address} has no workers: start them with "
                f"`dask worker {self.address}`"
            )
        if runner not in self._sent:
            # To every worker at once, so that no part waits for another worker's copy.
            self._sent[runner] = client.scatter(runner, broadcast=True, hash=False)
        shared = [self._sent[runner]] * len(parts)
        futures = client.map(_numbered, shared, range(len(parts)), parts, pure=False)
        lost = 0
        for future in dask.as_completed(futures, loop=client.loop):
            try:
                yield future.result()
            except (dask.KilledWorker, FutureCancelledError):
                lost += 1
        if lost:
            raise DraftsimError(
                f"{lost} of {len(parts)} parts were lost with their workers: run the same command "
                "again; with --out what is finished is kept"
            )


class _Packed:
    """A runner, packed for worker processes, which unpack it once for all their parts.

    So what a runner caches while it computes, such as replayed rounds, outlives a part.
    """

    def __init__(self, runner: Any) -> None:
        # As joblib itself packs them: classes of a user's own file come along.
        from joblib.externals.loky.backend.reduction import dumps

        self.name = uuid4().hex
        self.content = bytes(dumps(runner))

    def run(self, part: Any) -> Any:
        if self.name not in _unpacked:
            _unpacked.clear()
            _unpacked[self.name] = pickle.loads(self.content)
        return _unpacked[self.name].run(part)


_packed: WeakKeyDictionary[Any, _Packed] = WeakKeyDictionary()
_unpacked: dict[str, Any] = {}
"""In a worker process, the runner of its last part."""


def _numbered(runner: PartRunner[Part, Result], place: int, part: Part) -> tuple[int, Result]:
    return place, runner.run(part)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Parts = Sequence[Callable[[], Any]]

MOST = 8
"""Processes of an answer: each takes some milliseconds to fork."""
FEWEST_TOKENS = 100_000
"""Tokens of all parts together below which a fork would take as long as the answer."""
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

    A part must not change anything that outlives it, because its process ends with it.  A part that
    raises an error, warns, or writes to a standard stream, and a part whose process was killed, is
    repeated by this process after those before it.  So errors and output are the same as without
    other processes.

    Parameters
    ----------
    tokens:
        Recorded tokens that all parts together go through.
    shared:
        Objects that results refer to without a copy, such as a trace that all parts read.
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
    started: list[tuple[BaseProcess, io.FileIO]] = []
    within = _in_part.set(True)
    # New processes hold back what stops them until they have decided what it does there.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for _ in range(helpers):
            with suppress(OSError):  # no room for another process
                file = io.FileIO(os.memfd_create("results"), "r+")
                given = os.getpid(), parts, queue, file, shared
                helper = get_context("fork").Process(target=_help, args=given)
                helper.start()
                started.append((helper, file))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        found: dict[int, Any] = {}
        for place, result in _taken(parts, queue):
            found[place] = result
            # The place in the file is one for all processes.
            progress(os.lseek(queue, 0, os.SEEK_CUR) // NUMBER, len(parts))
        for process, file in started:
            process.join()
            file.seek(0)
            packed = io.BytesIO(file.readall())
            with suppress(EOFError, pickle.UnpicklingError):  # all are read, or it was killed
                while True:
                    found |= [_Unpacker(packed, shared).load()]
        progress(len(parts), len(parts))  # others may have taken them all
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _in_part.reset(within)
        for process, file in started:
            process.kill()
            process.join()
            file.close()
        os.close(queue)
    return [found[i] if i in found else part() for i, part in enumerate(parts)]


def _may_fork() -> bool:
    """Return True if a fork is possible, safe, and useful to a process whose cores are its own."""
    if sys.platform != "linux" or _in_part.get():
        return False
    return threading.active_count() == 1 and parent_process() is None


def _help(owner: int, parts: Parts, queue: int, file: io.FileIO, shared: Sequence[object]) -> None:
    """Take parts until none is left, and write their places and results to `file`."""
    # It ends without a word: the process that it belongs to has the last one.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for found in _taken(parts, queue):
        if os.getppid() != owner:
            return  # the rest is not asked for
        packed = io.BytesIO()
        with suppress(Exception):  # no result to hand over: the part is done again
            _Packer(packed, shared).dump(found)
            file.write(packed.getbuffer())


def _taken(parts: Parts, queue: int) -> Iterator[tuple[int, Any]]:
    """Yield (place, result) of parts that no other process took and that need no repetition."""
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
