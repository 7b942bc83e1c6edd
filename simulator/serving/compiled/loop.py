"""The serving loop in machine code: requests, iterations and their seconds, over arrays.

`run` does what `simulator.serving.run.EventEngine`, `simulator.serving.source.RequestSource` and
`simulator.serving.scheduler` do with SimPy's events, in their order; `iteration_s` does what
`simulator.serving.cost` does.  Those say why; the tests hold the two together to 1e-9.  All
functions are in one file because numba's cache on disk notices changes of this file alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

from policies.arrays import Floats
from simulator.machine_code import Function, compiled
from simulator.serving.compiled.arrays import (
    BINS,
    FINEST,
    NOBODY,
    NOWHERE,
    POINTS,
    WIDTH,
    Arrays,
    LoopPrices,
    Records,
)
from simulator.serving.cost import (
    ALONG,
    DRAFT_PREFILL,
    FIRST,
    LATER,
    MIXED,
    TARGET,
    TARGET_PREFILL,
    WITH_PROMPTS,
    Work,
)
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED

DONE, CUT, PAUSE, MORE, ROUTE, LOST, STUCK = range(7)
"""Why `run` returns: no request is left; the time is up; it has done `STEPS` events; it needs more
requests; a router has to choose; a draft leaves the recording; no request can run."""
STEPS = 1 << 16
"""Events between two looks at the outside."""
BEGUN, SLEEPS, OVER = -3, -2, -1
"""Results of `begin`, which also returns `BLOCKED`, or a request whose draft is not recorded."""
BLOCKED = -4


class PromptChunks(NamedTuple):
    """The prompt chunks of an iteration, added up."""

    number: int
    tokens: int
    cached: int
    whole: bool
    """True if every one of them ends in this iteration."""


def jit(function: Function) -> Function:
    """Compile `function` when it is first called; the machine code is kept on disk.

    Nothing here allocates.  Without numba's runtime (``_nrt``) no reference to an array is counted,
    which would take as long again as the loop itself.
    """
    made: Any = compiled(function, _nrt=False)
    if made.stats.cache_path:
        drop_stale(made.stats.cache_path)
        # Before it looks on disk numba loads all that it can compile, which takes ten times as long
        # as to read machine code.  What is not there loads it when it is compiled; what is there
        # needs none of it, as it does without the runtime.
        kept = made._cache
        kept.load_overload = getattr(kept, "_load_overload", kept.load_overload)
    return cast("Function", made)


@functools.cache
def drop_stale(folder: str) -> None:
    """Delete the machine code in `folder` that is older than a module whose types it names.

    numba compares this file's time only after it has read the types, and fails with a traceback
    where one of them has moved to another module.
    """
    modules = {
        function_type.__module__ for function_type in (Arrays, LoopPrices, PromptChunks, Work)
    }
    sources = {__file__, *(sys.modules[name].__file__ for name in modules)}
    newest = max(os.stat(path).st_mtime for path in sources if path)
    for code in Path(folder).glob(f"{Path(__file__).stem}.*.nb[ic]"):
        with contextlib.suppress(FileNotFoundError):  # another process deleted it
            if code.stat().st_mtime < newest:
                code.unlink()


# --- seconds ---------------------------------------------------------------------------------


@jit
def below(points: Floats, first: int, last: int, x: float) -> int:
    """Return the last of ``points[first:last]``, ascending, that is not above `x`; or the first."""
    while last - first > 1:
        middle = (first + last) // 2
        if points[middle] <= x:
            first = middle
        else:
            last = middle
    return first


@jit
def growth(
    fit: Any, batch: float, width: float, context: float,
    from_batch: float, from_width: float, from_context: float,
) -> float:  # fmt: skip
    """Do as `traces.latency.interpolate.CellGrid._ratio`, of one size."""
    cached = from_context * (fit.cache + from_width * fit.attention)
    base = fit.launch + from_batch * (fit.sequence + from_width * fit.token + cached)
    if base <= 0:
        return 1.0
    cached = context * (fit.cache + width * fit.attention)
    grown: float = (fit.launch + batch * (fit.sequence + width * fit.token + cached)) / base
    return grown


@jit
def read(
    prices: LoopPrices, seen: Records, place: int, batch: float, width: float, context: float
) -> float:
    """Return the seconds of one pass, and count it in `seen`, (readers, origins)."""
    sizes, first, reader = prices.sizes, prices.first, prices.readers[place]
    held = context if reader.only_context < 0 else reader.only_context
    origin, total = MEASURED, 0.0
    if reader.constant:
        begin = first[reader.first]
        wide = below(sizes, begin, first[reader.first + 1], math.ceil(width))
        total = prices.seconds[first[wide]]
    else:
        asked = reader.only_batch if reader.only_batch > 0 else batch
        near = min(max(asked, sizes[reader.first]), sizes[reader.last - 1])
        low = below(sizes, reader.first, reader.last, near)
        share = 0.0
        if sizes[low] != near:
            share = (near - sizes[low]) / (sizes[low + 1] - sizes[low])
            origin = INTERPOLATED
        for side in range(low, low + (2 if share > 0 else 1)):
            begin, end = first[side], first[side + 1]
            narrow = min(max(width, sizes[begin]), sizes[end - 1])
            at = below(sizes, begin, end, narrow)
            part = 0.0
            if sizes[at] != narrow:
                part = (narrow - sizes[at]) / (sizes[at + 1] - sizes[at])
                origin = max(origin, INTERPOLATED)
            value = 0.0
            for line in range(at, at + (2 if part > 0 else 1)):
                begin, end = first[line], first[line + 1]
                edge = min(max(held, sizes[begin]), sizes[end - 1])
                cut = below(sizes, begin, end, edge)
                seconds = prices.seconds[cut]
                if sizes[cut] != edge:
                    step = (edge - sizes[cut]) / (sizes[cut + 1] - sizes[cut])
                    seconds += step * (prices.seconds[cut + 1] - seconds)
                    origin = max(origin, INTERPOLATED)
                if edge != held:
                    own = sizes[side], sizes[line]
                    seconds *= growth(reader, *own, held, *own, edge)
                    origin = EXTRAPOLATED
                value += seconds * (1.0 - part if line == at else part)
            if narrow != width:
                value *= growth(reader, sizes[side], width, held, sizes[side], narrow, held)
                origin = EXTRAPOLATED
            total += value * (1.0 - share if side == low else share)
        if near != asked:
            total *= growth(reader, batch, width, held, near, width, held)
            origin = EXTRAPOLATED
    count(seen[place, origin], batch, width, context)
    return total


@jit
def count(seen: Any, batch: float, width: float, context: float) -> None:
    """Count one pass."""
    seen.passes += 1
    seen.least_batch = min(seen.least_batch, batch)
    seen.most_batch = max(seen.most_batch, batch)
    seen.least_width = min(seen.least_width, width)
    seen.most_width = max(seen.most_width, width)
    seen.least_context = min(seen.least_context, context)
    seen.most_context = max(seen.most_context, context)


@jit
def decoding_s(
    prices: LoopPrices, seen: Records, work: Work, batch: int, target: int
) -> tuple[float, float]:
    """Return the seconds of the target's pass over what decodes, and of all else."""
    context, drafted, longest, drafting, catch_up, draft_context, rejected, unread = work
    host, size = prices.hosts[batch], float(batch)
    seconds = host.round_s
    if rejected:
        seconds += host.target_rollback_s
    if unread:
        seconds += host.draft_rollback_s
    last, drafts = prices.judged.shape[1] - 1, drafted / size
    low = min(int(drafts), last)
    verdicts_s = prices.judged[batch, low]
    rise_s = prices.judged[batch, min(low + 1, last)] - verdicts_s
    seconds += verdicts_s + (drafts - low) * rise_s
    width, cached = drafts + 1.0, context / size - 1.0
    along = prices.readers[ALONG].read
    if along != NOWHERE and not drafted and longest < 2:
        seconds += read(prices, seen, ALONG, size, 1.0, cached)
    elif longest:
        seconds += longest * host.draft_s
        mean = draft_context / drafting
        first, before = width, cached
        if along == NOWHERE:
            first = catch_up / drafting
            before = max(mean - first, 0.0)
        seconds += read(prices, seen, prices.readers[FIRST].read, size, first, before)
        seconds += prices.settled[batch, min(longest, prices.settled.shape[1]) - 1]
        for step in range(longest - 1):
            seconds += read(prices, seen, LATER, size, 1.0, mean + step)
    return read(prices, seen, target, size, width, cached), seconds


@jit
def covers(prices: LoopPrices, place: int, batch: float, width: float) -> bool:
    """Do as `traces.latency.interpolate.CellGrid.covers`."""
    sizes, first, reader = prices.sizes, prices.first, prices.readers[place]
    if reader.constant:
        return True
    asked = reader.only_batch if reader.only_batch > 0 else batch
    low = below(sizes, reader.first, reader.last, asked)
    high = low + (1 if sizes[low] < asked else 0)
    if sizes[low] > asked or high >= reader.last:
        return False
    for side in range(low, high + 1):
        if not sizes[first[side]] <= width <= sizes[first[side + 1] - 1]:
            return False
    return True


@jit
def chunk_s(
    prices: LoopPrices, seen: Records, prefill: int, forward: int, tokens: float, context: float
) -> float:
    """Do as `EngineCost._chunk_seconds`."""
    tokens_s: float = read(prices, seen, prefill, 1.0, tokens, 0.0)
    if not context:
        return tokens_s
    added_s = read(prices, seen, prefill, 1.0, context + tokens, 0.0)
    added_s -= read(prices, seen, prefill, 1.0, context, 0.0)
    return max(tokens_s, added_s, read(prices, seen, forward, 1.0, 1.0, context))


@jit
def prompts_s(
    prices: LoopPrices,
    seen: Records,
    prefill: int,
    forward: int,
    prompts: PromptChunks,
    seats: Records,
) -> float:
    """Return the seconds of a model's pass over prompts alone, the first ``chunk`` of `seats`."""
    if prices.readers[prefill].read == NOWHERE or prices.readers[forward].read == NOWHERE:
        return 0.0
    number, mean = float(prompts.number), prompts.tokens / prompts.number
    cut = prompts.cached > 0 or not prompts.whole
    if cut and covers(prices, forward, number, mean):
        return read(prices, seen, forward, number, mean, prompts.cached / number)
    if prompts.number == 1:
        return chunk_s(prices, seen, prefill, forward, mean, float(prompts.cached))
    alike = min(mean, prices.readers[prefill].most)
    together = read(prices, seen, prefill, number, alike, 0.0)
    same = not prompts.cached
    for i in range(prompts.number):
        same = same and seats[i].chunk == alike
    if same or not together:
        return together
    alone = 0.0
    for i in range(prompts.number):
        own = float(seats[i].chunk), float(seats[i].before)
        alone += chunk_s(prices, seen, prefill, forward, *own)
    return together * alone / (number * read(prices, seen, prefill, 1.0, alike, 0.0))


@jit
def iteration_s(
    prices: LoopPrices, seen: Records, work: Work, batch: int, prompts: PromptChunks, seats: Records
) -> float:
    """Return the seconds of an iteration; mixed passes put together are counted last."""
    draft_s = prompt_s = 0.0
    if prompts.number:
        draft_s = prompts_s(prices, seen, DRAFT_PREFILL, LATER, prompts, seats)
        prompt_s = prompts_s(prices, seen, TARGET_PREFILL, TARGET, prompts, seats)
    if not batch:
        around_s: float = prices.hosts[prompts.number].iteration_s
        return draft_s + prompt_s + around_s
    mixes = prompts.number > 0 and prices.readers[TARGET_PREFILL].read != NOWHERE
    target = prices.readers[WITH_PROMPTS].read if mixes else TARGET
    target_s, other_s = decoding_s(prices, seen, work, batch, target)
    if mixes:
        sizes = float(batch + work.drafted), float(prompts.tokens), float(prompts.cached)
        mixed = prices.readers[MIXED]
        if mixed.read != NOWHERE and not prompts.cached and sizes[1] <= mixed.most:
            target_s += read(prices, seen, MIXED, *sizes)
        else:
            count(seen[len(prices.readers), 0], *sizes)
            both_s = target_s + prompt_s - prices.launch_s
            target_s = max(target_s, prompt_s, both_s)
    return other_s + draft_s + target_s


# --- memory ----------------------------------------------------------------------------------


@jit
def append(engine: Arrays, r: int, whose: int, blocks: int) -> None:
    """Free blocks after all others; two unused neighbours become one entry."""
    state, free = engine.replicas[r], engine.free[r]
    if state.free and whose == NOBODY == free[state.free - 1].whose:
        free[state.free - 1].blocks += blocks
    elif blocks:
        free[state.free].whose, free[state.free].blocks = whose, blocks
        state.free += 1


@jit
def take_blocks(engine: Arrays, r: int, blocks: int) -> None:
    """Do as `BlockPool._take`, and join entries that have become alike."""
    state, free = engine.replicas[r], engine.free[r]
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
def found_again(engine: Arrays, r: int, slot: int) -> int:
    """Do as `Scheduler._found`."""
    state, request = engine.replicas[r], engine.requests[slot]
    kept = 0
    if request.preemptions:
        for i in range(state.free):
            if engine.free[r, i].whose == slot:
                kept += engine.free[r, i].blocks
    size = engine.limits.block_size
    return int(min(kept, (request.prefill_left - 1) // size) * size) if kept else 0


@jit
def find(engine: Arrays, r: int, slot: int, blocks: int) -> None:
    """Do as `BlockPool.find`."""
    state, left = engine.replicas[r], blocks
    for i in range(state.free):
        entry = engine.free[r, i]
        if entry.whose == slot:
            own = min(left, entry.blocks)
            left -= own
            entry.blocks -= own
            entry.whose = NOBODY
    state.used += blocks
    engine.requests[slot].blocks = blocks
    take_blocks(engine, r, 0)


@jit
def grown(engine: Arrays, r: int, slot: int, tokens: int) -> bool:
    """Do as `BlockPool.grow`."""
    limits, state, request = engine.limits, engine.replicas[r], engine.requests[slot]
    wanted = max(request.blocks, -(-tokens // limits.block_size))
    more = wanted - request.blocks
    if limits.kv_blocks and state.used + more > limits.kv_blocks:
        return False
    if state.free and more:
        take_blocks(engine, r, more)
    state.used += more
    request.blocks = wanted
    request.capacity = wanted * limits.block_size
    return True


@jit
def room(engine: Arrays, r: int, slot: int, tokens: int) -> bool:
    """Do as `Scheduler._room`: the youngest go until there is room, perhaps `slot` itself."""
    state = engine.replicas[r]
    while not grown(engine, r, slot, tokens):
        state.running -= 1
        number = engine.seats[r, state.running].running
        victim = engine.requests[number]
        computed = victim.prefilled if victim.prefill_left else victim.context - 1
        full = computed // engine.limits.block_size
        if full and not state.free:
            append(engine, r, NOBODY, engine.limits.kv_blocks - state.used)
        state.used -= victim.blocks
        if full:
            append(engine, r, NOBODY, victim.blocks - full)
            append(engine, r, number, full)
        elif state.free:
            append(engine, r, NOBODY, victim.blocks)
        victim.blocks = victim.capacity = victim.prefilled = 0
        victim.prefill_left = victim.context - (1 if victim.tokens else 0)
        victim.preemptions += 1
        victim.next = state.head
        if state.head == NOBODY:
            state.tail = number
        state.head = number
        state.waiting += 1
        if number == slot:
            return False
    return True


# --- who runs --------------------------------------------------------------------------------


@jit
def admit(engine: Arrays, r: int) -> None:
    """Let the first of the queue run from now on."""
    state = engine.replicas[r]
    slot = state.head
    state.head = engine.requests[slot].next
    state.waiting -= 1
    engine.seats[r, state.running].running = slot
    state.running += 1


@jit
def reads(engine: Arrays, r: int, slot: int, tokens: int) -> None:
    """Plan to read this many tokens of a prompt in the next iteration."""
    state = engine.replicas[r]
    seat = engine.seats[r, state.reads]
    seat.reads, seat.chunk = slot, tokens
    state.reads += 1


@jit
def plan(engine: Arrays, r: int) -> None:
    """Do as `Continuous.next`: who decodes and whose prompts are read next."""
    limits, state, requests = engine.limits, engine.replicas[r], engine.requests
    seats = engine.seats[r]
    budget, queued, held_back, at = limits.token_budget, state.head, False, 0
    while at < state.running:
        slot = seats[at].running
        request = requests[slot]
        at += 1
        if request.prefill_left:
            tokens = min(request.prefill_left, budget)
            wanted = request.prefilled + tokens
            if tokens > 0 and (wanted <= request.capacity or room(engine, r, slot, wanted)):
                reads(engine, r, slot, tokens)
                budget -= tokens
            continue
        if budget < limits.lookahead + 1:
            held_back = True
            break
        peak = request.context + limits.lookahead
        if peak > request.capacity and not room(engine, r, slot, peak):
            break
        budget -= limits.lookahead + 1
        seats[state.decodes].decodes = slot
        state.decodes += 1
    # Nobody new while one that was admitted has to wait, or lost its place.
    if held_back or state.head != queued:
        return
    seats = limits.max_batch - state.held_seats
    while state.waiting > state.unseen and state.running < seats and budget > 0:
        slot = state.head
        request = requests[slot]
        found = found_again(engine, r, slot)
        left = request.prefill_left - found
        tokens = min(left, budget)
        blocks = -(-request.prefill_left // limits.block_size)
        if limits.kv_blocks and state.used + blocks > limits.kv_blocks:
            return
        if request.preemptions and state.free:
            find(engine, r, slot, found // limits.block_size)
        request.prefilled += found
        request.prefill_left = left
        grown(engine, r, slot, request.prefilled + tokens)
        admit(engine, r)
        reads(engine, r, slot, tokens)
        budget -= tokens


@jit
def see_all(engine: Arrays, r: int) -> bool:
    """Do as `Scheduler._see_all`."""
    state = engine.replicas[r]
    if not (state.unseen or state.held_seats):
        return False
    state.used -= state.held_blocks
    if state.free:
        append(engine, r, NOBODY, state.held_blocks)
    state.unseen = state.held_seats = state.held_blocks = 0
    return True


@jit
def plan_static(engine: Arrays, r: int) -> None:
    """Do as `StaticBatches.next`."""
    limits, state, requests = engine.limits, engine.replicas[r], engine.requests
    seats = engine.seats[r]
    if state.running:
        for i in range(state.running):
            seats[i].decodes = seats[i].running
        state.decodes = state.running
        return
    if not state.waiting or (more_to_come(engine) and state.waiting < limits.max_batch):
        return
    while state.waiting and state.running < limits.max_batch:
        request = requests[state.head]
        peak = request.prompt + request.output + limits.lookahead
        if not grown(engine, r, state.head, peak):
            break
        reads(engine, r, state.head, request.prefill_left)
        admit(engine, r)


@jit
def decide(engine: Arrays, r: int, n: int, seat: Any, slot: int) -> bool:
    """Decide the round of a request where `n` requests decide; False if a draft leaves the
    recording.
    """
    request = engine.requests[slot]
    if not engine.limits.planned:
        known = engine.rounds[request.first + request.steps]
        seat.drafted, seat.accepted, seat.emitted = known[1], known[2], known[3]
        seat.forwards, seat.catch_up = known[4], known[5]
    else:
        length = engine.lengths[n]
        start = engine.starts[request.first + request.tokens % request.recorded]
        most = min(start.most, engine.limits.lookahead)
        if request.output > request.recorded:
            most = min(most, start.left - 1)
        seat.forwards = min(most, length.passes)
        seat.drafted = min(seat.forwards, length.verified)
        seat.accepted = min(seat.drafted, start.runs)
        seat.emitted = min(seat.accepted + 1, start.left)
        seat.catch_up = request.catch_up
        if seat.forwards > start.recorded or (start.open_ended and seat.drafted > start.runs):
            return False
        if not seat.forwards:
            request.catch_up += 1
        elif engine.limits.takes_verified:
            request.catch_up = seat.accepted + 1
        else:
            request.catch_up = 1 + seat.accepted - min(seat.accepted, seat.forwards - 1)
    seat.emitted = min(seat.emitted, request.output - request.tokens)
    return True


@jit
def begin(engine: Arrays, r: int, order: int) -> int:
    """Plan the next iteration and find when it ends."""
    limits, state, clock = engine.limits, engine.replicas[r], engine.clock[0]
    seats = engine.seats[r]
    state.decodes = state.reads = 0
    state.at_s = math.inf
    if limits.static:
        plan_static(engine, r)
    else:
        plan(engine, r)
        if see_all(engine, r) and not state.decodes and not state.reads:
            plan(engine, r)
    batch = state.decodes
    if not batch and not state.reads:
        if clock.exhausted and state.head == NOBODY:
            return OVER
        last = clock.exhausted and not more_to_come(engine)
        if state.running or (state.head != NOBODY and last):
            return BLOCKED
        return SLEEPS
    n = state.asked = state.scheduled if state.scheduled else batch
    if batch and limits.planned:
        verified = engine.lengths[n].verified
        state.length_changes += state.verified >= 0 and verified != state.verified
        state.verified = verified
    if not limits.static:
        state.scheduled = batch + state.reads
    context = drafted = longest = drafting = catch_up = draft_context = 0
    rejected = unread = False
    for i in range(batch):
        seat, slot = seats[i], seats[i].decodes
        request = engine.requests[slot]
        if not decide(engine, r, n, seat, slot):
            return int(slot)
        context += request.context
        drafted += seat.drafted
        rejected = rejected or seat.accepted < seat.drafted
        forwards, unread_before = seat.forwards, seat.catch_up
        if engine.prices.always:
            # As `EventEngine._kept_up`.
            forwards = max(forwards, engine.prices.always)
            unread_before = min(unread_before, request.unread)
            processed = 0 if limits.takes_verified else min(seat.accepted, forwards - 1)
            request.unread = 1 + seat.accepted - processed
        if forwards:
            drafting += 1
            catch_up += unread_before
            draft_context += request.context
            longest = max(longest, forwards)
            unread = unread or seat.accepted < forwards - 1
    tokens, cached, whole = 0, 0, True
    for i in range(state.reads):
        request = engine.requests[seats[i].reads]
        tokens += seats[i].chunk
        seats[i].before = request.prefilled
        cached += request.prefilled
        whole = whole and request.prefill_left == seats[i].chunk
    seconds = iteration_s(
        engine.prices, engine.seen[r],
        Work(context, drafted, longest, drafting, catch_up, draft_context, rejected, unread),
        batch, PromptChunks(state.reads, tokens, cached, whole), seats,
    )  # fmt: skip
    state.started_s = clock.now
    state.at_s, state.order = clock.now + seconds, order
    return BEGUN


# --- what happens ----------------------------------------------------------------------------


@jit
def ordered(engine: Arrays) -> int:
    """Return a number for an event: among those of one time, lower ones go first."""
    clock = engine.clock[0]
    clock.order += 1
    return int(clock.order)


@jit
def more_to_come(engine: Arrays) -> bool:
    """Do as `Source.more_to_come`."""
    clock = engine.clock[0]
    return bool(clock.think_count > 0 if engine.limits.closed else not clock.exhausted)


@jit
def wake(engine: Arrays, r: int) -> None:
    """Do as `Replica.wake`."""
    state = engine.replicas[r]
    if state.idle and not state.ended and state.at_s == math.inf:
        state.at_s, state.order = engine.clock[0].now, ordered(engine)


@jit
def enter(state: Any, now: float, change: int) -> None:
    """Do as `RunRecorder.enter`."""
    state.area_s += state.in_system * (now - state.changed_s)
    state.changed_s = now
    state.in_system += change


@jit
def think(engine: Arrays, wait_s: float) -> None:
    """Let a client send its next request after `wait_s`."""
    clock, ring = engine.clock[0], engine.thinking
    size, at_s = len(ring), clock.now + wait_s
    at = clock.think_count
    while at and ring[(clock.think_head + at - 1) % size].at_s > at_s:
        ring[(clock.think_head + at) % size] = ring[(clock.think_head + at - 1) % size]
        at -= 1
    entry = ring[(clock.think_head + at) % size]
    entry.at_s, entry.order = at_s, ordered(engine)
    clock.think_count += 1


@jit
def next_of_client(engine: Arrays, wait_s: float) -> None:
    """Do as `Source.completed`: a closed loop sends another request, after `wait_s`."""
    if not engine.limits.closed:
        return
    if wait_s > 0:
        think(engine, wait_s)
    else:
        engine.clock[0].wanted += 1


@jit
def mark(engine: Arrays, k: int, now: float) -> None:
    """Mark an end of the measured window."""
    engine.marks[k].at_s, engine.marks[k].passed = now, True
    for r in range(len(engine.replicas)):
        engine.marked[k, r] = engine.replicas[r].tokens


@jit
def submit(engine: Arrays) -> None:
    """Do as `RequestSource._submit_next`: a request comes now, if there is another."""
    clock, limits = engine.clock[0], engine.limits
    clock.wanted -= 1
    if clock.arrived == len(engine.requests):
        exhaust(engine)
        return
    slot, now = clock.arrived, clock.now
    request = engine.requests[slot]
    state = engine.replicas[request.replica]
    clock.arrived += 1
    if limits.closed:
        request.arrival_s = now
    for k in range(len(engine.marks)):
        if engine.marks[k].number == request.number:
            mark(engine, k, now)
    state.arrived += 1
    if not request.admissible:
        state.rejected += 1
        clock.gone += 1
        next_of_client(engine, limits.think_s)
        return
    enter(state, now, 1)
    request.entered = True
    state.carried += request.prompt
    if state.head == NOBODY:
        state.head = slot
    else:
        engine.requests[state.tail].next = slot
    state.tail = slot
    state.waiting += 1
    if limits.async_scheduling and not state.idle:
        state.unseen += 1
    wake(engine, request.replica)


@jit
def exhaust(engine: Arrays) -> None:
    """Note that no request will come any more."""
    clock = engine.clock[0]
    clock.exhausted = True
    clock.comes_s = math.inf
    for r in range(len(engine.replicas)):
        wake(engine, r)


@jit
def arrivals(engine: Arrays) -> bool:
    """Let requests of an open system, or a client's next, come now; False if more must be known."""
    clock, requests = engine.clock[0], engine.requests
    if engine.limits.closed:
        entry = engine.thinking[clock.think_head]
        clock.now = entry.at_s
        clock.think_head = (clock.think_head + 1) % len(engine.thinking)
        clock.think_count -= 1
        clock.wanted += 1
        return True
    last = clock.arrived
    while last < len(requests) and requests[last].arrival_s <= clock.comes_s:
        last += 1
    if last == len(requests) and not clock.listed:
        return False
    clock.now = clock.comes_s
    clock.wanted = last - clock.arrived
    if clock.wanted:
        clock.comes_s = NOBODY  # to be found once they have come
    else:
        exhaust(engine)
    return True


@jit
def next_arrival(engine: Arrays) -> None:
    """Do as `RequestSource._open`: when the next request of an open system comes."""
    clock, requests = engine.clock[0], engine.requests
    if clock.arrived < len(requests):
        clock.comes_s = max(requests[clock.arrived].arrival_s, clock.now)
    elif engine.limits.open_until_s > clock.now:
        clock.comes_s = engine.limits.open_until_s
    else:
        exhaust(engine)
        return
    clock.comes_order = ordered(engine)


@jit
def bin_of(seconds: float) -> int:
    """Return where `Histogram.add` counts it."""
    return min(math.floor(math.log(max(seconds, 1e-9)) / WIDTH) - FINEST, BINS - 1)


@jit
def spread(series: Any, sums: Floats, start: float, end: float, value: float) -> None:
    """Do as `Series.add`."""
    series.integral += value * (end - start)
    while end > series.interval_s * POINTS:
        for i in range(POINTS // 2):
            sums[i] = sums[2 * i] + sums[2 * i + 1]
        sums[POINTS // 2 :] = 0.0
        series.interval_s *= 2
    at = min(int(start / series.interval_s), POINTS - 1)
    while at < POINTS - 1 and end > (at + 1) * series.interval_s:
        edge = (at + 1) * series.interval_s
        sums[at] += value * max(edge - start, 0.0)
        start, at = max(edge, start), at + 1
    sums[at] += value * (end - start)


@jit
def leave(engine: Arrays, r: int, slot: int) -> None:
    """Do as `Engine.leave`."""
    state, seats, clock = engine.replicas[r], engine.seats[r], engine.clock[0]
    request = engine.requests[slot]
    request.around_s = engine.prices.hosts[state.running].request_s
    if engine.limits.async_scheduling:
        state.held_seats += 1
        state.held_blocks += request.blocks
    else:
        state.used -= request.blocks
        if state.free:
            append(engine, r, NOBODY, request.blocks)
    request.blocks = 0
    at = 0
    while seats[at].running != slot:
        at += 1
    state.running -= 1
    for later in range(at, state.running):
        seats[later].running = seats[later + 1].running
    enter(state, clock.now, -1)
    state.area_s += request.around_s
    state.carried -= request.prompt + request.tokens
    request.left = True
    engine.left[clock.finished] = slot
    clock.finished += 1
    clock.gone += 1
    next_of_client(engine, engine.limits.think_s + request.around_s)


@jit
def decoded(engine: Arrays, r: int) -> None:
    """Do as `Engine._account` and `Engine._decoded`: the rounds have ended."""
    state, seats, now = engine.replicas[r], engine.seats[r], engine.clock[0].now
    start = state.started_s
    state.iterations += 1
    state.busy_s += now - start
    state.peak_batch = max(state.peak_batch, state.running)
    spread(state.batch, engine.sums[r, 0], start, now, state.running)
    spread(state.kv_blocks, engine.sums[r, 1], start, now, state.used)
    on_time = 0
    state.leaving = state.cursor = 0
    for i in range(state.decodes):
        seat = seats[i]
        request = engine.requests[seat.decodes]
        request.steps += 1
        request.context += seat.emitted
        request.tokens += seat.emitted
        request.drafted += seat.drafted
        request.accepted += seat.accepted
        request.forwards += seat.forwards
        state.tokens += seat.emitted
        state.drafted += seat.drafted
        state.accepted += seat.accepted
        state.draft_forwards += seat.forwards
        if request.tokens >= request.output:
            seats[state.leaving].leaves = seat.decodes
            state.leaving += 1
        if request.counted:
            if request.last_s != start:
                state.gaps_s += now - request.last_s
                engine.gaps[r, bin_of(now - request.last_s)] += 1
            else:
                on_time += 1
        request.last_s = now
    if on_time:
        state.gaps_s += on_time * (now - start)
        engine.gaps[r, bin_of(now - start)] += on_time


@jit
def all_left(engine: Arrays, r: int) -> bool:
    """Return requests leave, then prompts have been read; False as soon as another one is due."""
    state, seats, clock = engine.replicas[r], engine.seats[r], engine.clock[0]
    while state.cursor < state.leaving + state.reads:
        at = state.cursor
        state.cursor += 1
        if at < state.leaving:
            leave(engine, r, seats[at].leaves)
        else:
            prefilled(engine, r, at - state.leaving)
        if clock.wanted:
            return False
    return True


@jit
def prefilled(engine: Arrays, r: int, at: int) -> None:
    """Do as `Engine.prefilled`: prompt tokens were read."""
    state, now = engine.replicas[r], engine.clock[0].now
    slot, chunk = engine.seats[r, at].reads, engine.seats[r, at].chunk
    request = engine.requests[slot]
    request.prefilled += chunk
    request.prefill_left -= chunk
    if request.prefill_left or request.tokens:
        return
    request.first_s = request.last_s = now
    request.tokens = 1
    request.context += 1
    state.tokens += 1
    if request.output <= 1:
        leave(engine, r, slot)


@jit
def run(engine: Arrays) -> tuple[int, int]:
    """Let time pass: why it stopped, and the request that it is about."""
    clock, limits, replicas = engine.clock[0], engine.limits, engine.replicas
    for _ in range(STEPS):
        if clock.wanted:
            if clock.arrived == len(engine.requests):
                if not clock.listed:
                    return MORE, NOBODY
            elif engine.requests[clock.arrived].replica < 0:
                return ROUTE, int(clock.arrived)
            submit(engine)
            continue
        r = clock.active
        if r != NOBODY:
            if not replicas[r].idle and not all_left(engine, r):
                continue
            clock.active = NOBODY
            state = replicas[r]
            state.idle = False
            why = begin(engine, r, state.order)
            if why == BLOCKED:
                return STUCK, NOBODY
            if why >= 0:
                return LOST, why
            if why == OVER:
                state.ended = True
                clock.alive -= 1
            state.idle = why == SLEEPS
            continue
        if not clock.alive:
            return DONE, NOBODY
        if not limits.closed and clock.comes_s < 0:
            if clock.arrived == len(engine.requests) and not clock.listed:
                return MORE, NOBODY
            next_arrival(engine)
        # The next event: the end of an iteration, or an arrival.
        at_s, order, next_r = math.inf, 0, NOBODY
        for i in range(len(replicas)):
            own = replicas[i]
            if own.at_s < at_s or (own.at_s == at_s and own.order < order):
                at_s, order, next_r = own.at_s, own.order, i
        comes_s, comes_order = clock.comes_s, clock.comes_order
        if limits.closed and clock.think_count:
            entry = engine.thinking[clock.think_head]
            comes_s, comes_order = entry.at_s, entry.order
        comes = comes_s < at_s or (comes_s == at_s and comes_order < order)
        if comes:
            at_s = comes_s
        # An arrival after the end of the run is no end of the window.
        marks, until_s = False, min(at_s, limits.max_time_s)
        for k in range(len(engine.marks)):
            own_mark = engine.marks[k]
            if own_mark.number == NOBODY and not own_mark.passed and own_mark.at_s <= until_s:
                clock.now = own_mark.at_s
                mark(engine, k, clock.now)
                marks = True
        if marks:
            continue
        if at_s > limits.max_time_s:
            clock.now = limits.max_time_s
            return CUT, NOBODY
        if at_s == math.inf:
            return STUCK, NOBODY
        if comes:
            if not arrivals(engine):
                return MORE, NOBODY
            continue
        clock.now, clock.active = at_s, next_r
        replicas[next_r].order = ordered(engine)
        if not replicas[next_r].idle:
            decoded(engine, next_r)
    return PAUSE, NOBODY
