"""The scheduler, iteration by iteration: budgets, seats, and the requests that give up memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from simulator.serving.scheduler import Continuous, Iteration, Limits, Scheduler, StaticBatches
from simulator.serving.sequence import Slot


def waiting(scheduler: Scheduler, *prompts: int, output: int = 4) -> list[Slot]:
    """Return requests with prompts of these lengths in tokens, queued in this order."""
    jobs: list[Any] = [SimpleNamespace(prompt_tokens=n, output_tokens=output) for n in prompts]
    slots = [Slot(i, job, 0.0, None) for i, job in enumerate(jobs)]
    scheduler.waiting.extend(slots)
    return slots


def run(scheduler: Scheduler, more_to_come: bool = False) -> Iteration:
    """One iteration, after which prompts are read and every request has a token more."""
    plan = scheduler.next(more_to_come)
    for slot, tokens in plan.chunks:
        slot.prefilled += tokens
        slot.prefill_left -= tokens
    for slot in [*plan.decode, *(c.slot for c in plan.chunks if not c.slot.prefill_left)]:
        slot.tokens += 1
        slot.context += 1
    return plan


def chunks(plan: Iteration) -> list[tuple[int, int]]:
    return [(chunk.slot.index, chunk.tokens) for chunk in plan.chunks]


def decoding(plan: Iteration) -> list[int]:
    return [slot.index for slot in plan.decode]


def test_the_youngest_gives_its_memory_to_the_oldest_and_comes_back_first() -> None:
    # A block a prompt of four tokens, and one more to grow into.
    scheduler = Continuous(Limits(max_batch=4, kv_blocks=4, block_size=4), lookahead=0)
    slots = waiting(scheduler, 4, 4, 4)
    assert chunks(run(scheduler)) == [(0, 4), (1, 4), (2, 4)]
    late = waiting(scheduler, 1)[0]
    assert decoding(run(scheduler)) == [0, 1]
    assert [slot.preemptions for slot in slots] == [0, 0, 1]
    assert list(scheduler.waiting) == [slots[2], late]
    assert scheduler.pool.used == 4
    # Its prompt is read again; the token that it had emitted was in no cache.
    assert (slots[2].prefill_left, slots[2].prefilled, slots[2].capacity) == (4, 0, 0)
    slots[2].context += 2  # as if it had gone on
    scheduler._preempt(slots[1])
    assert slots[1].prefill_left == slots[1].context - 1
    assert list(scheduler.waiting) == [slots[1], slots[2], late]


def test_who_was_stopped_within_its_prompt_reads_all_of_it_again() -> None:
    scheduler = Continuous(Limits(token_budget=6, kv_blocks=3, block_size=4), lookahead=0)
    first, second = waiting(scheduler, 4, 8)
    assert chunks(run(scheduler)) == [(0, 4), (1, 2)]
    # Of three blocks none is left for the rest of the prompt.
    assert (decoding(plan := run(scheduler)), chunks(plan)) == ([0], [])
    assert (second.preemptions, second.prefill_left, second.prefilled) == (1, 8, 0)
    assert first.preemptions == 0


def test_each_decoding_request_takes_its_look_ahead_of_the_budget() -> None:
    scheduler = Continuous(Limits(max_batch=8, token_budget=7), lookahead=2)
    waiting(scheduler, 1, 1, 1)
    run(scheduler)
    waiting(scheduler, 1)
    plan = run(scheduler)
    # Three tokens each: two fit into seven, and nobody new passes the one that waits.
    assert (decoding(plan), chunks(plan)) == ([0, 1], [])
    assert len(scheduler.waiting) == 1


def test_prompts_share_the_budget_in_pieces() -> None:
    scheduler = Continuous(Limits(token_budget=8), lookahead=0)
    waiting(scheduler, 6, 6)
    assert chunks(run(scheduler)) == [(0, 6), (1, 2)]
    assert chunks(run(scheduler)) == [(1, 4)]


def test_seats_are_taken_in_order_of_arrival() -> None:
    scheduler = Continuous(Limits(max_batch=2), lookahead=0)
    slots = waiting(scheduler, 3, 1, 1)
    assert chunks(run(scheduler)) == [(0, 3), (1, 1)]
    assert (decoding(plan := run(scheduler)), chunks(plan)) == ([0, 1], [])
    scheduler.finish(slots[0])
    assert (decoding(plan := run(scheduler)), chunks(plan)) == ([1], [(2, 1)])


def test_a_plan_made_ahead_sees_arrivals_and_ends_one_iteration_later() -> None:
    limits = Limits(max_batch=2, kv_blocks=4, block_size=4, async_scheduling=True)
    scheduler = Continuous(limits, lookahead=0)
    slots = waiting(scheduler, 4, 3)
    assert chunks(run(scheduler)) == [(0, 4), (1, 3)]
    job: Any = SimpleNamespace(prompt_tokens=2, output_tokens=4)
    scheduler.arrive(Slot(2, job, 0.0, None), busy=True)
    # The second request ends; its seat and block are free to the plan after the next.
    scheduler.finish(slots[1])
    assert scheduler.pool.used == 2
    assert (decoding(plan := run(scheduler)), chunks(plan)) == ([0], [])
    assert scheduler.pool.used == 2
    assert (decoding(plan := run(scheduler)), chunks(plan)) == ([0], [(2, 2)])


def test_a_plan_made_ahead_with_nothing_to_run_waits_for_what_runs() -> None:
    scheduler = Continuous(Limits(max_batch=1, async_scheduling=True), lookahead=0)
    slots = waiting(scheduler, 3)
    run(scheduler)
    job: Any = SimpleNamespace(prompt_tokens=2, output_tokens=4)
    scheduler.arrive(Slot(1, job, 0.0, None), busy=True)
    scheduler.finish(slots[0])
    assert chunks(run(scheduler)) == [(1, 2)]
    idle = Continuous(Limits(async_scheduling=True), lookahead=0)
    idle.arrive(Slot(0, job, 0.0, None), busy=False)
    assert chunks(run(idle)) == [(0, 2)]


def test_a_static_batch_starts_full_or_with_the_last_and_is_joined_by_nobody() -> None:
    scheduler = StaticBatches(Limits(max_batch=2), lookahead=0)
    slots = waiting(scheduler, 3)
    assert run(scheduler, more_to_come=True) == ([], [])
    slots += waiting(scheduler, 5, 1)
    assert chunks(run(scheduler, more_to_come=True)) == [(0, 3), (0, 5)]
    scheduler.finish(slots[0])
    assert run(scheduler, more_to_come=True).decode == [slots[1]]
    scheduler.finish(slots[1])
    assert run(scheduler, more_to_come=True) == ([], []), "one alone is no full batch"
    assert chunks(run(scheduler, more_to_come=False)) == [(1, 1)]


def test_a_static_batch_holds_what_its_requests_will_need() -> None:
    scheduler = StaticBatches(Limits(max_batch=3, kv_blocks=5, block_size=4), lookahead=2)
    waiting(scheduler, 2, 2, 2, output=4)  # eight tokens, two blocks each
    assert chunks(run(scheduler)) == [(0, 2), (1, 2)]
    assert scheduler.pool.used == 4
