"""The notes of a server's processes (`profiler.engines.server.record`), read from outside."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from policies.core import Round
from policies.json_text import parse_json
from profiler.engines.server.lines import QUIET_S
from profiler.engines.watch import Decoded, Prompt, Step
from traces.errors import DraftsimError

WAIT_S = 30.0


@dataclass(frozen=True)
class EngineLog:
    """The work of a server's engine while it served some requests.

    Of a step's parts ``execute`` are passes of the model with sampling and drafting, and
    ``output`` is what is left: messages between processes, above all.
    """

    queued: Mapping[str, float]
    """When each request reached the engine's process."""
    steps: Sequence[Step]
    left: Sequence[int]
    """Requests unfinished after each step."""
    rounds: Mapping[str, Sequence[Round]]


class LogReader:
    """Reads what processes noted into `folder`, load by load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine: Mapping[str, Any] = {}
        """The engine's description of itself."""
        self._at: dict[Path, int] = {}

    def take(self, names: Collection[str], wait_s: float = WAIT_S) -> EngineLog:
        """Return what happened since the last call, once all of these requests have ended.

        Raises DraftsimError if the server does not say so in time.
        """
        found: list[dict[str, Any]] = []
        missing, until_s = set(names), time.monotonic() + wait_s
        while missing:
            if time.monotonic() > until_s:
                raise DraftsimError(
                    f"the server's engine did not say within {wait_s:g} s what it did: this vLLM "
                    "is not 0.32, or draftsim is not installed in its environment (`make vllm`)"
                )
            time.sleep(QUIET_S / 2)
            new = self._new()
            found += new
            for line in new:
                missing -= set(line["step"][6] if "step" in line else ())
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
        steps = executed([_step(n["step"]) for n in noted], ran)
        return EngineLog(queued, steps, [int(n["left"]) for n in noted], rounds)


def executed(steps: Sequence[Step], ran: Sequence[tuple[float, float]]) -> list[Step]:
    """Steps with what the model's process took in them, its starts and seconds in order of time."""
    starts, until = [start for start, _ in ran], [0.0, *accumulate(s for _, s in ran)]
    known = []
    for step in steps:
        first = bisect_left(starts, step.start_s)
        last = bisect_right(starts, step.start_s + step.seconds)
        seconds = until[last] - until[first]
        parts = {**step.parts, "execute": seconds, "output": step.parts["output"] - seconds}
        known.append(replace(step, parts=parts))
    return known


def _step(fields: Sequence[Any]) -> Step:
    start_s, seconds, parts, decoded, prompts, emitted, finished = fields
    decoding, reading = [Decoded(*d) for d in decoded], [Prompt(*p) for p in prompts]
    return Step(start_s, seconds, parts, decoding, reading, emitted, finished)
