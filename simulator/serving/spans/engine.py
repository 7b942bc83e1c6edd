"""The engine by spans: an event where the batch changes, not one per iteration.

It runs what `simulator.serving.engine.Engine` runs, to rounding, and goes iteration by
iteration itself where single requests matter: where one has to wait for the token budget,
or loses its place for want of memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from simulator.serving.arrivals import Job
from simulator.serving.cost.iteration import Chunk
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.work import Work, Works
from simulator.serving.engine import Engine
from simulator.serving.scheduler import Continuous
from simulator.serving.sequence import Sequenced, Slot
from simulator.serving.source import Events
from simulator.serving.spans.ledger import BLOCKS, LONGEST_DRAFT, Ledger
from simulator.serving.spans.rounds import (
    ACCEPTED,
    CATCH_UP,
    CONTEXT,
    DRAFT_CONTEXT,
    DRAFTED,
    DRAFTING,
    EMITTED,
    FORWARDS,
    REJECTED,
    UNREAD,
    Ints,
    ReplayedSequence,
    Replays,
)

FEW, MANY = 6, 512
"""Iterations that are quicker priced one by one, and those priced at a time."""
STEPS = 16
"""Iterations run one by one before spans are tried again."""

Wait = Generator[simpy.Event, Any, bool]
WORK = [CONTEXT, DRAFTED, LONGEST_DRAFT, DRAFTING, CATCH_UP, DRAFT_CONTEXT, REJECTED, UNREAD]
"""Rows of the ledger in the order of the fields of `Work`."""


class SpanEngine(Engine):
    """One model replica whose requests' rounds are known beforehand: `replays` holds them.

    It draws no timeline, and its costs are those that totals decide (`by_totals`).
    """

    def __init__(self, *args: Any, replays: Replays, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replays = replays
        self._continuous = self.scheduler if isinstance(self.scheduler, Continuous) else None
        self._ledger = Ledger(self.scheduler.lookahead, self.scheduler.limits.block_size)
        self._since: dict[Slot, int] = {}
        """Of every request in the ledger, the iteration before which it was entered."""
        self._ends: list[tuple[int, int, Slot]] = []
        """A heap of (iteration after which it ends, a number, the request)."""
        self._entered = self._counted = 0
        self._late: list[Slot] = []
        """Requests that emitted nothing in the last iteration, though they had begun."""
        self._prompts: list[Slot] = []
        self._by_steps = False

    def sequence(self, job: Job) -> Sequenced:
        """The request's rounds, replayed already."""
        return ReplayedSequence(job, self._replays.table(job))

    def run(self) -> Events:
        """As the engine that goes iteration by iteration, in fewer events."""
        while not self.full:
            chunks = self._plan()
            if chunks is None:
                going = yield from self._steps()
            elif chunks:
                going = yield from self._mixed(chunks)
            elif self._since:
                going = yield from self._span()
            elif going := not self.idle_for_good():
                yield self.sleep()
            if not going:
                return

    def join(self, slot: Slot) -> None:
        """A request begins to decode: `prefilled` enters it."""

    def prefilled(self, chunk: Chunk) -> None:
        """As for every engine; then the rounds to come are entered."""
        super().prefilled(chunk)
        slot = chunk.slot
        if not slot.prefill_left and not slot.decoder.ended:
            self._enter(slot)

    def settle(self) -> None:
        """Bring the slots in the ledger up to date, and leave it empty."""
        now, pool = self._ledger.now, self.scheduler.pool
        pool.release(self)
        for slot, since in self._since.items():
            sequence = slot.decoder
            passed = now - since
            slot.steps = sequence.at = sequence.at + passed
            if passed:
                drafted, accepted, emitted, forwards = sequence.table.totals[:, slot.steps - 1]
                slot.drafted, slot.accepted = int(drafted), int(accepted)
                slot.draft_forwards, slot.tokens = int(forwards), 1 + int(emitted)
                slot.context = slot.job.prompt_tokens + slot.tokens
                slot.last_s = self.env.now
            if self._continuous is not None:
                # What the last iteration reserved.
                last = int(sequence.table.after[slot.steps - 2]) if slot.steps > 1 else 1
                peak = slot.job.prompt_tokens + last + self.scheduler.lookahead
                slot.capacity = pool.grow(slot, peak if passed else slot.capacity)
        self._ledger.clear()
        self._since.clear()
        self._ends.clear()
        self._late.clear()
        self._counted = 0

    # --- what to run -------------------------------------------------------------------

    def _plan(self) -> list[Chunk] | None:
        """Prompt chunks of the next iteration, in which every entered request decodes.

        None where some of them would have to wait or go.
        """
        scheduler = self._continuous
        if scheduler is None:
            static = self.scheduler
            return [] if self._since else static.next(self.source.more_to_come).chunks
        limits, pool = scheduler.limits, scheduler.pool
        prompts = self._prompts
        budget = limits.token_budget - (scheduler.lookahead + 1) * len(self._since)
        budget -= sum([slot.prefill_left for slot in prompts])
        if budget < 0:
            return None
        blocks = int(self._ledger.coming(1)[BLOCKS, 0]) if self._since else 0
        if limits.kv_blocks is not None:
            growth = [pool.growth(slot, slot.prefilled + slot.prefill_left) for slot in prompts]
            if not pool.room_for(self, blocks, sum(growth)):
                return None
        pool.hold(self, blocks)
        chunks = []
        for slot in prompts:
            slot.capacity = pool.grow(slot, slot.prefilled + slot.prefill_left)
            chunks.append(Chunk(slot, slot.prefill_left))
        scheduler.admit(budget, chunks)
        return chunks

    def _enter(self, slot: Slot) -> None:
        if self._by_steps:
            slot.rounds = slot.decoder.rounds(None)
            return
        end = self._ledger.add(slot.decoder, slot.job.prompt_tokens)
        self._entered += 1
        heapq.heappush(self._ends, (end, self._entered, slot))
        self._since[slot] = self._ledger.now
        self._counted += slot.index >= self.recorder.skip
        if slot.last_s != self.env.now:
            self._late.append(slot)
        if self._continuous is not None:
            self.scheduler.pool.release(slot)

    # --- running it --------------------------------------------------------------------

    def _steps(self) -> Wait:
        """Some iterations one by one."""
        self.settle()
        self._by_steps, self._prompts = True, []
        running = self.scheduler.running
        for slot in running:
            if not slot.prefill_left:
                slot.rounds = slot.decoder.rounds(None)
        for _ in range(STEPS):
            if self.full or not (yield from self.iterate()):
                return False
        self._by_steps = False
        for slot in running:
            if slot.prefill_left:
                self._prompts.append(slot)
            else:
                self._enter(slot)
        return True

    def _mixed(self, chunks: list[Chunk]) -> Wait:
        """One iteration with prompts in it."""
        env, together = self.env, len(self._since)
        column = self._ledger.coming(1)[:, 0].tolist() if together else None
        if column is None:
            cost = self.cost((), (), chunks)
        else:
            cost = self.cost.of_work(_work(column), together, chunks)
        start, seconds = env.now, cost.total_s
        if not env.skip(seconds):
            yield env.timeout(seconds)
        self._prompts = [slot for slot, tokens in chunks if tokens < slot.prefill_left]
        self._passed(start, column)
        for chunk in chunks:
            self.prefilled(chunk)
        return True

    def _span(self) -> Wait:
        """Iterations until the batch may change, or anything happens beside it."""
        env, ledger, together = self.env, self._ledger, len(self._since)
        count = min(self._ends[0][0] - ledger.now, MANY)
        columns = ledger.coming(count)
        if self.max_tokens is not None or self.scheduler.limits.kv_blocks is not None:
            count = self._allowed(columns)
            columns = columns[:, :count]
        if count > FEW:
            works = Works(*columns[WORK])
            priced = self.cost.of_works(works, together)
            if priced is not None:
                seconds, readings = priced
                start, ahead = env.now, env.peek()
                ends = np.cumsum(np.concatenate(([start], seconds)))[1:]
                free = int(ends.searchsorted(ahead))  # an event at the very end goes first
                self.cost.count(readings, free + 1 if free < count else None)
                if free:
                    env.move(float(ends[free - 1]))
                    self._many_passed(start, ends[:free], seconds[:free], columns[:, :free])
                if free < count:
                    column = ledger.coming(1)[:, 0].tolist()
                    start = env.now
                    yield env.timeout(float(seconds[free]))
                    self._passed(start, column)
                return True
        for _ in range(count):
            column = ledger.coming(1)[:, 0].tolist()
            start, own_s = env.now, self.cost.of_work(_work(column), together, ()).total_s
            if not env.skip(own_s):
                yield env.timeout(own_s)
                self._passed(start, column)
                return True
            self._passed(start, column)
        return True

    def _allowed(self, columns: Ints) -> int:
        """How many of the coming iterations memory and the token limit let through, one or more."""
        count: int = columns.shape[1]
        pool = self.scheduler.pool
        if self._continuous is not None and pool.blocks is not None:
            others = pool.used - pool.held(self)
            count = min(count, int((columns[BLOCKS] + others).searchsorted(pool.blocks, "right")))
        if self.max_tokens is not None:
            wanted = self.max_tokens - self.recorder.tokens
            count = min(count, int(np.cumsum(columns[EMITTED]).searchsorted(wanted)) + 1)
        return max(count, 1)

    # --- what has been -----------------------------------------------------------------

    def _passed(self, start: float, column: list[int] | None) -> None:
        """One iteration, of the entered requests and perhaps of prompts, ended now."""
        recorder, now, pool = self.recorder, self.env.now, self.scheduler.pool
        running = len(self.scheduler.running)
        recorder.iterations += 1
        recorder.busy_s += now - start
        recorder.peak_batch = max(recorder.peak_batch, running)
        recorder.batch.add(start, now, running)
        used = pool.used
        if column is not None and self._continuous is not None:
            used += column[BLOCKS] - pool.held(self)
        recorder.kv_blocks.add(start, now, used)
        if column is None:
            return
        on_time = self._counted - self._gaps(now)
        if on_time:
            recorder.itl.add(now - start, on_time)
        recorder.tokens += column[EMITTED]
        recorder.drafted += column[DRAFTED]
        recorder.accepted += column[ACCEPTED]
        recorder.draft_forwards += column[FORWARDS]
        self._advance(1)

    def _many_passed(self, start: float, ends: Floats, seconds: Floats, columns: Ints) -> None:
        """Iterations of the entered requests alone, ended at these times."""
        recorder, pool = self.recorder, self.scheduler.pool
        count, now = len(ends), float(ends[-1])
        running = len(self.scheduler.running)
        recorder.iterations += count
        recorder.busy_s += now - start
        recorder.peak_batch = max(recorder.peak_batch, running)
        recorder.batch.add(start, now, running)
        if self._continuous is None:
            recorder.kv_blocks.add(start, now, pool.used)
        else:
            others = pool.used - pool.held(self)
            recorder.kv_blocks.add_all(start, ends, columns[BLOCKS] + others)
        if self._late:
            if on_time := self._counted - self._gaps(float(ends[0])):
                recorder.itl.add(float(seconds[0]), on_time)
            seconds = seconds[1:]
        if self._counted:
            recorder.itl.add_all(seconds, self._counted)
        sums = columns.sum(axis=1).tolist()
        recorder.tokens += sums[EMITTED]
        recorder.drafted += sums[DRAFTED]
        recorder.accepted += sums[ACCEPTED]
        recorder.draft_forwards += sums[FORWARDS]
        self._advance(count)

    def _gaps(self, now: float) -> int:
        """Count the gaps of requests that had been held up; returns how many count at all."""
        counted = 0
        for slot in self._late:
            self.recorder.gap(slot, now - slot.last_s)
            counted += slot.index >= self.recorder.skip
        self._late.clear()
        return counted

    def _advance(self, count: int) -> None:
        ledger, ends = self._ledger, self._ends
        ledger.advance(count)
        ended = []
        while ends and ends[0][0] == ledger.now:
            ended.append(heapq.heappop(ends)[2])
        if len(ended) > 1:
            ended.sort(key=self.scheduler.running.index)
        for slot in ended:
            self._finish(slot)

    def _finish(self, slot: Slot) -> None:
        sequence = slot.decoder
        drafted, accepted, _, forwards = sequence.table.totals[:, sequence.count - 1].tolist()
        slot.steps = sequence.at = sequence.count
        slot.drafted, slot.accepted, slot.draft_forwards = drafted, accepted, forwards
        slot.tokens = slot.job.output_tokens
        slot.context = slot.job.prompt_tokens + slot.tokens
        slot.last_s = self.env.now
        del self._since[slot]
        self._counted -= slot.index >= self.recorder.skip
        self.leave(slot)


def _work(column: list[int]) -> Work:
    """The ledger's column as work."""
    return Work(*[column[row] for row in WORK])  # type: ignore[arg-type]
