"""Notes of a server's processes: written inside them, and read from outside.

A note is a JSON object in a line of a file.  It is kept while its process is at work and written
once that has been idle for `QUIET_S`.  Times are those of `time.perf_counter`, which all processes
of a machine share.  The engine's process notes

* ``engine``: what it is (``blocks``, ``block_size``, ``vocabulary``, ``device``);
* ``queued`` and ``at``: a request came;
* ``step`` (the fields of `traces.store.engine_runs.EngineStep`) and ``left``: an iteration, and
  the requests unfinished after it.

The process that runs the model, which may be the same, notes ``ran`` and ``seconds``: when a pass,
or sampling with drafting, began and how long it took.  `profiler.engines.session` notes ``rounds``
of a request that ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from policies.core import Round
from policies.json_text import parse_json
from traces.errors import DraftsimError
from traces.store.engine_runs import EngineStep

VARIABLE = "DRAFTSIM_RECORD"
"""Environment variable that names the folder to write to."""
QUIET_S = 0.1


class Lines:
    """The notes of one process, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: deque[dict[str, Any]] = deque()
        self._last_s = time.perf_counter()
        self._process = 0

    def put(self, **line: Any) -> None:
        """Note something."""
        if self._process != os.getpid():  # the first note, or that of a forked process
            self._process = os.getpid()
            self._lines.clear()
            threading.Thread(target=self._write, daemon=True).start()
        self._last_s = time.perf_counter()
        self._lines.append(line)

    def _write(self) -> None:
        path = self.folder / f"{os.getpid()}.jsonl"
        while True:
            time.sleep(QUIET_S / 2)
            if self._lines and time.perf_counter() - self._last_s > QUIET_S:
                lines = [self._lines.popleft() for _ in range(len(self._lines))]
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)


@lru_cache(maxsize=1)
def lines() -> Lines | None:
    """Return this process's notes; None if the environment asks for none."""
    folder = os.environ.get(VARIABLE)
    return Lines(Path(folder)) if folder else None


@dataclass(frozen=True)
class EngineLog:
    """The work of a server's engine while it served some requests.

    The part ``execute`` of a step has the model's passes, sampling and drafting.  ``output`` is the
    rest, mostly messages between processes.
    """

    queued: Mapping[str, float]
    """When each request reached the engine's process."""
    steps: Sequence[EngineStep]
    left: Sequence[int]
    """Requests unfinished after each step."""
    rounds: Mapping[str, Sequence[Round]]


class LogReader:
    """Reads what processes noted into `folder`, load by load.

    ``unnoted``: the reason to give if they write no notes.
    """

    def __init__(self, folder: Path, unnoted: str = "see its log") -> None:
        self.folder, self.unnoted = folder, unnoted
        self.engine: Mapping[str, Any] = {}
        """The engine's description of itself."""
        self._at: dict[Path, int] = {}

    def take(self, names: Collection[str], wait_s: float = 30.0) -> EngineLog:
        """Return what happened since the last call, once all of these requests have ended.

        Raises DraftsimError if the server does not say so in time.
        """
        found: list[dict[str, Any]] = []
        missing, until_s = set(names), time.monotonic() + wait_s
        while missing:
            if time.monotonic() > until_s:
                raise DraftsimError(
                    f"the server's engine did not say within {wait_s:g} s what it did: "
                    f"{self.unnoted}"
                )
            time.sleep(QUIET_S / 2)
            new = self._new()
            found += new
            for line in new:
                missing -= set(line["step"]["finished"] if "step" in line else ())
        time.sleep(2 * QUIET_S)  # notes of the other processes
        return self._log(found + self._new())

    def _new(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._at.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._at[path] = self._at.get(path, 0) + len(whole)
            found += [parse_json(line) for line in whole.splitlines()]
        return found

    def _log(self, found: Sequence[Mapping[str, Any]]) -> EngineLog:
        queued = {n["queued"]: float(n["at"]) for n in found if "queued" in n}
        rounds = {n["rounds"]: [Round(*own) for own in n["of"]] for n in found if "rounds" in n}
        for line in found:
            self.engine = line.get("engine", self.engine)
        noted = [n for n in found if "step" in n]
        ran = sorted((float(n["ran"]), float(n["seconds"])) for n in found if "ran" in n)
        steps = executed([EngineStep.read(n["step"]) for n in noted], ran)
        return EngineLog(queued, steps, [int(n["left"]) for n in noted], rounds)


def executed(steps: Sequence[EngineStep], ran: Sequence[tuple[float, float]]) -> list[EngineStep]:
    """Return steps with the seconds that the model's process worked within each.

    ``ran``: when each piece of its work began, in order, and how long it took.
    """
    starts, until = [start for start, _ in ran], [0.0, *accumulate(s for _, s in ran)]
    known = []
    for step in steps:
        first = bisect_left(starts, step.start_s)
        last = bisect_right(starts, step.start_s + step.seconds)
        seconds = until[last] - until[first]
        parts = {**step.parts, "execute": seconds, "output": step.parts["output"] - seconds}
        known.append(replace(step, parts=parts))
    return known
