"""What the compiled engine reads and writes: numbers and records of numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from simulator.serving.compiled.prices import Ints, Prices, Records
from simulator.serving.outcome.statistics import Histogram

WIDTH = Histogram.WIDTH
FINEST = math.floor(math.log(1e-9) / WIDTH)
"""The lowest bin of seconds between tokens (`Histogram`)."""
BINS = 10_000
"""Of gaps; the last holds those of a thousand million seconds."""


class Limits(NamedTuple):
    """Of `simulator.serving.scheduler.Limits`; ``kv_blocks`` 0: they never run out."""

    max_batch: int
    token_budget: int
    kv_blocks: int
    block_size: int
    chunked_prefill: bool
    prefix_caching: bool
    whole_prompts: bool
    lookahead: int


REQUEST = np.dtype([
    ("arrival_s", "f8"), ("prompt", "i8"), ("output", "i8"), ("number", "i8"), ("sequence", "i8"),
    ("first_round", "i8"), ("rounds", "i8"), ("over", "i8"), ("admissible", "?"), ("counted", "?"),
    ("prefill_left", "i8"), ("prefilled", "i8"), ("context", "i8"), ("blocks", "i8"),
    ("capacity", "i8"), ("tokens", "i8"), ("steps", "i8"), ("preemptions", "i8"),
    ("first_s", "f8"), ("last_s", "f8"), ("around_s", "f8"),
])  # fmt: skip
"""A request, in order of arrival: what is known of it, ``over`` of its last round's tokens that it
does not want; and what has become of it, ``last_s`` when it last got tokens."""
QUEUE = np.dtype([("waits", "i8"), ("left", "i8")])
"""Two columns of places of requests: the queue, from ``head`` to ``tail``, and who left, as they
did."""
ROUND = np.dtype([
    ("drafted", "i8"), ("accepted", "i8"), ("emitted", "i8"), ("forwards", "i8"),
    ("catch_up", "i8"),
])  # fmt: skip
"""Of `policies.core.Round`: the rounds of all sequences, one behind the other."""
SEAT = np.dtype([("running", "i8"), ("decodes", "i8"), ("reads", "i8"), ("chunk", "i8")])
"""Columns of places of requests: who runs, in order of admission; of an iteration, who decodes,
and whose prompts are read, with how many tokens of them."""
STATE = np.dtype([
    ("now", "f8"), ("busy_s", "f8"), ("area_s", "f8"), ("changed_s", "f8"), ("gaps_s", "f8"),
    ("in_system", "i8"), ("arrived", "i8"), ("iterations", "i8"), ("peak_batch", "i8"),
    ("tokens", "i8"), ("head", "i8"), ("tail", "i8"), ("running", "i8"), ("finished", "i8"),
    ("used", "i8"), ("marked", "i8"), ("decodes", "i8"), ("reads", "i8"), ("free", "i8"),
])  # fmt: skip
"""The recorder's counters, and how far queue, batch, pool and its free list are filled."""
FREE = np.dtype([("whose", "i8"), ("blocks", "i8")])
"""Free blocks in the order in which they are taken, and the request that may find them again, or
`NOBODY` (`simulator.serving.kv.BlockPool`)."""
NOBODY = -1
MARK = np.dtype([("at_s", "f8"), ("tokens", "i8")])
"""An end of the measured window, and the tokens emitted by then."""
ITERATION = np.dtype([
    ("start_s", "f8"), ("end_s", "f8"), ("running", "f8"), ("kv_blocks", "f8"),
])  # fmt: skip


class Arrays(NamedTuple):
    """All that `run` reads and writes."""

    limits: Limits
    prices: Prices
    rounds: Records
    requests: Records
    queue: Records
    free: Records
    seats: Records
    state: Any
    """One record."""
    marks: Records
    seen: Records
    """(readers + 1, origins), of `simulator.serving.compiled.prices.read`."""
    gaps: Ints
    """(bins,) of seconds between tokens."""
    log: Records
    """Of the iterations since `run` was called."""
