"""The engine as SimPy processes: requests arrive, iterations run, requests leave.

One event per arrival, and one per iteration during which anything else is to happen.  A
round's outcome is decided when its iteration begins and takes effect when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core import Round
from policies.rules.base import VerifyRule
from policies.together import Together
from simulator.serving.arrivals import Job
from simulator.serving.cost import Chunk, Seconds
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.scheduler import Iteration, Scheduler
from simulator.serving.sequence import Slot, step
from simulator.serving.source import Events, Replica
from traces.errors import DraftsimError


@dataclass(eq=False)
class EventEngine(Replica):
    """One model replica: a scheduler, a policy's rounds, and what they cost."""

    scheduler: Scheduler
    together: Together
    rule: VerifyRule | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._idle = True

    def submit(self, job: Job) -> None:
        """Queue a request, or count it as rejected if it could never finish."""
        if not self.scheduler.admissible(job.prompt_tokens, job.output_tokens):
            self.recorder.rejected += 1
            self.source.completed()
            return
        self.scheduler.arrive(self.slot_of(job, self.rule), busy=not self._idle)
        self.wake()

    def run(self) -> Events:
        """Iterate until every request has left."""
        env, state = self.env, self.state
        while True:
            plan = self.scheduler.next(self.source.more_to_come)
            decode, chunks = plan
            self._idle = not decode and not chunks
            if self._idle:
                if self.idle_for_good():
                    return
                yield self.sleep()
                continue
            state.batch = len(decode) or 1
            rounds = step(self.together, decode) if decode else []
            self.recorder.length_changes = self.together.changes
            if self.scheduler.drafts_ahead:
                state.scheduled = len(decode) + len(chunks)
            cost = self.cost(decode, rounds, chunks)
            start = env.now
            seconds = cost.total_s
            if not env.skip(seconds):
                yield env.timeout(seconds)
            self._account(start, plan, rounds, cost)
            if rounds:
                self._decoded(start, decode, rounds)
            for chunk in chunks:
                self.prefilled(chunk)

    @property
    def unfinished(self) -> Sequence[Slot]:
        """Requests that wait or run."""
        return [*self.scheduler.waiting, *self.scheduler.running]

    def idle_for_good(self) -> bool:
        """Return True if no request will come any more and nothing is planned for the next
        iteration.

        Raises DraftsimError where requests wait and none of them could ever run.
        """
        scheduler, source = self.scheduler, self.source
        if source.exhausted and not scheduler.waiting:
            return True
        # Who still thinks wakes the engine, with another request or to say that none is left.
        last = source.exhausted and not source.more_to_come
        if scheduler.running or (scheduler.waiting and last):
            raise DraftsimError("the scheduler found nothing to run with requests waiting")
        return False

    def _account(self, start: float, plan: Iteration, rounds: list[Round], cost: Seconds) -> None:
        recorder, now = self.recorder, self.env.now
        recorder.iterations += 1
        recorder.busy_s += now - start
        running = len(self.scheduler.running)
        recorder.peak_batch = max(recorder.peak_batch, running)
        recorder.batch.add(start, now, running)
        recorder.kv_blocks.add(start, now, self.scheduler.pool.used)
        if self.timeline is not None:
            _draw(self.timeline, start, plan, rounds, cost)

    def _decoded(self, start: float, slots: list[Slot], rounds: list[Round]) -> None:
        recorder, now = self.recorder, self.env.now
        on_time = 0
        ended: list[Slot] = []
        for slot, outcome in zip(slots, rounds, strict=True):
            recorder.count_round(slot, outcome)
            if slot.last_s != start:
                recorder.gap(slot, now - slot.last_s)
            elif slot.index >= recorder.skip:
                on_time += 1
            slot.last_s = now
            if slot.decoder.ended:
                ended.append(slot)
        if on_time:
            recorder.itl.add(now - start, on_time)
        for slot in ended:
            self.leave(slot)

    def prefilled(self, chunk: Chunk) -> None:
        """Note that prompt tokens were processed; the pass that ends a prompt emits the first
        token.
        """
        slot = chunk.slot
        slot.prefilled += chunk.tokens
        slot.prefill_left -= chunk.tokens
        if slot.prefill_left or slot.tokens:
            return
        self.emit_first(slot)
        self.together.join(slot)
        slot.decoder.declare(self.together.reads)
        if slot.decoder.ended:
            self.together.leave(slot)
            self.leave(slot)

    def leave(self, slot: Slot) -> None:
        """Note that a request has emitted its last token."""
        around_s = self.cost.hosts.at(len(self.scheduler.running)).request_s
        self.scheduler.finish(slot)
        self.recorder.leave(slot, self.env.now, around_s)
        if self.rule is not None:
            self.rule.end_request()
        self.source.completed(around_s)


def _draw(
    timeline: Timeline, start: float, plan: Iteration, rounds: list[Round], cost: Seconds
) -> None:
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    wasted = sum(r.draft_forwards for r in rounds) - accepted
    prompts = ["prefill"] if plan.chunks else []
    sizes = {"batch": len(rounds), "prompt_tokens": sum(c.tokens for c in plan.chunks)}
    label = " + ".join((["draft"] if accepted + wasted else []) + prompts)
    timeline.device(1, "draft model", start, cost.draft_s, label, **sizes, drafted=drafted)
    label = " + ".join(([("verify" if drafted else "decode")] if rounds else []) + prompts)
    timeline.device(
        0, "target model", start + cost.draft_s, cost.target_s, label,
        **sizes, drafted=drafted, accepted=accepted, wasted=wasted,
    )  # fmt: skip
    timeline.device(2, "host", start + cost.draft_s + cost.target_s, cost.host_s, "host")
    timeline.tokens(start, cost.total_s, accepted, wasted)
    for slot, outcome in zip(plan.decode, rounds, strict=True):
        lost = outcome.draft_forwards - outcome.accepted
        timeline.round(slot.index, start, cost.total_s, outcome, lost)
    for slot, tokens in plan.chunks:
        if not slot.prefilled:
            since = max(slot.arrival_s, slot.last_s)
            label = "pre-empted" if slot.preemptions else "waiting"
            timeline.request(slot.index, since, start - since, label)
        timeline.request(slot.index, start, cost.total_s, "prefill", tokens=tokens)
