"""Where the parts of a sweep run: the cores of this machine, or a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import joblib
import numpy.typing as npt
from joblib.externals.loky.process_executor import TerminatedWorkerError

from simulator.whatif.cells import Bench, Part
from traces.errors import DraftsimError

Columns = dict[str, npt.NDArray[Any]]


class Lost:
    """In the place of a part whose workers were lost with it."""


class Executor(Protocol):
    """Runs parts in any order."""

    def run(self, bench: Bench, parts: Sequence[Part]) -> Iterator[tuple[int, Columns | Lost]]:
        """(place in `parts`, its columns) of every part, as they finish."""
        ...


class Local:
    """Processes of this machine, through joblib.

    Parameters
    ----------
    jobs:
        Processes; None: one per core this process may use.
    """

    def __init__(self, jobs: int | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise DraftsimError(f"jobs is {jobs}, expected at least 1")
        self.jobs = jobs

    def run(self, bench: Bench, parts: Sequence[Part]) -> Iterator[tuple[int, Columns | Lost]]:
        jobs = min(self.jobs or _cores(), max(len(parts), 1))
        if jobs == 1:
            for place, part in enumerate(parts):
                yield place, bench.run(part)
            return
        pool: Any = joblib.Parallel(
            n_jobs=jobs, return_as="generator_unordered", pre_dispatch="2*n_jobs"
        )
        try:
            yield from pool(joblib.delayed(_numbered)(bench, i, p) for i, p in enumerate(parts))
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
    The scheduler gives the parts of a lost worker to another one; a part that outlives no
    worker is reported as `Lost`.
    """

    def __init__(self, address: str, timeout_s: float = 15.0) -> None:
        self.address = address
        self.timeout_s = timeout_s

    def run(self, bench: Bench, parts: Sequence[Part]) -> Iterator[tuple[int, Columns | Lost]]:
        try:
            import distributed
            from distributed.client import FutureCancelledError
        except ImportError:
            raise DraftsimError(
                "--cluster needs Dask: install it with `pip install 'draftsim[cluster]'`"
            ) from None
        dask: Any = distributed  # untyped
        try:
            client = dask.Client(self.address, timeout=self.timeout_s, set_as_default=False)
        except (OSError, ValueError) as error:
            raise DraftsimError(
                f"no Dask scheduler answers at {self.address} ({error}): start one with "
                "`dask scheduler`, and workers with `dask worker ADDRESS`"
            ) from None
        with client:
            if not client.scheduler_info()["workers"]:
                raise DraftsimError(
                    f"the scheduler at {self.address} has no workers: start them with "
                    f"`dask worker {self.address}`"
                )
            # To every worker at once, so that no part waits for another worker's copy.
            shared = client.scatter(bench, broadcast=True, hash=False)
            futures = client.map(
                _numbered, [shared] * len(parts), range(len(parts)), parts, pure=False
            )
            places = {future.key: i for i, future in enumerate(futures)}
            for future in dask.as_completed(futures, loop=client.loop):
                try:
                    yield future.result()
                except (dask.KilledWorker, FutureCancelledError):
                    yield places[future.key], Lost()


def _numbered(bench: Bench, place: int, part: Part) -> tuple[int, Columns | Lost]:
    return place, bench.run(part)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
