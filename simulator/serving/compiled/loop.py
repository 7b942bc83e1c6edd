"""Iterations of one engine over requests that arrive by themselves, in numbers alone.

`run` does what `simulator.serving.engine.Engine.iterate` does, `plan` what
`simulator.serving.scheduler.Continuous.next` does, and in their order: see there for the why.
"""

from __future__ import annotations

import math
from typing import Any

from simulator.serving.compiled.jit import jit
from simulator.serving.compiled.prices import Prompts, iteration_s
from simulator.serving.compiled.state import BINS, FINEST, NOBODY, WIDTH, Arrays
from simulator.serving.cost.work import Work

DONE, MORE, STUCK = range(3)
"""Why `run` came back: every request has left, its log is full, nobody can run."""


@jit
def append(engine: Arrays, whose: int, blocks: int) -> None:
    """Free blocks behind all others; two neighbours that are nobody's are one entry."""
    state, free = engine.state, engine.free
    if state.free and whose == NOBODY == free[state.free - 1].whose:
        free[state.free - 1].blocks += blocks
    elif blocks:
        free[state.free].whose, free[state.free].blocks = whose, blocks
        state.free += 1


@jit
def take(engine: Arrays, blocks: int) -> None:
    """`BlockPool._take`, and entries that have become alike joined."""
    state, free = engine.state, engine.free
    kept, anybodys = 0, False
    for i in range(state.free):
        whose, there = free[i].whose, free[i].blocks
        taken = min(blocks, there)
        blocks -= taken
        there -= taken
        if not there:
            continue
        anybodys = anybodys or whose != NOBODY
        if kept and whose == NOBODY == free[kept - 1].whose:
            free[kept - 1].blocks += there
        else:
            free[kept].whose, free[kept].blocks = whose, there
            kept += 1
    state.free = kept if anybodys else 0


@jit
def found_again(engine: Arrays, slot: int) -> int:
    """`Scheduler._found`."""
    state, request = engine.state, engine.requests[slot]
    kept = 0
    if request.preemptions:
        for i in range(state.free):
            if engine.free[i].whose == slot:
                kept += engine.free[i].blocks
    size = engine.limits.block_size
    return int(min(kept, (request.prefill_left - 1) // size) * size) if kept else 0


@jit
def find(engine: Arrays, slot: int, blocks: int) -> None:
    """`BlockPool.find`."""
    state, left = engine.state, blocks
    for i in range(state.free):
        entry = engine.free[i]
        if entry.whose == slot:
            own = min(left, entry.blocks)
            left -= own
            entry.blocks -= own
            entry.whose = NOBODY
    state.used += blocks
    engine.requests[slot].blocks = blocks
    take(engine, 0)


@jit
def grown(engine: Arrays, slot: int, tokens: int) -> bool:
    """`BlockPool.grow`."""
    limits, state, request = engine.limits, engine.state, engine.requests[slot]
    wanted = max(request.blocks, -(-tokens // limits.block_size))
    more = wanted - request.blocks
    if limits.kv_blocks and state.used + more > limits.kv_blocks:
        return False
    if state.free and more:
        take(engine, more)
    state.used += more
    request.blocks = wanted
    request.capacity = wanted * limits.block_size
    return True


@jit
def room(engine: Arrays, slot: int, tokens: int) -> bool:
    """`Scheduler._room`: the youngest go until there is room, perhaps `slot` itself."""
    state = engine.state
    while not grown(engine, slot, tokens):
        state.running -= 1
        number = engine.seats[state.running].running
        victim = engine.requests[number]
        computed = victim.prefilled if victim.prefill_left else victim.context - 1
        full = computed // engine.limits.block_size if engine.limits.prefix_caching else 0
        if full and not state.free:
            append(engine, NOBODY, engine.limits.kv_blocks - state.used)
        state.used -= victim.blocks
        if full:
            append(engine, NOBODY, victim.blocks - full)
            append(engine, number, full)
        elif state.free:
            append(engine, NOBODY, victim.blocks)
        victim.blocks = victim.capacity = victim.prefilled = 0
        victim.prefill_left = victim.context - (1 if victim.tokens else 0)
        victim.preemptions += 1
        # It came from there, so that there is a place before the head.
        state.head -= 1
        engine.queue[state.head].waits = number
        if number == slot:
            return False
    return True


@jit
def reads(engine: Arrays, slot: int, tokens: int) -> None:
    """The next iteration reads so much of a prompt."""
    seat = engine.seats[engine.state.reads]
    seat.reads, seat.chunk = slot, tokens
    engine.state.reads += 1


@jit
def plan(engine: Arrays) -> None:
    """Who decodes and whose prompts are read next."""
    limits, state, seats, requests = engine.limits, engine.state, engine.seats, engine.requests
    budget, queued, held_back, at = limits.token_budget, state.head, False, 0
    state.decodes = state.reads = 0
    while at < state.running:
        slot = seats[at].running
        request = requests[slot]
        at += 1
        if request.prefill_left:
            tokens = min(request.prefill_left, budget)
            wanted = request.prefilled + tokens
            if tokens > 0 and (wanted <= request.capacity or room(engine, slot, wanted)):
                reads(engine, slot, tokens)
                budget -= tokens
            continue
        if budget < limits.lookahead + 1:
            held_back = True
            break
        peak = request.context + limits.lookahead
        if peak > request.capacity and not room(engine, slot, peak):
            break
        budget -= limits.lookahead + 1
        seats[state.decodes].decodes = slot
        state.decodes += 1
    # Nobody new while one that was admitted has to wait, or lost its place.
    if held_back or state.head != queued:
        return
    while state.head < state.tail and state.running < limits.max_batch and budget > 0:
        slot = engine.queue[state.head].waits
        request = requests[slot]
        found = found_again(engine, slot)
        left = request.prefill_left - found
        tokens = min(left, budget) if limits.chunked_prefill else left
        needed = request.prefill_left if limits.whole_prompts else found + tokens
        blocks = -(-needed // limits.block_size)
        if tokens > budget or (limits.kv_blocks and state.used + blocks > limits.kv_blocks):
            return
        if request.preemptions and state.free:
            find(engine, slot, found // limits.block_size)
        request.prefilled += found
        request.prefill_left = left
        grown(engine, slot, request.prefilled + tokens)
        state.head += 1
        seats[state.running].running = slot
        state.running += 1
        reads(engine, slot, tokens)
        budget -= tokens


@jit
def enter(state: Any, now: float, change: int) -> None:
    """`Recorder.enter`."""
    state.area_s += state.in_system * (now - state.changed_s)
    state.changed_s = now
    state.in_system += change


@jit
def arrive(engine: Arrays, until: float) -> None:
    """Requests come, and ends of the window pass, up to `until`."""
    state, requests, marks = engine.state, engine.requests, engine.marks
    while state.marked < len(marks) and marks[state.marked].at_s <= until:
        marks[state.marked].tokens = state.tokens
        state.marked += 1
    while state.arrived < len(requests) and requests[state.arrived].arrival_s <= until:
        request = requests[state.arrived]
        if request.admissible:
            enter(state, request.arrival_s, 1)
            engine.queue[state.tail].waits = state.arrived
            state.tail += 1
        state.arrived += 1


@jit
def bin_of(seconds: float) -> int:
    """Where `Histogram.add` counts it."""
    return min(math.floor(math.log(max(seconds, 1e-9)) / WIDTH) - FINEST, BINS - 1)


@jit
def leave(engine: Arrays, slot: int) -> None:
    """`Engine.leave`."""
    state, seats, request = engine.state, engine.seats, engine.requests[slot]
    request.around_s = engine.prices.hosts[state.running].request_s
    state.used -= request.blocks
    if state.free:
        append(engine, NOBODY, request.blocks)
    request.blocks = 0
    at = 0
    while seats[at].running != slot:
        at += 1
    state.running -= 1
    for later in range(at, state.running):
        seats[later].running = seats[later + 1].running
    enter(state, state.now, -1)
    state.area_s += request.around_s
    engine.queue[state.finished].left = slot
    state.finished += 1


@jit
def work_of(engine: Arrays) -> Work:
    """What the next rounds of those who decode add up to."""
    context = drafted = longest = drafting = catch_up = draft_context = 0
    rejected = unread = False
    for i in range(engine.state.decodes):
        request = engine.requests[engine.seats[i].decodes]
        outcome = engine.rounds[request.first_round + request.steps]
        context += request.context
        drafted += outcome.drafted
        rejected = rejected or outcome.accepted < outcome.drafted
        if outcome.forwards:
            drafting += 1
            catch_up += outcome.catch_up
            draft_context += request.context
            longest = max(longest, outcome.forwards)
            unread = unread or outcome.accepted < outcome.forwards - 1
    return Work(context, drafted, longest, drafting, catch_up, draft_context, rejected, unread)


@jit
def prompts_of(engine: Arrays) -> Prompts:
    """The prompts that the next iteration reads."""
    tokens, cached, whole = 0, 0, True
    for i in range(engine.state.reads):
        request = engine.requests[engine.seats[i].reads]
        tokens += engine.seats[i].chunk
        cached += request.prefilled
        whole = whole and request.prefill_left == engine.seats[i].chunk
    return Prompts(engine.state.reads, tokens, cached, whole)


@jit
def decoded(engine: Arrays, start: float) -> None:
    """`Engine._decoded`: the rounds have ended."""
    state, seats = engine.state, engine.seats
    on_time = ended = 0
    for i in range(state.decodes):
        slot = seats[i].decodes
        request = engine.requests[slot]
        emitted = engine.rounds[request.first_round + request.steps].emitted
        request.steps += 1
        if request.steps == request.rounds:
            emitted -= request.over
            seats[ended].decodes = slot  # those up to here have been gone through
            ended += 1
        request.context += emitted
        request.tokens += emitted
        state.tokens += emitted
        if request.counted:
            gap_s = state.now - request.last_s
            state.gaps_s += gap_s
            if request.last_s != start:
                engine.gaps[bin_of(gap_s)] += 1
            else:
                on_time += 1
        request.last_s = state.now
    if on_time:
        engine.gaps[bin_of(state.now - start)] += on_time
    for i in range(ended):
        leave(engine, seats[i].decodes)


@jit
def prefilled(engine: Arrays) -> None:
    """`Engine.prefilled`: prompt tokens were read."""
    state = engine.state
    for i in range(state.reads):
        slot = engine.seats[i].reads
        request = engine.requests[slot]
        request.prefilled += engine.seats[i].chunk
        request.prefill_left -= engine.seats[i].chunk
        if request.prefill_left or request.tokens:
            continue
        request.first_s = request.last_s = state.now
        request.tokens = 1
        request.context += 1
        state.tokens += 1
        if not request.rounds:
            leave(engine, slot)


@jit
def run(engine: Arrays) -> tuple[int, int]:
    """Iterations until the log is full or all requests have left: why, and how many."""
    state, log = engine.state, engine.log
    logged = 0
    while logged < len(log):
        plan(engine)
        if not state.decodes and not state.reads:
            if state.arrived == len(engine.requests) or state.running:
                idle = not state.running and state.head == state.tail
                return (DONE if idle else STUCK), logged
            state.now = engine.requests[state.arrived].arrival_s
            arrive(engine, state.now)
            continue
        start = state.now
        state.now += iteration_s(
            engine.prices, engine.seen, work_of(engine), state.decodes, prompts_of(engine),
            engine.seats,
        )  # fmt: skip
        arrive(engine, state.now)
        state.iterations += 1
        state.busy_s += state.now - start
        state.peak_batch = max(state.peak_batch, state.running)
        entry = log[logged]
        entry.start_s, entry.end_s = start, state.now
        entry.running, entry.kv_blocks = state.running, state.used
        logged += 1
        decoded(engine, start)
        prefilled(engine)
    return MORE, logged
