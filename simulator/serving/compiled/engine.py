"""The compiled engine as one of a station's: requests in, a record out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from simulator.serving.arrivals import Job
from simulator.serving.compiled import loop, state
from simulator.serving.compiled.pack import (
    limits_of,
    phases_of,
    prices_of,
    requests_of,
    rounds_of,
)
from simulator.serving.compiled.prices import READERS, SEEN, Records
from simulator.serving.cost.mixed import COMPOSED
from simulator.serving.cost.reader import ORIGINS, Coverage, Span
from simulator.serving.engine import Engine
from simulator.serving.source import Events
from simulator.serving.spans.rounds import Replays
from traces.errors import DraftsimError

LOGGED = 1 << 16
"""Iterations between two looks at the outside."""


class CompiledEngine(Engine):
    """One model replica whose requests arrive by themselves and whose rounds are known beforehand.

    `replays` holds the rounds.  `marks` are the times of a fleet's window (`Station.run`); by
    default the window is of its own requests.
    """

    def __init__(self, *args: Any, replays: Replays, marks: Mapping[int, float]) -> None:
        super().__init__(*args)
        self._replays = replays
        self._marks = dict(marks)
        self._emitted_at: dict[float, int] = {}
        self._coverage: list[Coverage] = []

    @property
    def emitted(self) -> int:
        """Tokens emitted by now: at the ends of the window, or after the run."""
        return self._emitted_at.get(self.env.now, self.recorder.tokens)

    @property
    def coverage(self) -> list[Coverage]:
        """As of every engine."""
        return self._coverage

    def run(self) -> Events:
        """All of it at once, and then the time that it took."""
        jobs = list(iter(self.source.take, None))
        ended_s = [self._serve(jobs)] if jobs else []
        yield self.env.at(max([*ended_s, *self._marks.values()]))

    def _serve(self, jobs: list[Job]) -> float:
        recorder, scheduler = self.recorder, self.scheduler
        if not self._marks:
            ends = recorder.skip, recorder.expected - 1
            self._marks = {job.number: job.arrival_s for job in jobs if job.number in ends}
        requests = requests_of(scheduler, jobs, recorder.skip)
        engine = state.Arrays(
            limits_of(scheduler), prices_of(self.cost, scheduler.limits.max_batch),
            rounds_of(self._replays, jobs, requests), requests, _zeros(state.QUEUE, len(jobs)),
            _zeros(state.FREE, 2 * len(jobs) + 4), _zeros(state.SEAT, scheduler.limits.max_batch),
            _zeros(state.STATE)[0], _zeros(state.MARK, len(self._marks)), _nothing_seen(),
            np.zeros(state.BINS, np.int64), _zeros(state.ITERATION, LOGGED),
        )  # fmt: skip
        engine.marks.at_s = sorted(self._marks.values())
        why, told = loop.MORE, 0
        while why == loop.MORE:
            why, logged = loop.run(engine)
            log = engine.log[:logged].copy()
            if logged:
                recorder.batch.add_each(log.start_s, log.end_s, log.running)
                recorder.kv_blocks.add_each(log.start_s, log.end_s, log.kv_blocks)
            self.source.advance(int(engine.state.finished) - told)
            told = int(engine.state.finished)
        if why == loop.STUCK:
            raise DraftsimError("the scheduler found nothing to run with requests waiting")
        self._record(engine)
        return max(float(engine.state.now), jobs[-1].arrival_s)

    def _record(self, engine: state.Arrays) -> None:
        recorder, done = self.recorder, engine.state
        left = engine.requests[engine.queue.left[: done.finished]]
        recorder.arrived = len(engine.requests)
        recorder.rejected = recorder.arrived - len(left)
        self.source.advance(recorder.rejected)
        recorder.iterations, recorder.peak_batch = int(done.iterations), int(done.peak_batch)
        recorder.tokens, recorder.carried = int(done.tokens), -int(left.tokens.sum())
        recorder.busy_s, recorder.area_s = float(done.busy_s), float(done.area_s)
        recorder.enter(float(done.changed_s), 0)
        bins = engine.gaps.nonzero()[0]
        counts = zip((bins + state.FINEST).tolist(), engine.gaps[bins].tolist(), strict=True)
        recorder.itl.add_bins(dict(counts), float(done.gaps_s))
        gained = {}
        for name in ("drafted", "accepted", "forwards"):
            sums = np.concatenate([[0], np.cumsum(engine.rounds[name])])
            gained[name] = sums[left.first_round + left.rounds] - sums[left.first_round]
        recorder.drafted, recorder.accepted, recorder.draft_forwards = (
            int(column.sum()) for column in gained.values()
        )
        columns = {
            "index": left.number, "sequence": left.sequence, "prompt_tokens": left.prompt,
            "tokens": left.tokens, "arrival_s": left.arrival_s,
            "first_s": left.first_s + left.around_s, "finish_s": left.last_s + left.around_s,
            "rounds": left.steps, "drafted": gained["drafted"], "accepted": gained["accepted"],
            "draft_forwards": gained["forwards"], "preemptions": left.preemptions,
            "replica": np.full(len(left), recorder.replica),
        }  # fmt: skip
        for name, values in columns.items():
            recorder.requests[name].extend(values.tolist())
        engine.marks.tokens[done.marked :] = done.tokens
        ends = sorted(self._marks.items(), key=lambda mark: mark[1])
        for (index, at_s), tokens in zip(ends, engine.marks.tokens.tolist(), strict=True):
            self._emitted_at[at_s] = tokens
            recorder.mark(index, at_s, tokens)
        *readers, composed = engine.seen
        for phases, seen in zip(phases_of(self.cost), readers, strict=True):
            for origin, sizes in zip(ORIGINS, seen, strict=True):
                self._cover(phases, origin, sizes)
        self._cover(("target", "mixed"), COMPOSED, composed[0])

    def _cover(self, phases: tuple[str, str] | None, origin: str, seen: Records) -> None:
        """Say what was read, in the order of `IterationCost.coverage`."""
        passes, *ends = seen.tolist()
        if passes and phases is not None:
            spans = [Span(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True)]
            self._coverage.append(Coverage(*phases, origin, passes, *spans))


def _zeros(of: np.dtype[Any], count: int = 1) -> Records:
    return np.zeros(count, of).view(np.recarray)


def _nothing_seen() -> Records:
    nothing = np.array((0, *[math.inf, -math.inf] * 3), SEEN)
    return np.full((len(READERS) + 1, len(ORIGINS)), nothing).view(np.recarray)
