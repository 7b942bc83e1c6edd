"""Runs a load in an engine: closed loops and timed arrivals, with every iteration kept."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.core import Round
from profiler.engines.bench import Control
from profiler.engines.engine import Engine, Step
from profiler.engines.session import Session
from profiler.engines.setup import Setup
from profiler.engines.watch import Decoded, Prompt

CONTROL_EVERY_S = 0.5
"""Seconds between two runs of the control load during a load; it takes a few milliseconds."""
TURN_S = 1.0
"""Seconds that a load runs before the loads that share the engine have their turns."""


class Job(NamedTuple):
    """A request to send: which sequence, when at the earliest, and how many tokens."""

    sequence: int
    arrival_s: float
    tokens: int


@dataclass(frozen=True)
class LoadRun:
    """The results of a load.

    ``requests``: ``name, sequence, arrival_s, first_s, finish_s, tokens``, seconds from the
    load's start.
    """

    requests: pd.DataFrame
    steps: Sequence[Step]
    rounds: Mapping[str, Sequence[Round]]
    control_s: float
    """The control load's time around this run, and all along it where it could be had."""
    texts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Output tokens by name; empty if they were not kept."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in iterations."""
        return sum(step.seconds for step in self.steps)

    def written(self) -> dict[str, Any]:
        """Return the form written as JSON, which `read` reads."""
        return {
            "requests": self.requests.to_dict("list"), "steps": [vars(s) for s in self.steps],
            "rounds": {name: list(own) for name, own in self.rounds.items()},
            "control_s": self.control_s, "texts": {n: list(t) for n, t in self.texts.items()},
        }  # fmt: skip

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> LoadRun:
        """Return the run that was `written`."""
        steps = [
            Step(**{
                **step, "decoded": [Decoded(*d) for d in step["decoded"]],
                "prompts": [Prompt(*p) for p in step["prompts"]],
            })
            for step in kept["steps"]
        ]  # fmt: skip
        rounds = {name: [Round(*r) for r in own] for name, own in kept["rounds"].items()}
        texts = kept.get("texts", {})  # runs of an earlier version kept none
        return cls(pd.DataFrame(kept["requests"]), steps, rounds, kept["control_s"], texts)


class Load:
    """A load on its way through an engine, which may pause for others between iterations.

    Meanwhile its requests' clock stands still, as it does while the control load runs.

    Parameters
    ----------
    jobs:
        What to send: at their times, or in a closed loop of `concurrency` requests.
    prompts:
        By sequence.
    tenant:
        The scheduler that takes its requests (`Engine.tenants`); the engine's own without one.
    """

    def __init__(
        self, engine: Engine, setup: Setup, jobs: Sequence[Job],
        prompts: Mapping[int, Sequence[int]], concurrency: int | None, control: Control,
        tenant: Any = None,
    ) -> None:  # fmt: skip
        self._engine, self._setup, self._prompts = engine, setup, prompts
        self._concurrency, self._control, self._tenant = concurrency, control, tenant
        self._waiting = deque(enumerate(jobs))
        self._session: Session | None = None
        self._requests: dict[str, dict[str, float]] = {}
        self._steps: list[Step] = []
        self._controls: list[float] = []
        self._now_s = 0.0
        self.asked = sum(job.tokens for job in jobs)
        """Tokens that are to be emitted."""
        self.tokens = 0
        """Emitted so far."""
        self.done = not jobs

    @property
    def share(self) -> float:
        """The emitted share of its tokens."""
        return self.tokens / self.asked

    def go_on(self, seconds: float = math.inf, share: float = math.inf) -> None:
        """Until so much time has passed, or that share of its tokens is emitted, or to its end."""
        if self.done:
            return
        engine = self._engine
        engine.enter(self._tenant)
        if self._session is None:
            self._session = engine.proposer.use(self._setup)
        else:
            engine.proposer.go_on(self._session)
        until_s = self._now_s + seconds
        start_s, controlled_s = self._controlled(self._now_s)
        if self._concurrency is not None and not self._requests:
            for _ in range(min(self._concurrency, len(self._waiting))):
                self._send(0.0)
        while not self.done and self.share < share and self._now_s < until_s:
            if self._concurrency is None and self._idle(start_s):
                continue
            step = engine.step()
            self._now_s = time.perf_counter() - start_s
            if start_s + self._now_s - controlled_s > CONTROL_EVERY_S:
                start_s, controlled_s = self._controlled(self._now_s)
            if step is not None:
                self._take(step)
            self.done = not (self._waiting or engine.busy)

    def result(self) -> LoadRun:
        """Return the results of the load, once it is done."""
        self._controlled(self._now_s)
        requests = pd.DataFrame([{"name": name, **own} for name, own in self._requests.items()])
        finished = {} if self._session is None else self._session.finished
        rounds = {name: stream.rounds for name, stream in finished.items()}
        texts = {name: stream.output for name, stream in finished.items()}
        return LoadRun(requests, self._steps, rounds, float(np.median(self._controls)), texts)

    def _controlled(self, now_s: float) -> tuple[float, float]:
        """Run the control load; the moment that was `now_s` ago then, and that moment itself."""
        self._controls.append(self._control.seconds())
        moment_s = time.perf_counter()
        return moment_s - now_s, moment_s

    def _idle(self, start_s: float) -> bool:
        """Send what is due; whether there was nothing to run, and time has passed instead."""
        now_s = time.perf_counter() - start_s
        while self._waiting and self._waiting[0][1].arrival_s <= now_s:
            self._send(self._waiting[0][1].arrival_s)
        if not self._waiting or self._engine.busy:
            return False
        time.sleep(max(self._waiting[0][1].arrival_s - now_s, 0.0))
        self._now_s = time.perf_counter() - start_s
        return True

    def _send(self, arrival_s: float) -> None:
        index, job = self._waiting.popleft()
        name = f"{job.sequence}/{index}"
        self._requests[name] = {"sequence": job.sequence, "arrival_s": arrival_s}
        self._engine.add(name, self._prompts[job.sequence], job.tokens)

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        for name, tokens in step.emitted.items():
            own = self._requests[name]
            own.setdefault("first_s", self._now_s)
            self.tokens += tokens - int(own.get("tokens", 0))
            own["tokens"] = tokens
        for name in step.finished:
            self._requests[name]["finish_s"] = self._now_s
            if self._concurrency is not None and self._waiting:
                self._send(self._now_s)


def interleave(loads: Sequence[Load], after_round: Callable[[float], None]) -> None:
    """Run loads, each of a tenant of its own, to their end, in short turns.

    Every round one goes on for `TURN_S`, and the others until they are as far: a machine that
    changes by the minute is the same for all of them.  The first changes with the round.
    `after_round` is called with how far the last of them is, up to 1.
    """
    while not all(load.done for load in loads):
        first, *others = loads
        first.go_on(seconds=TURN_S)
        for load in others:
            load.go_on(share=math.inf if first.done else first.share)
        after_round(min(load.share for load in loads))
        loads = [*others, first]
