"""The books of the engine by spans: what its requests will do, and what has been.

Who decodes is entered in the ledger when it joins; iterations are booked one by one or a span
at a time, and a request's own numbers when it leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from simulator.serving.cost.slab import Floats
from simulator.serving.cost.together import Alone, Reading
from simulator.serving.cost.work import Chunk
from simulator.serving.engine import Engine
from simulator.serving.scheduler import Continuous
from simulator.serving.sequence import Slot
from simulator.serving.spans.ledger import Ledger, works_of
from simulator.serving.spans.rounds import ACCEPTED, BLOCKS, DRAFTED, EMITTED, FORWARDS, Ints


class Span(NamedTuple):
    """Iterations priced together that may be under way, and how to book them."""

    start: float
    ends: Floats
    seconds: Floats
    columns: Ints
    """Of the ledger; nobody enters it while they are under way."""
    read: Sequence[Reading] | Alone


class BookingEngine(Engine):
    """An engine that books iterations of the requests in its ledger."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._continuous = self.scheduler if isinstance(self.scheduler, Continuous) else None
        self._ledger = Ledger(self.scheduler.lookahead, self.scheduler.limits.block_size)
        self._since: dict[Slot, int] = {}
        """Of every request in the ledger, the iteration before which it was entered."""
        self._ends: list[tuple[int, int, Slot]] = []
        """A heap of (iteration after which it ends, a number, the request)."""
        self._entered = self._counted = 0
        self._late: list[Slot] = []
        """Requests that emitted nothing in the last iteration, though they had begun."""
        self._by_steps = False
        self._under_way: Span | None = None

    @property
    def emitted(self) -> int:
        """Tokens emitted by now, in the span under way too."""
        span = self._under_way
        if span is None:
            return self.recorder.tokens
        ended = span.ends.searchsorted(self.env.now)
        return self.recorder.tokens + int(span.columns[EMITTED, :ended].sum())

    def catch_up(self) -> None:
        """Book the iterations of the span under way that have ended, if a bound cut it off."""
        span = self._under_way
        if span is not None:
            ended = int(span.ends.searchsorted(self.env.now))
            self._book(span, ended, ended + 1)  # the one cut off was begun

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
        self.catch_up()
        now, pool = self._ledger.now, self.scheduler.pool
        pool.release(self)
        for slot, since in self._since.items():
            sequence, passed = slot.decoder, now - since
            if passed:
                _count(slot, passed)
                slot.context = slot.job.prompt_tokens + slot.tokens
                slot.last_s = self.env.now
            if self._continuous is not None:
                # What the last iteration reserved.
                peak = slot.capacity
                if passed:
                    before = int(sequence.table.reached[sequence.at - 1])
                    peak = slot.job.prompt_tokens + before + self.scheduler.lookahead
                slot.capacity = pool.grow(slot, peak)
        self._ledger.clear()
        self._since.clear()
        self._ends.clear()
        self._late.clear()
        self._counted = 0

    def _enter(self, slot: Slot) -> None:
        if self._by_steps:
            slot.rounds = slot.decoder.rounds(None)
            return
        self.add(slot)
        self._counted += slot.index >= self.recorder.skip
        if slot.last_s != self.env.now:
            self._late.append(slot)
        if self._continuous is not None:
            self.scheduler.pool.release(slot)

    def add(self, slot: Slot, after: int = 0) -> None:
        """Add the rounds of a request to the ledger, the first `after` so many iterations."""
        end = self._ledger.add(slot.decoder, slot.job.prompt_tokens, after)
        self._entered += 1
        heapq.heappush(self._ends, (end, self._entered, slot))
        self._since[slot] = self._ledger.now + after

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

    def _book(self, span: Span, ended: int, begun: int) -> None:
        """The first iterations of a span have been; nothing of it is under way any more."""
        self._under_way = None
        self._count_read(span, begun)
        if ended:
            self._many_passed(
                span.start, span.ends[:ended], span.seconds[:ended], span.columns[:, :ended]
            )

    def _count_read(self, span: Span, begun: int) -> None:
        cost, read, whole = self.cost.together, span.read, begun >= len(span.ends)
        if isinstance(read, Alone):
            if whole:
                cost.count_alone(read)
                return
            priced = cost.seconds(works_of(span.columns), 1)
            read = priced[1] if priced is not None else []
        cost.count(read, None if whole else begun)

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
        self._ledger.advance(count)
        for slot in self.ended(self._ledger.now):
            self._finish(slot)

    def ended(self, iteration: int) -> list[Slot]:
        """Those whose last iteration was the one before `iteration`, in order of admission."""
        ends, ended = self._ends, []
        while ends and ends[0][0] == iteration:
            ended.append(heapq.heappop(ends)[2])
        if len(ended) > 1:
            ended.sort(key=self.scheduler.running.index)
        return ended

    def _finish(self, slot: Slot) -> None:
        count_to_end(slot, self.env.now)
        del self._since[slot]
        self._counted -= slot.index >= self.recorder.skip
        self.leave(slot)


def count_to_end(slot: Slot, now: float) -> None:
    """All rounds of the request have been."""
    _count(slot, slot.decoder.count - slot.decoder.at)
    slot.tokens = slot.job.output_tokens
    slot.context = slot.job.prompt_tokens + slot.tokens
    slot.last_s = now


def _count(slot: Slot, passed: int) -> None:
    """So many rounds of the request have been."""
    drafted, accepted, emitted, forwards = slot.decoder.pass_by(passed)
    slot.steps += passed
    slot.drafted += drafted
    slot.accepted += accepted
    slot.tokens += emitted
    slot.draft_forwards += forwards
