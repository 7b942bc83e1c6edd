"""Spans through a closed loop, where iterations alone decide who comes and who goes.

Whoever sends the next request as soon as an answer is there leaves nothing to the clock: the
iteration that ends a request lets another in.  So thousands of iterations are planned, with all
requests that come and go between them, and priced together.
"""

from __future__ import annotations

import math

import numpy as np

from simulator.serving.cost.prompts import NO_PROMPTS
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.work import Chunk
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Continuous
from simulator.serving.sequence import Slot
from simulator.serving.spans.books import count_to_end
from simulator.serving.spans.engine import FEW, MANY, SpanEngine, Wait
from simulator.serving.spans.ledger import work_of_column, works_of
from simulator.serving.spans.plan import Gone, Part, Plan, PromptsOf, each
from simulator.serving.spans.planned import PlannedEngine
from simulator.serving.spans.rounds import ACCEPTED, BLOCKS, DRAFTED, EMITTED, FORWARDS, Ints
from traces.latency.schema import SERVER
from traces.latency.table import LatencyTable

AHEAD = 4096
"""Iterations planned at a time, about."""


def keeps_no_clock(scenario: Scenario, latency: LatencyTable) -> bool:
    """Whether a `LoopEngine` may serve: nothing passes between an answer and the next request,
    memory and tokens have no bound, and any prompt may begin before it can end."""
    arrivals, limits = scenario.arrivals, scenario.limits
    return (
        scenario.mode == "continuous" and scenario.replicas == 1 and scenario.max_tokens is None
        and arrivals.concurrency is not None and not arrivals.think_s
        and not any(latency.has(SERVER, phase) for phase in ("request", "apart"))
        and limits.kv_blocks is None and limits.chunked_prefill
    )  # fmt: skip


class LoopEngine(SpanEngine):
    """The engine by spans, which runs through arrivals and departures that it can foresee."""

    def turn(self) -> Wait:
        """As far as can be planned, or else what comes next."""
        scheduler = self._continuous
        if scheduler is not None and not self._late and self.env.peek() == math.inf:
            before = self._ledger.now
            self._run_ahead(scheduler)
            if self._ledger.now > before:
                return True
        return (yield from super().turn())

    # --- what will be ------------------------------------------------------------------

    def _run_ahead(self, scheduler: Continuous) -> None:
        """As many iterations as may be, in each of which every entered request decodes."""
        scheduler.pool.hold(self, 0)
        plan = Plan(len(self._since), self._counted)
        while plan.length < AHEAD:
            budget = self.budget(scheduler)
            if budget < 0:
                break
            chunks: list[Chunk] = []
            if self._prompts or scheduler.waiting:
                chunks = self.chunks(scheduler, budget)
            if not chunks and not self._ends:
                break
            if self.lengths_change():
                self._run_through(plan)
                self.change_lengths()
                plan = Plan(len(self._since), self._counted)
            together = len(self._since)
            if chunks:
                prompts, blocks = self.cost.prompts(chunks), scheduler.pool.used
                plan.prompts.append(PromptsOf(plan.length, prompts, len(chunks), blocks))
                self._prompts = [slot for slot, tokens in chunks if tokens < slot.prefill_left]
                plan.length += 1
            else:
                self._decodes(plan)
            self.runs(together + len(chunks))
            for slot in self.ended(self._ledger.now + plan.length):
                del self._since[slot]
                plan.decoding(-1, slot.index >= self.recorder.skip)
                self._goes(plan, slot)
            for slot, tokens in chunks:
                slot.prefilled += tokens
                slot.prefill_left -= tokens
                if not slot.prefill_left:
                    self._begins(plan, slot)
        self._run_through(plan)

    def _decodes(self, plan: Plan) -> None:
        """Until the next request ends."""
        at = self._ledger.now + plan.length
        count = min(self._ends[0][0] - at, MANY) if self.lengths_last() else 1
        if len(self._since) == 1:
            [(slot, since)] = self._since.items()
            plan.alone.append(Part(plan.length, count, slot, at - since))
        plan.length += count

    def _begins(self, plan: Plan, slot: Slot) -> None:
        slot.tokens = 1
        slot.context += 1
        plan.began.append((plan.length - 1, slot))
        if slot.decoder.ended:
            self._goes(plan, slot)
            return
        self.scheduler.pool.release(slot)
        plan.decoding(1, slot.index >= self.recorder.skip)
        self.add(slot, plan.length)

    def _goes(self, plan: Plan, slot: Slot) -> None:
        self.scheduler.finish(slot)
        job, instead = self.source.take(), None
        if job is not None:
            instead = Slot(job.number, job, math.nan, self.sequence(job))
            self.scheduler.waiting.append(instead)
        plan.gone.append(Gone(plan.length - 1, slot, instead, len(plan.began)))

    # --- when it will be ---------------------------------------------------------------

    def _run_through(self, plan: Plan) -> None:
        """Let it happen."""
        if not plan.length:
            return
        recorder, start, length = self.recorder, self.env.now, plan.length
        self._ledger.make_room(length)
        columns, together, counted = self._ledger.coming(length), plan.together, plan.counted
        seconds = self._seconds(plan, columns, together)
        ends = np.cumsum(np.concatenate(([start], seconds)))[1:]
        running, blocks = together.copy(), columns[BLOCKS].copy()
        for at, _, count, held in plan.prompts:
            running[at] += count
            blocks[at] += held
        recorder.iterations += length
        recorder.busy_s += float(ends[-1]) - start
        recorder.peak_batch = max(recorder.peak_batch, int(running.max()))
        recorder.kv_blocks.add_all(start, ends, blocks)
        times = ends.tolist()
        since = start
        for at in [*np.flatnonzero(np.diff(running)).tolist(), length - 1]:
            recorder.batch.add(since, times[at], int(running[at]))
            since = times[at]
        for of in np.unique(counted[counted > 0]).tolist():
            recorder.itl.add_all(seconds[counted == of], of)
        self._happen(plan, times, (recorder.tokens + np.cumsum(columns[EMITTED])).tolist())
        sums = columns.sum(axis=1).tolist()
        recorder.tokens += sums[EMITTED] + len(plan.began)
        recorder.drafted += sums[DRAFTED]
        recorder.accepted += sums[ACCEPTED]
        recorder.draft_forwards += sums[FORWARDS]
        self._counted = sum(slot.index >= recorder.skip for slot in self._since)
        self._ledger.advance(length)
        self.env.move(times[-1])

    def _happen(self, plan: Plan, times: list[float], emitted: list[int]) -> None:
        """Requests come and go; `times` and `emitted` are after each iteration, the latter without
        the first tokens of requests."""
        recorder = self.recorder
        for iteration, slot in plan.began:
            slot.first_s = slot.last_s = times[iteration]
        for iteration, slot, instead, begun in plan.gone:
            now = times[iteration]
            count_to_end(slot, now)
            recorder.leave(slot, now)
            self.source.advance(1)
            if instead is not None:
                instead.arrival_s = now
                recorder.arrive(instead.index, now, emitted[iteration] + begun)
                recorder.enter(now, 1)
                recorder.carried += instead.job.prompt_tokens

    def _seconds(self, plan: Plan, columns: Ints, together: Ints) -> Floats:
        """(length,) seconds of the iterations."""
        seconds = np.empty(plan.length)
        left = np.ones(plan.length, bool)
        for first, count, slot, passed in plan.alone:
            part = slice(first, first + count)
            priced = self.alone(slot, passed, columns[:, part]) if count > FEW else None
            if priced is not None:
                self.cost.together.count_alone(priced)
                seconds[part], left[part] = priced.seconds, False
        shared = np.array([p.iteration for p in plan.prompts], int)
        left[shared] = False
        for size in np.unique(together[left]).tolist():
            own = (left & (together == size)).nonzero()[0]
            seconds[own] = self._decoding_s(columns[:, own], size)
        sizes = together[shared]
        for size in np.unique(sizes).tolist():
            which = (sizes == size).nonzero()[0]
            prompts = [plan.prompts[i] for i in which.tolist()]
            own = shared[which]
            seconds[own] = self._mixed_s(columns[:, own], size, prompts)
        return seconds

    def _decoding_s(self, columns: Ints, size: int) -> Floats | list[float]:
        cost, works = self.cost, works_of(columns)
        priced = cost.together.seconds(works, size) if columns.shape[1] > FEW else None
        if priced is None:
            each_of = columns.T.tolist()
            return [cost.beside(work_of_column(c), size, NO_PROMPTS).total_s for c in each_of]
        cost.together.count(priced[1])
        return priced[0]

    def _mixed_s(self, columns: Ints, size: int, prompts: list[PromptsOf]) -> Floats | list[float]:
        cost = self.cost
        if not size:
            return [cost.prompts_alone(p.prompts, p.number).total_s for p in prompts]
        if len(prompts) > FEW:
            priced = cost.together.beside(works_of(columns), size, each(prompts))
            if priced is not None:
                cost.together.count(priced[1])
                return priced[0]
        pairs = zip(columns.T.tolist(), prompts, strict=True)
        return [cost.beside(work_of_column(c), size, p.prompts).total_s for c, p in pairs]


class PlannedLoopEngine(LoopEngine, PlannedEngine):
    """The same where the number of requests decides a length for all of them."""
