"""Loads run in an engine, interleaved second by second, with a record of every step."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from policies.batch.base import Policy
from profiler.engines.cells import Control
from profiler.engines.drafts import Forced
from profiler.engines.engine import Engine
from profiler.engines.measure import EngineTable
from profiler.engines.session import Session, Setup
from traces.aliases import Say, silent
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import Demand, EngineStep, LoadRun

SLICE_S = 1.0
"""Seconds that a load runs before the next of the loads that share the engine."""
SWEEPS = 4
"""Sweeps over the table's cells between the loads of a repeat.

With one, the cells' noise was most of a predicted speedup's error on two CPU cores.
"""
ShownShare = Callable[[], AbstractContextManager[Callable[[float], None]]]
"""Makes a progress display: returns a function that is called with the finished share."""


class RunningLoad:
    """A running load, which can pause between iterations while other loads run.

    The clock of its requests stops in a pause, and while the control load runs.

    Parameters
    ----------
    demand: Requests to send.
    prompts: Prompts by sequence.
    tenant: The scheduler that takes its requests (`Engine.tenants`); the engine's own without one.
    """

    def __init__(
        self, engine: Engine, setup: Setup, demand: Demand, prompts: Mapping[int, Sequence[int]],
        control: Control, tenant: Any = None,
    ) -> None:  # fmt: skip
        self._engine, self._setup, self._prompts = engine, setup, prompts
        self._concurrency, self._control, self._tenant = demand.concurrency, control, tenant
        self._waiting = deque(enumerate(demand.jobs))
        self._session: Session | None = None
        self._requests: dict[str, dict[str, float]] = {}
        self._steps: list[EngineStep] = []
        self._controls: list[float] = []
        self._now_s = 0.0
        self.asked = sum(job.tokens for job in demand.jobs)
        """Tokens that are to be emitted."""
        self.tokens = 0
        """Emitted so far."""
        self.done = not demand.jobs

    @property
    def share(self) -> float:
        """The emitted share of its tokens."""
        return self.tokens / self.asked

    def go_on(self, seconds: float = math.inf, share: float = math.inf) -> None:
        """Run for this much time, or until that share of its tokens is emitted, or to the end."""
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
            # Every half second, for a few milliseconds.
            if start_s + self._now_s - controlled_s > 0.5:
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
        """Run the control load; return the start of the clock that reads `now_s`, and the time."""
        self._controls.append(self._control.seconds())
        moment_s = time.perf_counter()
        return moment_s - now_s, moment_s

    def _idle(self, start_s: float) -> bool:
        """Send the requests that are due; return True if it waited because nothing was to run."""
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

    def _take(self, step: EngineStep) -> None:
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


def interleave(
    loads: Sequence[RunningLoad], after_round: Callable[[float], None],
    after_slice: Callable[[float], None] = lambda _: None,
) -> None:  # fmt: skip
    """Run loads, each of a tenant of its own, to their end, in short slices of time.

    In a round the first load runs for `SLICE_S`, and each other load until it is equally far, so
    that changes of the machine's speed affect all of them.  The first load changes with the round.
    `after_round` is called with the share that the slowest load has done, up to 1; `after_slice`
    likewise, after each load's slice, because a round of slow loads takes minutes.
    """

    def slowest() -> float:
        return min(load.share for load in loads)

    while not all(load.done for load in loads):
        first, *others = loads
        first.go_on(seconds=SLICE_S)
        after_slice(slowest())
        for load in others:
            load.go_on(share=math.inf if first.done else first.share)
            after_slice(slowest())
        after_round(slowest())
        loads = [*others, first]


class PlannedLoad(NamedTuple):
    """A load to run under one policy, and its key in the results."""

    name: str
    repeat: int
    load: str
    policy: str


def planned_loads(
    loads: Sequence[str], policies: Sequence[str], repeats: int
) -> Iterator[PlannedLoad]:
    """Yield loads and policies in the order they run: policies rotate with the repeat.

    With more repeats the first ones stay the same.
    """
    for repeat in range(repeats):
        first = repeat % len(policies)
        for i, load in enumerate(loads):
            for policy in (*policies[first:], *policies[:first]):
                name = f"{repeat:03d}-{i:02d}-{policies.index(policy):02d}"
                yield PlannedLoad(name, repeat, load, policy)


def warm_up(
    engine: Engine, chosen: Mapping[str, Policy], demands: Mapping[str, Demand],
    prompts: Mapping[int, Sequence[int]], forced: Forced, control: Control,
) -> None:  # fmt: skip
    """Run the first 16 output tokens of each load's first requests under each policy.

    A GPU compiles kernels when a size first runs: steps of half a second among some of 20 ms.
    """
    for demand in demands.values():
        jobs = [
            job._replace(arrival_s=0.0, tokens=min(job.tokens, 16))
            for job in demand.jobs[: demand.concurrency or engine.options.max_batch]
        ]
        for policy in chosen.values():
            brief = Demand(jobs, demand.concurrency)
            RunningLoad(engine, Setup(policy, forced), brief, prompts, control).go_on()


def run_loads(
    engine: Engine, chosen: Mapping[str, Policy], demands: Mapping[str, Demand],
    prompts: Mapping[int, Sequence[int]], forced: Forced, repeats: int,
    between: EngineTable | None = None, kept: Checkpoint | None = None,
    say: Say = silent,
    progress: ShownShare = lambda: nullcontext(lambda _: None),
) -> dict[tuple[str, str], list[LoadRun]]:  # fmt: skip
    """Return the runs by load and policy, of every repeat.

    The loads of a repeat under all policies are interleaved second by second, as many as the
    engine's cache has room for (`together`), with the cells of `between`.  Runs that `kept` holds
    of an earlier call, perhaps with fewer repeats, are not repeated.
    """
    control = Control(engine.meta["device"])
    blocks = {load: blocks_of(engine, demand, prompts) for load, demand in demands.items()}
    room = room_left(engine, between)
    if (needed := len(chosen) * sum(blocks.values())) > room:
        say(
            f"not all loads run side by side: they need a cache of "
            f"{(needed + engine.blocks - room) * engine.block_size} tokens, the engine's has "
            f"{engine.blocks * engine.block_size} ({engine.cache_settings})"
        )

    # Every repeat has as many sweeps, so the table is of the runs' own time.  Blocks are kept by
    # their place in this order, as runs are, so that a call for fewer repeats takes none that
    # belong to others.  If a check was stopped, only the blocks of its unfinished runs are measured
    # at another time than the runs, when it continues.
    def measure_cells(runs: float) -> None:
        if between is not None:
            between.advance(SWEEPS * runs / (len(demands) * len(chosen)))

    def run(group: Sequence[PlannedLoad], done: int) -> list[LoadRun]:
        for load, own in itertools.groupby(group, lambda one: one.load):
            say(f"{load}, repeat {group[0].repeat + 1}: {', '.join(one.policy for one in own)}")
        lent = [blocks[one.load] for one in group]
        with engine.tenants(lent) if sum(lent) <= room else nullcontext([None]) as tenants:
            loads = [
                RunningLoad(engine, Setup(chosen[one.policy], forced), demands[one.load], prompts,
                     control, tenant)
                for one, tenant in zip(group, tenants, strict=True)
            ]  # fmt: skip
            if None in tenants:
                loads[0].go_on()
            with progress() as show:

                def after_round(share: float) -> None:
                    measure_cells(done + share * len(group))

                interleave(loads, after_round, show)
        return [load.result() for load in loads]

    measured: dict[tuple[str, str], list[LoadRun]] = {}
    done = 0
    warm = engine.meta["device"] == "cpu"
    for group in together(planned_loads(list(demands), list(chosen), repeats), blocks, room):
        found: list[Any] = [None if kept is None else kept.get_json(one.name) for one in group]
        if None in found:
            if not warm:
                say("running the beginning of each load, to warm up")
                warm_up(engine, chosen, demands, prompts, forced, control)
                if between is not None:
                    between.warm_up()
                warm = True
            found = [load.written() for load in run(group, done)]
            for one, written in zip(group, found, strict=True):
                if kept is not None:
                    kept.put_json(one.name, written)
        for one, written in zip(group, found, strict=True):
            measured.setdefault((one.load, one.policy), []).append(LoadRun.read(written))
        done += len(group)
        measure_cells(done)
    return measured


def together(
    planned: Iterable[PlannedLoad], blocks: Mapping[str, int], room: int
) -> Iterator[list[PlannedLoad]]:
    """Yield what is planned in lists of those that run side by side.

    Each holds as many loads of a repeat, under all policies, as fit into `room` blocks; if not even
    one load fits, its runs are alone.
    """
    group: list[PlannedLoad] = []
    left = room
    for (repeat, load), own in itertools.groupby(planned, lambda one: (one.repeat, one.load)):
        runs = list(own)
        needed = len(runs) * blocks[load]
        if group and (group[-1].repeat != repeat or needed > left):
            yield group
            group, left = [], room
        if needed > left:
            yield from ([run] for run in runs)
            continue
        group += runs
        left -= needed
    if group:
        yield group


def blocks_of(engine: Engine, demand: Demand, prompts: Mapping[int, Sequence[int]]) -> int:
    """Return the most blocks of the cache that a load can need."""
    options, jobs = engine.options, demand.jobs
    running = min(demand.concurrency or options.max_batch, len(jobs))
    lengths = sorted(len(prompts[job.sequence]) + job.tokens for job in jobs)[-running:]
    return sum(math.ceil((n + options.longest + 1) / engine.block_size) + 1 for n in lengths)


def room_left(engine: Engine, between: EngineTable | None) -> int:
    """Return the blocks that the engine can do without while it measures cells `between`."""
    tokens = 0
    if between is not None:
        tokens = max(between.grid.batches) * engine.options.max_model_len
        tokens += max(n * t for n, t in between.grid.prompts)
    return engine.blocks - 1 - math.ceil(tokens / engine.block_size)
