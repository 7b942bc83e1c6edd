"""Seconds of an iteration from arrays, in numbers alone.

`read` is `simulator.serving.cost.reader.PassReader`, `decoding_s` and `prompts_s` are the parts of
`simulator.serving.cost.iteration.IterationCost`: see there for what is read and why.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from simulator.serving.compiled.jit import jit
from simulator.serving.cost.work import Work
from traces.latency.interpolate import EXTRAPOLATED, INTERPOLATED, MEASURED
from traces.replay.always import MOST_BEHIND

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Records = Any
"""An array of records."""

READERS = cast("tuple[int, ...]", tuple(np.arange(8)))
TARGET, LATER, FIRST, ALONG, TARGET_PREFILL, DRAFT_PREFILL, BESIDE, MIXED = READERS
"""What is read; a draft's later and first passes may be the same cells.  For each of the plain
integers numba would compile what reads them anew."""
NOWHERE = -1
FIT = ("launch", "sequence", "token", "cache", "attention")
"""Weights of the roofline that readings beyond the cells are carried on along
(`simulator.serving.cost.surface.Roofline`)."""
READER = np.dtype([
    ("read", "i8"), ("first", "i8"), ("last", "i8"), ("constant", "?"), ("only_batch", "f8"),
    ("most", "f8"), *((name, "f8") for name in FIT),
])  # fmt: skip
"""Whose cells are read, itself mostly, or `NOWHERE`; the batches measured, from `first` to `last`;
whether the table is constant; the batch that every other is read at, 0 where sizes are told apart;
the prompt tokens up to which cells hold; and the weights of the fit."""
HOST = np.dtype([
    ("round_s", "f8"), ("draft_s", "f8"), ("target_rollback_s", "f8"), ("draft_rollback_s", "f8"),
    ("iteration_s", "f8"), ("request_s", "f8"),
])  # fmt: skip
"""The host's seconds (`simulator.serving.cost.host.Host`), and a server's around an iteration and
around a request."""
SEEN = np.dtype([
    ("passes", "i8"), ("least_batch", "f8"), ("most_batch", "f8"), ("least_width", "f8"),
    ("most_width", "f8"), ("least_context", "f8"), ("most_context", "f8"),
])  # fmt: skip
"""`simulator.serving.cost.reader.Coverage` of one origin."""


class Prices(NamedTuple):
    """What an engine's latency table says.

    ``sizes`` has the batches measured by all readers, behind them the widths at each of these
    batches, and behind those the contexts at each width.  What belongs to ``sizes[i]`` begins at
    ``first[i]`` and ends before ``first[i + 1]``; contexts have ``seconds``.
    """

    readers: Records
    sizes: Floats
    first: Ints
    seconds: Floats
    settled: Floats
    """(batches, passes): what a draft's first 0, 1, ... later passes take beyond others."""
    hosts: Records
    """(batches,)"""
    launch_s: float
    always: int
    """Draft passes in every iteration (`traces.replay.always`)."""


class Prompts(NamedTuple):
    """The prompt chunks of an iteration, added up."""

    number: int
    tokens: int
    cached: int
    whole: bool
    """Whether every one of them ends in this iteration."""


@jit
def below(points: Floats, first: int, last: int, x: float) -> int:
    """The last of ``points[first:last]``, ascending, that is not above `x`; or the first."""
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
    """`simulator.serving.cost.surface.Roofline.growth`."""
    cached = from_context * (fit.cache + from_width * fit.attention)
    base = fit.launch + from_batch * (fit.sequence + from_width * fit.token + cached)
    if base <= 0:
        return 1.0
    cached = context * (fit.cache + width * fit.attention)
    grown: float = (fit.launch + batch * (fit.sequence + width * fit.token + cached)) / base
    return grown


@jit
def read(
    prices: Prices, seen: Records, place: int, batch: float, width: float, context: float
) -> float:
    """Seconds of one pass, counted in `seen`, (readers, origins)."""
    sizes, first, reader = prices.sizes, prices.first, prices.readers[place]
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
                edge = min(max(context, sizes[begin]), sizes[end - 1])
                cut = below(sizes, begin, end, edge)
                seconds = prices.seconds[cut]
                if sizes[cut] != edge:
                    step = (edge - sizes[cut]) / (sizes[cut + 1] - sizes[cut])
                    seconds += step * (prices.seconds[cut + 1] - seconds)
                    origin = max(origin, INTERPOLATED)
                if edge != context:
                    own = sizes[side], sizes[line]
                    seconds *= growth(reader, *own, context, *own, edge)
                    origin = EXTRAPOLATED
                value += seconds * (1.0 - part if line == at else part)
            if narrow != width:
                value *= growth(reader, sizes[side], width, context, sizes[side], narrow, context)
                origin = EXTRAPOLATED
            total += value * (1.0 - share if side == low else share)
        if near != asked:
            total *= growth(reader, batch, width, context, near, width, context)
            origin = EXTRAPOLATED
    count(seen[place, origin], batch, width, context)
    return total


@jit
def count(seen: Any, batch: float, width: float, context: float) -> None:
    """One pass more."""
    seen.passes += 1
    seen.least_batch = min(seen.least_batch, batch)
    seen.most_batch = max(seen.most_batch, batch)
    seen.least_width = min(seen.least_width, width)
    seen.most_width = max(seen.most_width, width)
    seen.least_context = min(seen.least_context, context)
    seen.most_context = max(seen.most_context, context)


@jit
def decoding_s(
    prices: Prices, seen: Records, work: Work, batch: int, target: int
) -> tuple[float, float]:
    """Seconds of the target's pass over what decodes, read from `target`, and of all else."""
    context, drafted, longest, drafting, catch_up, draft_context, rejected, unread = work
    if prices.always:
        catch_up = min(catch_up, MOST_BEHIND * drafting) + batch - drafting
        longest, drafting, draft_context = max(longest, prices.always), batch, context
        unread = unread or prices.always > 1
    host, size = prices.hosts[batch], float(batch)
    seconds = host.round_s
    if rejected:
        seconds += host.target_rollback_s
    if unread:
        seconds += host.draft_rollback_s
    width, cached = drafted / size + 1.0, context / size - 1.0
    along = prices.readers[ALONG].read
    if along != NOWHERE and not drafted and prices.always < 2:
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
def prompts_s(
    prices: Prices, seen: Records, prefill: int, forward: int, prompts: Prompts, seats: Records
) -> float:
    """Seconds of a model's pass over prompts by themselves, the first ``chunk`` of `seats`."""
    if prices.readers[prefill].read == NOWHERE or prices.readers[forward].read == NOWHERE:
        return 0.0
    number, mean = float(prompts.number), prompts.tokens / prompts.number
    if prompts.cached or not prompts.whole:
        return read(prices, seen, forward, number, mean, prompts.cached / number)
    if prompts.number == 1:
        return read(prices, seen, prefill, 1.0, mean, 0.0)
    alike = min(mean, prices.readers[prefill].most)
    together = read(prices, seen, prefill, number, alike, 0.0)
    same = True
    for i in range(prompts.number):
        same = same and seats[i].chunk == alike
    if same or not together:
        return together
    alone = 0.0
    for i in range(prompts.number):
        alone += read(prices, seen, prefill, 1.0, float(seats[i].chunk), 0.0)
    return together * alone / (number * read(prices, seen, prefill, 1.0, alike, 0.0))


@jit
def iteration_s(
    prices: Prices, seen: Records, work: Work, batch: int, prompts: Prompts, seats: Records
) -> float:
    """Seconds of an iteration; mixed passes put together are counted behind all readers."""
    draft_s = prompt_s = 0.0
    if prompts.number:
        draft_s = prompts_s(prices, seen, DRAFT_PREFILL, LATER, prompts, seats)
        prompt_s = prompts_s(prices, seen, TARGET_PREFILL, TARGET, prompts, seats)
    if not batch:
        around_s: float = prices.hosts[prompts.number].iteration_s
        return draft_s + prompt_s + around_s
    mixes = prompts.number > 0 and prices.readers[TARGET_PREFILL].read != NOWHERE
    target = prices.readers[BESIDE].read if mixes else TARGET
    target_s, beside_s = decoding_s(prices, seen, work, batch, target)
    if mixes:
        sizes = float(batch + work.drafted), float(prompts.tokens), float(prompts.cached)
        mixed = prices.readers[MIXED]
        if mixed.read != NOWHERE and not prompts.cached and sizes[1] <= mixed.most:
            target_s += read(prices, seen, MIXED, *sizes)
        else:
            count(seen[len(prices.readers), 0], *sizes)
            both_s = target_s + prompt_s - prices.launch_s
            target_s = max(target_s, prompt_s, both_s)
    return beside_s + draft_s + target_s
