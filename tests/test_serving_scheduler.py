"""The serving scheduler: admission, chunks, preemption, modes, and what it decides by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Fixed
from policies.registry import parse_serving_policy, policy_names
from policies.rules.base import VerifyRule
from policies.together import StopAtMean
from simulator.serving import ClosedLoop, Limits, Poisson, Scenario, simulate
from simulator.serving.arrivals import Job
from simulator.serving.cost import PassReader, TableCost
from simulator.serving.scheduler import Continuous, Iteration, Scheduler, StaticBatches
from simulator.serving.sequence import EngineState, ServedSequence, Slot, step
from tests.serving import CONSTANT, GRID, SMALL, bernoulli, table_of
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED
from traces.latency.table import LatencyTable


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


class ByBatch(BatchPolicy):
    """Drafts 4 tokens in batches up to 4, none in larger ones; verifies at most 3."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.seen = 0
        self.gamma_max = 4

    def plan(self, loads):
        self.batches.append(len(loads))
        assert all(load.batch == len(loads) for load in loads)
        return 4 if len(loads) <= 4 else 0

    def allot(self, drafts):
        return [min(len(d), 3) for d in drafts]

    def observe(self, outcomes):
        self.seen += len(outcomes)


class KeepDraftingBelow(DraftPolicy):
    """Reads the engine's batch: a single-stream policy may know it."""

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self.gamma_max = 4

    def begin_round(self, load):
        self._on = load.batch <= self.limit

    def keep_drafting(self, draft):
        return self._on and len(draft) < self.gamma_max


def test_budget_charges_lookahead_and_chunks_prompts(monkeypatch):
    trace = bernoulli(0.5, 4, 10, prompt=100)
    limits = Limits(max_batch=4, token_budget=40)
    plans = []
    original = Continuous.next

    def recording(self, more_to_come):
        plan = original(self, more_to_come)
        plans.append((len(plan.decode), sum(c.tokens for c in plan.chunks)))
        return plan

    monkeypatch.setattr(Continuous, "next", recording)
    simulate(
        trace,
        GRID,
        Fixed(4),
        Scenario(ClosedLoop(4), limits, requests=4, warmup=0.0),
        by_iteration=True,
    )
    assert max(5 * decode + prompt for decode, prompt in plans) == 40
    assert any(decode and prompt for decode, prompt in plans), "chunks ride along with decoding"
    assert sum(prompt for _, prompt in plans) == 400


def test_batched_draft_steps_are_those_of_the_longest_draft():
    # Constant passes: an iteration costs longest * draft + verify, whatever the batch.
    trace = bernoulli(0.6, 6, 50, seed=4)
    scenario = Scenario(ClosedLoop(6), Limits(max_batch=6), requests=6, mode="static", warmup=0.0)
    run = simulate(trace, LatencyTable.constant(1.0, 0.01), Fixed(3), scenario)
    iterations = run.requests["rounds"].max()
    expected = iterations * 1.03
    # Only the slowest sequence's last rounds may draft fewer than 3.
    assert expected - 0.09 <= run.simulated_s <= expected + 1e-9


def test_batch_policies_see_the_whole_batch():
    trace = bernoulli(0.7, 30, 40, seed=8)
    run = simulate(trace, CONSTANT, ByBatch(), Scenario(Poisson(2), requests=30, warmup=0.0))
    assert run.recorder.draft_forwards > run.recorder.drafted > 0, "allotted 3 of 4"
    crowd = Scenario(ClosedLoop(16), Limits(max_batch=16), requests=16, mode="static", warmup=0.0)
    busy = simulate(trace, CONSTANT, ByBatch(), crowd)
    assert busy.recorder.drafted == 0
    with pytest.raises(DraftsimError, match="batch policy decides"):
        simulate(trace, CONSTANT, ByBatch(), replace(crowd, mode="static-minimum"))
    with pytest.raises(DraftsimError, match="one stream"):
        simulate(trace, CONSTANT, ByBatch(), replace(crowd, mode="dsi"))


def test_single_stream_policies_may_read_the_batch():
    crowd = Scenario(Poisson(8), Limits(max_batch=8), requests=60, warmup=0.0)
    run = simulate(SMALL, CONSTANT, KeepDraftingBelow(4), crowd)
    total = simulate(SMALL, CONSTANT, Fixed(4), crowd)
    assert 0 < run.recorder.drafted < total.recorder.drafted


def test_who_has_no_room_left_has_no_vote():
    class Near(DraftPolicy):
        """Drafts at short contexts alone."""

        def begin_round(self, load):
            self.near = load.context < 60

        def keep_drafting(self, draft):
            return self.near and len(draft) < 3

    engine, slots, together = EngineState(), [], StopAtMean(Near(), guarded=True)
    for i, prompt in enumerate([10, 100]):
        job = Job(0.0, i, prompt, 40)
        slots.append(Slot(i, job, 0.0, ServedSequence(SMALL, job, 4, engine)))
        together.join(slots[i])
    slots[0].decoder.commit(37)  # a token to go, none of which can be drafted
    assert [outcome.drafted for outcome in step(together, slots)] == [0, 0]


def test_policy_prototypes_stay_untouched():
    policy = ByBatch()
    simulate(SMALL, CONSTANT, policy, Scenario(ClosedLoop(2), requests=4))
    assert policy.batches == []
    assert policy.seen == 0


def test_built_in_batch_policies_serve():
    trace = synthetic_trace(0.7, requests=12, tokens=50, seed=3, concentration=2)
    scenario = Scenario(ClosedLoop(6), Limits(max_batch=6), requests=12, warmup=0.0)
    names = policy_names("batch")
    assert names
    policies = {n: parse_serving_policy(n, max_gamma=trace.max_gamma) for n in names}
    for name, policy in policies.items():
        run = simulate(trace, GRID, policy, scenario)
        assert (run.requests["tokens"] == 50).all(), name
        assert run.recorder.drafted <= run.recorder.draft_forwards


def test_lossy_rules_accept_more_and_say_so():
    trace = synthetic_trace(0.6, requests=6, tokens=60, seed=4, concentration=2)
    scenario = Scenario(ClosedLoop(2), Limits(max_batch=2), requests=6, warmup=0.0)

    class Everything(VerifyRule):
        def accept(self, draft, scores):
            return len(draft)

    exact = simulate(trace, CONSTANT, Fixed(3), scenario)
    lossy = simulate(trace, CONSTANT, Fixed(3), scenario, rule=Everything())
    assert lossy.recorder.accepted == lossy.recorder.drafted
    assert lossy.simulated_s < exact.simulated_s
    assert (exact.fidelity, lossy.fidelity) == ("exact", "approximate")
    with pytest.raises(DraftsimError, match="drop --verify"):
        simulate(trace, CONSTANT, Fixed(3), replace(scenario, mode="pearl"), rule=Everything())


def test_pearl_keeps_both_blocks_of_a_signal_reader_within_the_recorded_tail():
    trace = synthetic_trace(0.6, requests=4, tokens=60, max_gamma=6, concentration=3.0, seed=2)
    scenario = Scenario(ClosedLoop(1), requests=8, mode="pearl", warmup=0.0)
    run = simulate(trace, CONSTANT, parse_serving_policy("svip:gamma_max=6,threshold=5"), scenario)
    assert len(run.requests) == 8
    assert run.recorder.tokens == 8 * 60


@pytest.mark.parametrize("model", ["target", "draft"])
@settings(max_examples=80, deadline=None)
@given(
    batch=st.one_of(st.integers(1, 12), st.floats(0.5, 20)),
    width=st.one_of(st.integers(1, 12), st.floats(0.5, 20)),
    context=st.one_of(st.integers(0, 400), st.floats(0, 900)),
)
def test_scalar_reading_equals_the_table(model, batch, width, context):
    reader = PassReader(GRID, model)
    expected = GRID.estimate(model, "forward", batch=batch, new_tokens=width, context=context)
    assert reader(batch, width, context) == pytest.approx(float(expected.seconds), rel=1e-12)
    names = {INTERPOLATED: "interpolated", EXTRAPOLATED: "extrapolated"}
    assert reader.coverage[0].origin == names.get(int(expected.origin), "measured")


def test_a_run_says_what_was_not_measured():
    alone = simulate(SMALL, GRID, Fixed(4), Scenario(ClosedLoop(1), requests=20)).row()
    assert alone["interpolated"] > 0 == alone["extrapolated"]
    sizes = [(b, n) for b in (1, 2) for n in (1, 5)]
    rates = (("target", 0.1), ("draft", 0.01))
    sparse = table_of([(m, "forward", b, n, 0, s) for m, s in rates for b, n in sizes])
    run = simulate(SMALL, sparse, Fixed(4), Scenario(ClosedLoop(3), requests=20))
    beyond = [c for c in run.coverage if c.origin == "extrapolated" and c.model == "target"]
    assert beyond[0].batch[1] == 3
    assert "target prefill" in run.row()["unpriced"]


@given(st.integers(1, 8), st.integers(0, 6), st.integers(0, 200))
def test_policies_are_told_the_engine_s_own_cost(batch, gamma, context):
    told = TableCost(GRID)(batch, gamma, batch * (gamma + 1), context)
    first = GRID.seconds("draft", "catch_up", batch=batch, context=context)
    later = context + np.arange(1, gamma)
    drafts = GRID.seconds("draft", "forward", batch=batch, context=later).sum()
    drafts += float(first) if gamma else 0.0
    verify = GRID.seconds("target", "forward", batch=batch, new_tokens=gamma + 1, context=context)
    assert told == pytest.approx(drafts + float(verify) + 7e-4 + gamma * 3e-4)
    # A table without the host's own work charges none.
    assert TableCost(CONSTANT)(1, 0, 1, context) == pytest.approx(0.02)


def test_limits_are_the_measured_engines_unless_given() -> None:
    measured = LatencyTable(GRID.cells, {"engine": {"max_batch": 16, "token_budget": 2048}})
    assert Limits.of_engine(GRID) == Limits()
    assert Limits.of_engine(measured) == Limits(16, 2048)
    assert Limits.of_engine(measured, 8, 4096, 500) == Limits(8, 4096, 500)
