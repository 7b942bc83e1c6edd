"""The suite's environment: device, memory, time left, output folder, and finished work."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from policies.json_text import parse_json
from profiler.machine import NoTimeError
from profiler.models.architectures import PAIRS, PairShape
from profiler.models.graphs import forget_compiled
from profiler.models.loading import choose_device, choose_dtype, describe_device
from profiler.suite import KERNELS
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.store.checkpoint import Checkpoint
from traces.store.files import write_trace
from traces.store.writing import make_folder, write_atomically

LARGEST = 16 * 10**6
"""Bytes of the largest file a stage may leave."""
COMPLETE, FAILED, REFUSED, UNFINISHED = range(4)
"""Exit codes: all done, something failed, a wrong request, and not enough time."""

Findings = dict[str, Any]
"""Findings of a part of a stage; ``is_unfinished`` if some of it is not done."""


@dataclass
class Workplace:
    """The device, the folder and the deadline of a stage.

    ``quick`` shrinks every model and grid so that a CPU runs the stage in seconds.
    """

    out: Path
    device: torch.device
    dtype: torch.dtype
    seconds: float
    quick: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True))
    begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds of the stage's time that are left."""
        return self.seconds - (time.monotonic() - self.begin)

    def check_time(self) -> None:
        """Raise NoTimeError once the stage's time is spent: asked between any two runs."""
        if self.left <= 0:
            raise NoTimeError("no time left")

    def say(self, text: str) -> None:
        """Print a line of progress, with the time spent."""
        self.console.print(f"[{self.seconds - self.left:6.1f} s] {text}", highlight=False)

    @property
    def work(self) -> Path:
        """Folder of unfinished work, next to the results in `out`."""
        mark = hashlib.sha256(str(self.out.resolve()).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"draftsim-suite-{mark}"

    def forget(self, stage: str) -> None:
        """Remove the unfinished work of a stage that is done: folders named after it."""
        for folder in self.work.glob(f"{stage}*"):
            shutil.rmtree(folder)
        if self.work.is_dir() and not any(self.work.iterdir()):
            self.work.rmdir()

    def meta(self) -> dict[str, Any]:
        """Return provenance of everything measured here."""
        return {
            **describe_device(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "quick": self.quick,
        }

    def free_bytes(self) -> int:
        """Return device memory that models and caches may still take."""
        if self.device.type != "cuda":
            return 8 << 30
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0, free - (2 << 30))  # left to libraries, graphs and activations

    def settle(self) -> None:
        """Keep the models, once built, out of garbage collections, which every capture makes."""
        if self.device.type == "cuda":
            gc.collect()
            gc.freeze()

    def unsettle(self) -> None:
        """Collect dropped models, and return their memory to the device."""
        forget_compiled()
        if self.device.type == "cuda":
            gc.unfreeze()
        self.release()

    def release(self) -> None:
        """Return freed memory to the device, so that the next pair can use it."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def lacks_memory(self, pair: PairShape) -> str | None:
        """Return why a pair's weights do not fit and which pair does; None if they fit."""
        needed, free = pair.parameters * self.dtype.itemsize, self.free_bytes()
        if needed <= 0.95 * free:
            return None
        return (
            f"{pair.name} needs {needed / 2**30:.1f} GiB for its weights and this device has "
            f"{free / 2**30:.1f} GiB free: left out; {self.advice(free)}"
        )

    def advice(self, free: int | None = None) -> str:
        """Return the pair to take if memory is short: the largest that fits in `free` bytes."""
        room = 0.8 * (self.free_bytes() if free is None else free) / self.dtype.itemsize
        fitting = [p for p in PAIRS.values() if p.parameters <= room]
        if not fitting:
            return (
                "no pair of the suite fits: free the device's memory, or use --device cpu --quick"
            )
        return f"--pairs {max(fitting, key=lambda p: p.parameters).name} fits"


def open_workplace(
    device: str, out: Path, *, seconds: float, quick: bool = False, dtype: str | None = None
) -> Workplace:
    """Return the place of a stage: its device, folder and deadline.

    Raises DraftsimError if the device is not there, has no such dtype, or the folder cannot be
    made.
    """
    where = choose_device(device)
    if where.type == "cuda":
        where = torch.device("cuda", where.index or 0)
    else:
        torch.set_num_threads(1)  # steadier times than several, and miniatures need no more
    kind = choose_dtype(dtype, where)
    make_folder(out, "name another --out")
    place = Workplace(out, where, kind, seconds, quick)
    if where.type == "cuda" and kind is torch.float16 and dtype is None:
        place.say("this GPU has no bfloat16: everything is measured in float16 instead")
    return place


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a stage's results as JSON, atomically."""
    write_atomically(path, json.dumps(results, indent=1, default=float).encode())


def write_within(trace: Trace, path: Path, limit: int = LARGEST) -> int:
    """Write the first requests that fit into `limit` bytes, and return their number.

    Requests come in turn from each category, so that the first ones are of all of them.
    """
    count = len(trace.requests)
    while True:
        some = trace if count == len(trace.requests) else trace.select(range(count))
        write_trace(some, path)
        size = path.stat().st_size
        if size <= limit or count == 1:
            return count
        count = max(1, min(count - 1, int(0.97 * count * limit / size)))


class StoppedError(BaseException):
    """The process was told to end; finished work is written first."""


def reason(error: BaseException) -> str:
    """Return an error in one line: the first line of its message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_unfinished(unit: Findings | None) -> bool:
    """Return True if a unit is missing, or parts of it for lack of time."""
    return unit is None or bool(unit.get("unfinished"))


class Units:
    """The units of work of a stage: those finished, and what is left undone.

    `units` are those of the results: those of this run, which a stopped one may have begun, and
    those that the stage's folder holds (`join`).  Units that failed or came too late stay
    unfinished; the same command tries them again.  ``rows`` names the field of a unit that the
    stage's table holds.

    Raises DraftsimError if the folder holds a stopped run with other settings.
    """

    def __init__(self, place: Workplace, stage: str, rows: str = "rows", **settings: Any) -> None:
        self.place, self.stage, self._rows = place, stage, rows
        self._kept = Checkpoint(place.work / stage, {**settings, "plan": 2, "meta": place.meta()})
        read = ((name, self._kept.get_json(name)) for name in self._kept.names())
        self._own: dict[str, Findings] = {name: unit for name, unit in read if unit is not None}
        self.units = dict(self._own)
        self.limits: dict[str, str] = {}
        """Parts that this device or model does not hold, by name."""
        self.late: dict[str, str] = {}
        """Parts that there was no time for, by name."""
        self.failed: dict[str, str] = {}
        """Errors, by the part that they stopped."""
        self.stopped: str | None = None
        """Why the stage broke off, if it did."""

    def limit(self, name: str, why: str) -> None:
        """Leave something out for good."""
        self.limits[name] = why
        self.place.say(why)

    def fail(self, name: str, error: BaseException | str) -> None:
        """Note an error and print it immediately."""
        self.failed[name] = error if isinstance(error, str) else reason(error)
        self.place.say(f"FAILED {name}: {self.failed[name]}")

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note the part `name` if the block comes too late or fails, and go on after the block."""
        try:
            yield
        except NoTimeError:
            self.late[name] = "no time left"
        except (DraftsimError, RuntimeError) as error:
            self.fail(name, error)

    @property
    def status(self) -> int:
        """The exit code."""
        if self.failed or self.stopped:
            return FAILED
        return UNFINISHED if self.late else COMPLETE

    @property
    def notes(self) -> list[str]:
        """Everything left out, a line each."""
        undone = {**self.late, **{name: f"failed: {why}" for name, why in self.failed.items()}}
        return [*self.limits.values(), *(f"{name}: {why}" for name, why in undone.items())]

    def summary(self) -> dict[str, Any]:
        """Return what the stage's results hold of it."""
        return {
            "complete": self.status == COMPLETE, "left_out": self.notes, "late": self.late,
            "failed": self.failed, "stopped": self.stopped,
        }  # fmt: skip

    @contextmanager
    def closing(self, write: Callable[[], None]) -> Iterator[None]:
        """Write the results so far when the block ends, also after an error."""
        try:
            yield
        except BaseException as error:
            self.stopped = reason(error)
            write()
            raise
        write()

    def get(self, name: str) -> Findings | None:
        """Return a unit of this run, or of the stopped one that it continues, or None."""
        return self._own.get(name)

    def put(self, name: str, unit: Findings) -> None:
        """Keep a unit."""
        self._own[name] = unit
        self._kept.put_json(name, unit)
        self._file(name, unit)

    def _file(self, name: str, unit: Findings) -> None:
        """Replace an earlier run's unit in `units`, unless that one holds more."""
        old = self.units.get(name, {"unfinished": True})
        before, now = (len(one.get(self._rows, ())) for one in (old, unit))
        if not is_unfinished(unit) or (is_unfinished(old) and before <= now):
            self.units[name] = unit

    def join(
        self, again: Collection[str], table: str,
        rows: Callable[[Path], Mapping[str, list[list[Any]]]],
    ) -> None:  # fmt: skip
        """Take over the units that the stage's folder holds, until this run has better ones.

        ``again`` names those to be measured again.  ``rows`` reads the file `table` by unit.

        Raises DraftsimError if others were measured with other settings, or a file is damaged: a
        folder is of one device, dtype and set of library versions.
        """
        path = self.place.out / f"{self.stage}.json"
        if not path.is_file():
            return
        try:
            document = parse_json(path.read_text())
            held = {name: dict(unit) for name, unit in document["units"].items()}
            meta = dict(document["meta"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DraftsimError(f"{path} is damaged ({error}): use another --out") from None
        own = parse_json(json.dumps(self.place.meta()))
        other = sorted(k for k in {*own, *meta} if own.get(k) != meta.get(k))
        if other and set(held) <= set(again):
            return
        if other:
            raise DraftsimError(
                f"{path} holds figures measured with another {', '.join(other)}: one --out holds "
                "one device and its settings; use another"
            )
        measured = self.place.out / table
        tabled = rows(measured) if measured.is_file() else {}
        self.units = {n: {**held[n], self._rows: r} for n, r in tabled.items() if n in held}
        for name, unit in self._own.items():
            self._file(name, unit)

    def write(self) -> None:
        """Write the stage's JSON: its units but for their rows, which the table holds."""
        units = {
            name: {k: v for k, v in unit.items() if k != self._rows}
            for name, unit in self.units.items()
        }
        results = {
            "stage": self.stage, "meta": self.place.meta(), **self.summary(),
            "kernels": KERNELS, "units": units,
        }  # fmt: skip
        write_results(self.place.out / f"{self.stage}.json", results)

    def close(self) -> None:
        """End the stage: forget its units, unless some of it is left, be it other pairs'."""
        left = [*self.failed, *self.late]
        if not left and not any(is_unfinished(unit) for unit in self._own.values()):
            self.place.forget(self.stage)
        elif left:
            what = "failed or came too late" if self.failed else "came too late"
            self.place.say(
                f"{len(left)} parts {what}, from {left[0]} on: the same command on this machine "
                "goes on with them"
            )
