"""The arrays that the compiled loop reads and writes, and how they are filled.

Every array is made of plain numbers, so that the loop knows no object of Python.  Seconds carry
the suffix ``_s``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from policies.arrays import Floats, Ints
from simulator.pricing import Host
from simulator.serving.arrivals import Job
from simulator.serving.cost import (
    DRAFT_PREFILL,
    FIRST,
    LATER,
    MIXED,
    ORIGINS,
    PLACES,
    TARGET,
    TARGET_PREFILL,
    WITH_PROMPTS,
    EngineCost,
)
from simulator.serving.outcome.metrics import Histogram, Series
from simulator.serving.scheduler import Scheduler
from traces.acceptance.trace import Trace, once_per_trace
from traces.latency.table import LatencyTable
from traces.replay.layout import layout_of

Records = Any
"""An array of records."""

NOWHERE = -1
FIT = ("launch", "sequence", "token", "cache", "attention")
"""Weights of the roofline that readings beyond the cells follow
(`traces.latency.interpolate.CellGrid.fit`)."""
READER = np.dtype([
    ("read", "i8"), ("first", "i8"), ("last", "i8"), ("constant", "?"), ("only_batch", "f8"),
    ("only_context", "f8"), ("most", "f8"), *((name, "f8") for name in FIT),
])  # fmt: skip
"""The reader whose cells are read (its own mostly) or `NOWHERE`; the measured batches, from `first`
to `last`; True for a constant table; the batch that every other is read at, 0 where sizes are told
apart; the context that every other is read at, -1 where they are told apart; the prompt tokens up
to which cells hold; and the weights of the fit."""
HOST = np.dtype([(name, "f8") for name in Host._fields])
SEEN = np.dtype([
    ("passes", "i8"), ("least_batch", "f8"), ("most_batch", "f8"), ("least_width", "f8"),
    ("most_width", "f8"), ("least_context", "f8"), ("most_context", "f8"),
])  # fmt: skip
"""`simulator.serving.cost.Coverage` of one origin."""
WIDTH = Histogram.WIDTH
FINEST = math.floor(math.log(1e-9) / WIDTH)
"""The lowest bin of seconds between tokens (`Histogram`)."""
BINS = 10_000
"""Bins of gaps; the last holds those of a thousand million seconds."""
POINTS = Series().points


class LoopPrices(NamedTuple):
    """The content of a latency table.

    ``sizes`` has the batches measured by all readers, then the widths at each of these batches,
    then the contexts at each width.  What belongs to ``sizes[i]`` begins at ``first[i]`` and ends
    before ``first[i + 1]``; contexts have ``seconds``.
    """

    readers: Records
    sizes: Floats
    first: Ints
    seconds: Floats
    settled: Floats
    """(batches, passes): what a draft's first 0, 1, ... later passes take beyond others."""
    judged: Floats
    """(batches, tokens): what the verdicts on 0, 1, ... drafted tokens of each sequence take."""
    hosts: Records
    """(batches,)"""
    launch_s: float
    always: int
    """Draft passes in every iteration (`traces.replay.calls`)."""


class LoopLimits(NamedTuple):
    """An engine's configuration (`simulator.serving.scheduler.Limits`) and the run's bounds."""

    max_batch: int
    token_budget: int
    kv_blocks: int
    """0: blocks never run out."""
    block_size: int
    async_scheduling: bool
    lookahead: int
    static: bool
    """True for static batches."""
    closed: bool
    """True if an answer brings the next request."""
    think_s: float
    max_time_s: float
    open_until_s: float
    """Time before which open arrivals do not count as exhausted."""
    takes_verified: bool
    planned: bool
    """True if ``lengths`` decide the drafts, False if ``rounds`` hold them."""


LENGTH = np.dtype([("passes", "i8"), ("verified", "i8")])
"""`policies.batch.base.Planned`, by the number of requests."""
START = np.dtype([
    ("most", "i8"), ("runs", "i8"), ("left", "i8"), ("recorded", "i8"), ("open_ended", "?"),
])  # fmt: skip
"""A place of the recording where a round may begin (`traces.replay.layout.Places`); `left` counts
the recorded tokens from there on."""
REQUEST = np.dtype([
    ("arrival_s", "f8"), ("prompt", "i8"), ("output", "i8"), ("number", "i8"), ("sequence", "i8"),
    ("replica", "i8"), ("first", "i8"), ("recorded", "i8"), ("admissible", "?"), ("counted", "?"),
    ("prefill_left", "i8"), ("prefilled", "i8"), ("context", "i8"), ("blocks", "i8"),
    ("capacity", "i8"), ("tokens", "i8"), ("steps", "i8"), ("preemptions", "i8"),
    ("drafted", "i8"), ("accepted", "i8"), ("forwards", "i8"), ("catch_up", "i8"), ("unread", "i8"),
    ("next", "i8"), ("entered", "?"), ("left", "?"),
    ("first_s", "f8"), ("last_s", "f8"), ("around_s", "f8"),
])  # fmt: skip
"""A request.  ``first`` is the first of its ``rounds`` or of its sequence's ``starts``; ``next``
the request that waits after it; ``last_s`` the time of its last tokens."""
SEAT = np.dtype([
    ("running", "i8"), ("decodes", "i8"), ("reads", "i8"), ("chunk", "i8"), ("before", "i8"),
    ("leaves", "i8"), ("drafted", "i8"), ("accepted", "i8"), ("emitted", "i8"), ("forwards", "i8"),
    ("catch_up", "i8"),
])  # fmt: skip
"""Columns of requests: those that run, in order of admission; and of an iteration those that
decode, with their rounds, those whose prompts are read, with how many tokens and how many were
read before, and those that it ends."""
SERIES = [("interval_s", "f8"), ("integral", "f8")]
REPLICA = np.dtype([
    ("at_s", "f8"), ("order", "i8"), ("idle", "?"), ("ended", "?"), ("started_s", "f8"),
    ("busy_s", "f8"), ("area_s", "f8"), ("changed_s", "f8"), ("gaps_s", "f8"),
    ("in_system", "i8"), ("carried", "i8"), ("arrived", "i8"), ("rejected", "i8"),
    ("iterations", "i8"), ("peak_batch", "i8"), ("tokens", "i8"), ("waiting", "i8"),
    ("head", "i8"), ("tail", "i8"), ("running", "i8"), ("used", "i8"), ("decodes", "i8"),
    ("reads", "i8"), ("leaving", "i8"), ("cursor", "i8"), ("free", "i8"), ("scheduled", "i8"),
    ("asked", "i8"), ("verified", "i8"), ("length_changes", "i8"), ("drafted", "i8"),
    ("accepted", "i8"), ("draft_forwards", "i8"), ("batch", SERIES), ("kv_blocks", SERIES),
    ("unseen", "i8"), ("held_seats", "i8"), ("held_blocks", "i8"),
])  # fmt: skip
"""A replica: when its iteration ends, or it wakes (``idle``); counters of its `RunRecorder`, under
the names that they have there; how far queue, batch, pool and its free list are filled; and what
the next plan does not see yet (`Limits.async_scheduling`): requests that arrived, seats and
blocks."""
CLOCK = np.dtype([
    ("now", "f8"), ("order", "i8"), ("comes_s", "f8"), ("comes_order", "i8"), ("arrived", "i8"),
    ("wanted", "i8"), ("listed", "?"), ("exhausted", "?"), ("active", "i8"), ("alive", "i8"),
    ("gone", "i8"), ("finished", "i8"), ("think_head", "i8"),
    ("think_count", "i8"),
])  # fmt: skip
"""The state that replicas share.  ``wanted`` counts requests that are due now, ``listed`` says that
``requests`` are all there are, ``active`` is the replica whose iteration has just ended."""
THINK = np.dtype([("at_s", "f8"), ("order", "i8")])
"""When clients of a closed loop send their next request."""
FREE = np.dtype([("whose", "i8"), ("blocks", "i8")])
"""Free blocks in the order in which they are taken, and the request that may find them again, or
`NOBODY` (`simulator.serving.scheduler.BlockPool`)."""
NOBODY = -1
MARK = np.dtype([("number", "i8"), ("index", "i8"), ("at_s", "f8"), ("passed", "?")])
"""An end of the measured window: the request that arrives then, or `NOBODY` where time decides; and
the request whose arrival it is, here or elsewhere."""


class Arrays(NamedTuple):
    """All that `simulator.serving.compiled.loop.run` reads and writes."""

    limits: LoopLimits
    prices: LoopPrices
    lengths: Records
    starts: Records
    rounds: Ints
    """(rounds, fields of `policies.core.Round`)"""
    requests: Records
    left: Ints
    """Requests in the order in which they left."""
    thinking: Records
    """A ring of clients, by time."""
    clock: Records
    """(1,)"""
    marks: Records
    marked: Ints
    """(marks, replicas) tokens emitted by then."""
    replicas: Records
    seats: Records
    """(replicas, batch)"""
    free: Records
    """(replicas, entries)"""
    sums: Floats
    """(replicas, 2, points) of batch and blocks over time (`Series`)."""
    seen: Records
    """(replicas, readers + 1, origins); mixed passes put together are counted last."""
    gaps: Ints
    """(replicas, bins) of seconds between tokens."""


def zeros(of: Any, *shape: int) -> Records:
    """Return an array of records of this type."""
    return np.zeros(shape, of).view(np.recarray)


def prices_of(cost: EngineCost, most: int) -> LoopPrices:
    """Return the prices of an engine of up to `most` requests, made once per table."""
    known = _prices.setdefault(cost.latency, {})
    key = cost.extras, cost.speculates, cost.longest
    found = known.get(key)
    if found is None or len(found.hosts) <= most:
        # Sizes double, so that a study of ever larger batches does not begin again each time.
        found = known[key] = _priced(cost, max(most, 2 * len(found.hosts) if found else 0))
    return found


_prices: WeakKeyDictionary[LatencyTable, dict[tuple[frozenset[str], bool, int], LoopPrices]] = (
    WeakKeyDictionary()
)


def _priced(cost: EngineCost, most: int) -> LoopPrices:
    latency = cost.latency
    readers = zeros(READER, len(PLACES))
    batches: list[float] = []
    by_batch: list[dict[float, tuple[Floats, Floats]]] = []
    for place, own in enumerate(map(cost.phases.get, PLACES)):
        reader = readers[place]
        reader.read, reader.most = NOWHERE if own is None else place, np.inf
        reader.first = len(batches)
        if own is not None:
            grid = latency.grid(*own)
            batches += grid.batches
            by_batch += [grid.lines[batch] for batch in grid.batches]
            reader.constant, reader.only_batch = grid.flat, grid.only_batch or 0.0
            reader.only_context = grid.contexts[0] if grid.any_context else -1.0
            if not grid.flat:
                for name, weight in zip(FIT, grid.fit, strict=True):
                    reader[name] = weight
        reader.last = len(batches)
    for place, other in ((FIRST, LATER), (WITH_PROMPTS, TARGET)):
        if readers[place].read == NOWHERE:
            readers[place].read = readers[other].read
    for place in (TARGET_PREFILL, DRAFT_PREFILL):
        if readers[place].read != NOWHERE:
            model = "target" if place == TARGET_PREFILL else "draft"
            readers[place].most = latency.grid(model, "prefill").widest_together
    if readers[MIXED].read != NOWHERE:
        readers[MIXED].most = latency.grid("target", "mixed").widest
    widths = [width for lines in by_batch for width in sorted(lines)]
    lines = [lines[width] for lines in by_batch for width in sorted(lines)]
    contexts, seconds = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    above = len(batches) + len(widths)
    children = [*map(len, by_batch), *(len(own) for own, _ in lines)]
    sums = [latency.settling_sums("draft", batch) for batch in range(most + 1)]
    longest, drafts = max(map(len, sums)), cost.longest
    return LoopPrices(
        readers, np.concatenate([batches, widths, contexts]),
        np.cumsum([len(batches), *children]), np.concatenate([np.zeros(above), seconds]),
        np.array([np.pad(own, (0, longest - len(own)), "edge") for own in sums]),
        np.array([cost.judged(batch, drafts)[: drafts + 1] for batch in range(most + 1)]),
        np.array([cost.host(batch) for batch in range(most + 1)], HOST).view(np.recarray),
        latency.grid("target", "forward").quickest_s, cost.always,
    )  # fmt: skip


@once_per_trace
def starts_of(trace: Trace) -> Records:
    """Return every place of `trace` where a round may begin."""
    layout = layout_of(trace)
    left = layout.ends - np.arange(len(layout.ends))
    places = [layout.most, layout.runs, left, layout.recorded, layout.open_ended]
    return np.rec.fromarrays(places, START)


def requests_of(
    scheduler: Scheduler, trace: Trace, jobs: Sequence[Job], skip: int, replica: int
) -> Records:
    """Return requests that have not arrived yet.

    Statistics leave out those whose number is below `skip`.  `replica` serves them; negative
    where a router has yet to choose.
    """
    requests = zeros(REQUEST, len(jobs))
    if not len(jobs):
        return requests
    arrival_s, sequence, prompt, output, number = (
        np.array(column) for column in zip(*jobs, strict=True)
    )
    requests.arrival_s, requests.sequence, requests.number = arrival_s, sequence, number
    requests.prompt = requests.prefill_left = requests.context = prompt
    requests.output, requests.replica = output, replica
    requests.recorded = np.diff(np.asarray(trace.request_starts, np.int64))[sequence]
    requests.counted = number >= skip
    requests.admissible = scheduler.admissible(prompt, output)
    requests.catch_up = requests.unread = 1
    requests.next = NOBODY
    requests.first_s = requests.last_s = -1.0
    return requests


def nothing_seen(replicas: int) -> Records:
    """Return a tally without any pass."""
    seen = zeros(SEEN, replicas, len(PLACES) + 1, len(ORIGINS))
    for size in ("batch", "width", "context"):
        seen[f"least_{size}"], seen[f"most_{size}"] = math.inf, -math.inf
    return seen
