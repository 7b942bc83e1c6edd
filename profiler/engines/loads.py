"""Runs a load in an engine: closed loops and timed arrivals, with every iteration kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.core import Round
from profiler.engines.bench import Control
from profiler.engines.engine import Engine, Step
from profiler.engines.setup import Setup
from profiler.engines.watch import Decoded, Prompt

CONTROL_EVERY_S = 0.5
"""Seconds between two runs of the control load during a load; it takes a few milliseconds."""


class Job(NamedTuple):
    """A request to send: which sequence, when at the earliest, and how many tokens."""

    sequence: int
    arrival_s: float
    tokens: int


@dataclass(frozen=True)
class LoadRun:
    """What came of a load.

    ``requests``: ``name, sequence, arrival_s, first_s, finish_s, tokens``, seconds from the
    load's start.
    """

    requests: pd.DataFrame
    steps: Sequence[Step]
    rounds: Mapping[str, Sequence[Round]]
    control_s: float
    """The control load's time around this run, and all along it where it could be had."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in iterations."""
        return sum(step.seconds for step in self.steps)

    def written(self) -> dict[str, Any]:
        """As JSON holds it; `read` reads that."""
        return {
            "requests": self.requests.to_dict("list"), "steps": [vars(s) for s in self.steps],
            "rounds": {name: list(own) for name, own in self.rounds.items()},
            "control_s": self.control_s,
        }  # fmt: skip

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> LoadRun:
        """What was `written`."""
        steps = [
            Step(**{
                **step, "decoded": [Decoded(*d) for d in step["decoded"]],
                "prompts": [Prompt(*p) for p in step["prompts"]],
            })
            for step in kept["steps"]
        ]  # fmt: skip
        rounds = {name: [Round(*r) for r in own] for name, own in kept["rounds"].items()}
        return cls(pd.DataFrame(kept["requests"]), steps, rounds, kept["control_s"])


def run_load(
    engine: Engine, setup: Setup, jobs: Sequence[Job], prompts: Mapping[int, Sequence[int]],
    concurrency: int | None, control: Control,
) -> LoadRun:  # fmt: skip
    """Send `jobs`: at their times, or in a closed loop of `concurrency` requests.

    The control load runs between iterations, too, while the requests' clock stands still.
    """
    engine.proposer.use(setup)
    waiting = deque(enumerate(jobs))
    times: dict[str, dict[str, float]] = {}
    controls = [control.seconds()]
    start_s = controlled_s = time.perf_counter()

    def send(arrival_s: float) -> None:
        index, job = waiting.popleft()
        name = f"{job.sequence}/{index}"
        times[name] = {"sequence": job.sequence, "arrival_s": arrival_s}
        engine.add(name, prompts[job.sequence], job.tokens)

    for _ in range(min(concurrency or 0, len(jobs))):
        send(0.0)
    steps: list[Step] = []
    while waiting or engine.busy:
        now_s = time.perf_counter() - start_s
        if concurrency is None:
            while waiting and waiting[0][1].arrival_s <= now_s:
                send(waiting[0][1].arrival_s)
            if waiting and not engine.busy:
                time.sleep(max(waiting[0][1].arrival_s - now_s, 0.0))
                continue
        step = engine.step()
        now_s = time.perf_counter() - start_s
        if start_s + now_s - controlled_s > CONTROL_EVERY_S:
            controls.append(control.seconds())
            controlled_s = time.perf_counter()
            start_s = controlled_s - now_s
        if step is None:
            continue
        steps.append(step)
        for name, tokens in step.emitted.items():
            times[name].setdefault("first_s", now_s)
            times[name]["tokens"] = tokens
        for name in step.finished:
            times[name]["finish_s"] = now_s
            if concurrency is not None and waiting:
                send(now_s)
    requests = pd.DataFrame([{"name": name, **own} for name, own in times.items()])
    rounds = {n: s.rounds for n, s in engine.proposer.finished.items()}
    controls.append(control.seconds())
    return LoadRun(requests, steps, rounds, float(np.median(controls)))
