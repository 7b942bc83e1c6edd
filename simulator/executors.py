"""Where the parts of a study run: this process, the cores of this machine, or a Dask cluster."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from traces.errors import DraftsimError, missing

Part = TypeVar("Part")
Part_contra = TypeVar("Part_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Lost:
    """The result of a part whose workers were lost with it."""


class Bench(Protocol[Part_contra, Result_co]):
    """Everything that any part needs, sent once to each worker."""

    def run(self, part: Part_contra, /) -> Result_co:
        """Return the result of one part."""
        ...


class Executor(Protocol):
    """Runs parts in any order."""

    def run(
        self, bench: Bench[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result | Lost]]:
        """(place in `parts`, its result) of every part, as they finish."""
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
        self, bench: Bench[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result | Lost]]:
        jobs = min(self.jobs or cores(), max(len(parts), 1))
        if jobs == 1:
            for place, part in enumerate(parts):
                yield place, bench.run(part)
            return
        import joblib
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        pool: Any = joblib.Parallel(
            n_jobs=jobs, return_as="generator_unordered", pre_dispatch="2*n_jobs"
        )
        # Of a bench that is run again, workers still have what they unpacked.
        if bench not in _packed:
            _packed[bench] = _Packed(bench)
        packed = _packed[bench]
        try:
            yield from pool(joblib.delayed(_unpacked)(packed, i, p) for i, p in enumerate(parts))
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
        Of the scheduler, such as ``tcp://host:8786``.
    timeout_s:
        How long to wait for it.

    Notes
    -----
    Within a ``with`` block one connection serves all runs, and workers keep the benches they were
    sent; outside, every run makes its own.  The scheduler gives the parts of a lost worker to
    another one; a part that outlives no worker is reported as `Lost`.
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
        self, bench: Bench[Part, Result], parts: Sequence[Part]
    ) -> Iterator[tuple[int, Result | Lost]]:
        if self._client is None:
            with self:
                yield from self.run(bench, parts)
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
        if bench not in self._sent:
            # To every worker at once, so that no part waits for another worker's copy.
            self._sent[bench] = client.scatter(bench, broadcast=True, hash=False)
        shared = [self._sent[bench]] * len(parts)
        futures = client.map(_numbered, shared, range(len(parts)), parts, pure=False)
        places = {future.key: i for i, future in enumerate(futures)}
        for future in dask.as_completed(futures, loop=client.loop):
            try:
                yield future.result()
            except (dask.KilledWorker, FutureCancelledError):
                yield places[future.key], Lost()


class _Packed:
    """A bench on its way to worker processes, which unpack it once for all their parts.

    What a bench caches while it computes (replayed rounds, say) then outlives a part.
    """

    def __init__(self, bench: Any) -> None:
        # As joblib itself packs them: classes of a user's own file come along.
        from joblib.externals.loky.backend.reduction import dumps

        self.name = uuid4().hex
        self.content = bytes(dumps(bench))

    @property
    def bench(self) -> Any:
        if self.name not in _unpacked_benches:
            _unpacked_benches.clear()
            _unpacked_benches[self.name] = pickle.loads(self.content)
        return _unpacked_benches[self.name]


_packed: WeakKeyDictionary[Any, _Packed] = WeakKeyDictionary()
_unpacked_benches: dict[str, Any] = {}
"""In a worker process, the bench that its last part was of."""


def _unpacked(packed: _Packed, place: int, part: Any) -> tuple[int, Any]:
    return place, packed.bench.run(part)


def _numbered(bench: Bench[Part, Result], place: int, part: Part) -> tuple[int, Result]:
    return place, bench.run(part)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
