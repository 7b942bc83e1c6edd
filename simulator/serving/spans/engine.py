"""The engine by spans: an event where the batch changes, not one per iteration.

It runs what `simulator.serving.engine.Engine` runs, to rounding, and goes iteration by
iteration itself where single requests matter: where one has to wait for the token budget,
or loses its place for want of memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from weakref import ref

import numpy as np
import simpy

from simulator.serving.arrivals import Job
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.together import Alone, Reading
from simulator.serving.cost.work import Chunk
from simulator.serving.scheduler import Continuous
from simulator.serving.sequence import Sequenced, Slot
from simulator.serving.source import Events
from simulator.serving.spans.books import BookingEngine, Span
from simulator.serving.spans.ledger import work_of_column, works_of
from simulator.serving.spans.rounds import BLOCKS, EMITTED, Ints, Replayed

FEW, MANY = 6, 512
"""Iterations that are quicker priced one by one, and those priced at a time."""
STEPS = 16
"""Iterations run one by one before spans are tried again."""

Wait = Generator[simpy.Event, Any, bool]


class SpanEngine(BookingEngine):
    """One model replica whose requests' rounds are known beforehand: `replays` holds them.

    It draws no timeline, and its costs are those that totals decide (`by_totals`).
    """

    def __init__(self, *args: Any, replays: Replayed, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replays = replays
        self._prompts: list[Slot] = []
        self._waits: simpy.Process | None = None
        """This engine's process while it waits for a span's end, which may come earlier."""

    def sequence(self, job: Job) -> Sequenced:
        """The request's rounds, replayed already."""
        return self._replays.sequence(job)

    def run(self) -> Events:
        """As the engine that goes iteration by iteration, in fewer events."""
        while not self.full:
            if not (yield from self.turn()):
                return

    def turn(self) -> Wait:
        """Whatever comes next: a span, an iteration with prompts, or the wait for a request.

        False once no request will come.
        """
        chunks = self._plan()
        if chunks is None:
            return (yield from self._steps())
        if chunks:
            return (yield from self._mixed(chunks))
        if self._since:
            return (yield from self._span())
        if self.idle_for_good():
            return False
        yield self.sleep()
        return True

    def wake(self) -> None:
        """Look at the queue again: after this iteration of a span, if that lets anybody in."""
        waits, scheduler = self._waits, self._continuous
        # Who finds others waiting or every seat taken changes nothing before the span's end.
        if (
            waits is not None and scheduler is not None and len(scheduler.waiting) == 1
            and len(scheduler.running) < scheduler.limits.max_batch
        ):  # fmt: skip
            self._waits = None
            waits.interrupt()
        super().wake()

    # --- what to run -------------------------------------------------------------------

    def _plan(self) -> list[Chunk] | None:
        """Prompt chunks of the next iteration, in which every entered request decodes.

        None where some of them would have to wait or go.
        """
        scheduler = self._continuous
        if scheduler is None:
            static = self.scheduler
            return [] if self._since else static.next(self.source.more_to_come).chunks
        pool, prompts = scheduler.pool, self._prompts
        budget = self.budget(scheduler)
        if budget < 0:
            return None
        blocks = int(self._ledger.coming(1)[BLOCKS, 0]) if self._since else 0
        if scheduler.limits.kv_blocks is not None:
            growth = [pool.growth(slot, slot.prefilled + slot.prefill_left) for slot in prompts]
            if not pool.room_for(self, blocks, sum(growth)):
                return None
        pool.hold(self, blocks)
        return self.chunks(scheduler, budget)

    def budget(self, scheduler: Continuous) -> int:
        """Tokens of the next iteration that its decoding requests and begun prompts leave."""
        budget = scheduler.limits.token_budget - (scheduler.lookahead + 1) * len(self._since)
        return budget - sum([slot.prefill_left for slot in self._prompts])

    def chunks(self, scheduler: Continuous, budget: int) -> list[Chunk]:
        """What is left of begun prompts, and of those that `budget` lets in."""
        chunks = []
        for slot in self._prompts:
            slot.capacity = scheduler.pool.grow(slot, slot.prefilled + slot.prefill_left)
            chunks.append(Chunk(slot, slot.prefill_left))
        scheduler.admit(budget, chunks)
        return chunks

    def lengths_change(self) -> bool:
        """Whether requests now decode otherwise than entered; `change_lengths` sees to it."""
        return False

    def lengths_last(self) -> bool:
        """Whether they do not, after an iteration of those that decode now and nobody else."""
        return True

    def change_lengths(self) -> None:
        """Enter all requests anew, at the lengths that were last asked for."""

    # --- running it --------------------------------------------------------------------

    def _steps(self) -> Wait:
        """Some iterations one by one."""
        self.settle()
        self._by_steps, self._prompts = True, []
        running = self.scheduler.running
        for slot in running:
            if not slot.prefill_left:
                slot.rounds = slot.decoder.rounds(None)
        steps = 0
        # Which block is taken when matters as long as a pre-empted request may find some again.
        while steps < STEPS or self.scheduler.pool.keeps:
            steps += 1
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
        self.runs(together + len(chunks))
        column = self._ledger.coming(1)[:, 0].tolist() if together else None
        if column is None:
            cost = self.cost((), (), chunks)
        else:
            cost = self.cost.of_work(work_of_column(column), together, chunks)
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
        count = min(self._ends[0][0] - ledger.now, MANY) if self.lengths_last() else 1
        self.runs(together)
        columns = ledger.coming(count)
        if self.max_tokens is not None or self.scheduler.limits.kv_blocks is not None:
            count = self._allowed(columns)
            columns = columns[:, :count]
        if count > FEW:
            priced = self._priced(columns, together)
            if priced is not None:
                seconds, read = priced
                ends = np.cumsum(np.concatenate(([env.now], seconds)))[1:]
                span = Span(env.now, ends, seconds, columns, read)
                if ends[-1] < env.peek():
                    env.move(float(ends[-1]))
                else:
                    self._under_way = span
                    count = yield from self._wait(ends)
                self._book(span, count, count)
                return True
        for _ in range(count):
            column = ledger.coming(1)[:, 0].tolist()
            start, own_s = env.now, self.cost.of_work(work_of_column(column), together, ()).total_s
            if not env.skip(own_s):
                yield env.timeout(own_s)
                self._passed(start, column)
                return True
            self._passed(start, column)
        return True

    def _priced(
        self, columns: Ints, together: int
    ) -> tuple[Floats, Sequence[Reading] | Alone] | None:
        if together > 1:
            return self.cost.together.seconds(works_of(columns), together)
        [(slot, since)] = self._since.items()
        alone = self.alone(slot, self._ledger.now - since, columns)
        return None if alone is None else (alone.seconds, alone)

    def alone(self, slot: Slot, passed: int, columns: Ints) -> Alone | None:
        """Prices iterations of one entered request by itself, after `passed` of its rounds."""
        cost, sequence = self.cost, slot.decoder
        first = sequence.at + passed
        part = slot.job.prompt_tokens, first, first + columns.shape[1]
        key = ref(cost.latency), cost.reads, cost.speculates, part
        return cost.together.alone(lambda: works_of(columns), sequence.table.alone, key)

    def _wait(self, ends: Floats) -> Generator[simpy.Event, Any, int]:
        """Until the iterations have ended, or the one in which `wake` cut them off.

        Returns how many ended.
        """
        env = self.env
        self._waits = env.active_process
        try:
            yield env.at(float(ends[-1]))
        except simpy.Interrupt:
            last = int(ends.searchsorted(env.now))
            yield env.at(float(ends[last]))
            return last + 1
        self._waits = None
        return len(ends)

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
