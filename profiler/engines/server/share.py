"""The time that a server adds to its engine, per request and per iteration.

Both are read from the same clock (`profiler.engines.server.record`) in the run that was measured,
so they need no latency table and no engine without a server.  To predict, medians of a control load
are put into a table as cells of the model ``server``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from profiler.engines.loads import LoadRun
from profiler.engines.server.client import Answer
from profiler.engines.server.log import EngineLog
from profiler.engines.watch import Step
from traces.errors import DraftsimError
from traces.latency.schema import CELL_COLUMNS, SERVER
from traces.latency.table import LatencyTable


@dataclass(frozen=True)
class ServedRun:
    """A load that a server served.

    A step of `load` holds what follows it until the next one, where the engine is not idle.
    """

    load: LoadRun
    around_request_s: Sequence[float]
    """By request, on the way to the engine and back."""
    around_step_s: Sequence[float]
    """By step, all but scheduling, running the model and taking in what came of it."""
    queued_s: Sequence[float]
    """When each request reached the engine, in the order they did, from the first on."""

    def written(self) -> dict[str, Any]:
        """Return the form written as JSON, which `read` reads."""
        return {**vars(self), "load": self.load.written()}

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> ServedRun:
        """Return the run that was `written`."""
        return cls(**{**kept, "load": LoadRun.read(kept["load"])})


def served_run(answers: Sequence[Answer], log: EngineLog, control_s: float) -> ServedRun:
    """Combine what clients and engine saw of a load; seconds from its first arrival on."""
    start_s = min(answer.arrival_s for answer in answers)
    requests = pd.DataFrame([
        {"name": a.name, "sequence": a.sequence, "arrival_s": a.arrival_s - start_s,
         "first_s": a.pieces[0][0] - start_s, "finish_s": a.pieces[-1][0] - start_s,
         "tokens": len(a.tokens)}
        for a in answers
    ])  # fmt: skip
    steps = [
        replace(step, start_s=step.start_s - start_s, seconds=step.seconds + gap_s)
        for step, gap_s in zip(log.steps, gaps(log), strict=True)
    ]
    texts = {answer.name: answer.tokens for answer in answers}
    load = LoadRun(requests, steps, log.rounds, control_s, texts)
    around = [s.seconds - sum(s.parts[p] for p in ("schedule", "execute", "update")) for s in steps]
    queued = sorted(log.queued[answer.name] for answer in answers)
    return ServedRun(load, around_requests(answers, log), around, [at - queued[0] for at in queued])


def gaps(log: EngineLog) -> list[float]:
    """Seconds from each step's end to the next one's start; 0 where the engine had nothing left."""
    following = [*log.steps[1:], None]
    return [
        max(after.start_s - (step.start_s + step.seconds), 0.0) if left and after else 0.0
        for step, after, left in zip(log.steps, following, log.left, strict=True)
    ]


def around_requests(answers: Sequence[Answer], log: EngineLog) -> list[float]:
    """Return by request the seconds on the way to the engine and back.

    On the way back: from the end of its last step.  Where no step ran when the request came, the
    time until one took it belongs to the server, which had to wake up; else the engine was at work.
    """
    first: dict[str, Step] = {}
    last: dict[str, Step] = {}
    for step in log.steps:
        for prompt in step.prompts:
            first.setdefault(prompt.name, step)
        last |= dict.fromkeys(step.finished, step)
    ends = np.array([step.start_s + step.seconds for step in log.steps])
    found = []
    for answer in answers:
        queued_s, taken_s = log.queued[answer.name], first[answer.name].start_s
        at_work = bool(((ends > queued_s) & (ends <= taken_s)).any())
        end = last[answer.name]
        back_s = answer.pieces[-1][0] - (end.start_s + end.seconds)
        found.append(
            queued_s - answer.arrival_s + (0.0 if at_work else taken_s - queued_s) + back_s
        )
    return found


def with_server(latency: LatencyTable, controls: Mapping[int, Sequence[ServedRun]]) -> LatencyTable:
    """`latency` with what a server adds, by the requests that closed loops of plain decoding kept.

    Raises DraftsimError for a table that has it already.
    """
    if latency.has(SERVER, "request"):
        raise DraftsimError(
            "these latencies hold a server's share: give those that `draftsim profile` wrote"
        )
    rows = []
    for batch, runs in controls.items():
        requests = [s for run in runs for s in run.around_request_s]
        decoding = [
            (len(step.decoded), max(seconds - known_s(latency, batch), 0.0))
            for run in runs
            for step, seconds in zip(run.load.steps, run.around_step_s, strict=True)
            if step.kind == "decode"
        ]
        fullest = max((size for size, _ in decoding), default=0)
        steps = [seconds for size, seconds in decoding if size == fullest]
        # The first `batch` are sent at once, the others after an answer.
        apart = [float(np.diff(run.queued_s[:batch]).mean()) for run in runs if batch > 1]
        told = {"request": requests, "iteration": steps or [0.0], "apart": apart or [0.0]}
        for phase, seconds in told.items():
            low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
            rows.append((SERVER, phase, batch, 1, 0, middle, (high - low) / 2, len(seconds)))
    cells = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    meta: dict[str, Any] = {"server": {"control": "plain decoding", "loops": sorted(controls)}}
    table = pd.concat([latency.cells, cells], ignore_index=True)
    return LatencyTable(table, {**latency.meta, **meta})


def added(run: ServedRun, latency: LatencyTable) -> dict[str, float]:
    """Return the time that the server added to the engine that `latency` was measured on.

    ``request_s`` around a request and ``iteration_s`` around an iteration, both in the mean;
    ``share``, of the time from sending a request to its last token, what was around it and around
    the iterations that it was part of.
    """
    requests, steps = run.load.requests, run.load.steps
    around = [
        seconds - known_s(latency, len(step.decoded) or 1)
        for step, seconds in zip(steps, run.around_step_s, strict=True)
    ]
    parts = sum(
        seconds * (len(step.decoded) + len(step.prompts))
        for step, seconds in zip(steps, around, strict=True)
    )
    whole_s = float((requests["finish_s"] - requests["arrival_s"]).sum())
    return {
        "request_s": float(np.mean(run.around_request_s)), "iteration_s": float(np.mean(around)),
        "share": (sum(run.around_request_s) + parts) / whole_s,
    }  # fmt: skip


def known_s(latency: LatencyTable, batch: int) -> float:
    """Return the seconds around an engine's step that a table measured without a server has.

    They are above all detokenization, which a server does in parallel to its engine.
    """
    by_batch: dict[int, list[float]] = {}
    for cell in latency.meta.get("host_parts", ()):
        by_batch.setdefault(int(cell["batch"]), []).append(float(cell["output_s"]))
    if not by_batch:
        return 0.0
    batches = sorted(by_batch)
    return float(np.interp(batch, batches, [np.median(by_batch[b]) for b in batches]))
