"""Rounds of single streams put together into the steps of a full batch.

A policy that decides for one request acts alike in any batch, so the rounds of a replay
can be dealt to B slots, each going through the requests in an order of its own, and the
k-th round of every slot makes the k-th step.  A step drafts as often as its longest draft
(the batch stays padded, as under CUDA graphs) and verifies the ragged total; the costs
are those of `simulator.serving.cost`.  Slots are always full and prompts cost nothing.
Arrivals, admission and prefill are left to `simulator.serving`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.arrays import Bools, Floats, Ints
from simulator.bootstrap import intervals
from simulator.pricing import PassCount, Ran, autoregressive, extras_of, priced
from simulator.ratios import RatioCosts
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.calls import passes_of, verification
from traces.replay.rounds import RoundLog

FEWEST_STEPS = 200


class BatchSteps(NamedTuple):
    """Steps of a batch, arrays of shape (steps,): those of one sample of prompts after another."""

    batch: int
    log: RoundLog
    starts: Ints
    """The first step of each sample, shape (samples,)."""
    emitted: Ints
    """Tokens of all slots."""
    longest: Ints
    """Draft passes: those of the slot that drafted longest."""
    width: Floats
    """Mean tokens per slot in the target's pass."""
    context: Floats
    """Mean tokens in the cache per slot."""
    output: Floats
    """Mean output tokens in the cache per slot."""
    catch_up: Floats
    """Mean tokens in the first draft pass per slot that drafts."""
    draft_context: Floats
    """Mean tokens in the cache per slot that drafts."""
    draft_output: Floats
    """Mean output tokens in the cache per slot that drafts."""
    rejected: Bools
    """True if any drafted token leaves the target's cache."""
    unread: Bools
    """True if any token that the draft model has read leaves its cache."""
    request: Ints
    """Index of the request that each slot runs, shape (steps, batch)."""


def in_steps(
    log: RoundLog, batch: int, rngs: Sequence[np.random.Generator], whole: bool = False
) -> BatchSteps:
    """Return steps of `batch` slots, a sample per generator, which draws requests with replacement.

    ``whole``: the first has every request, and its slots together run each round equally often, up
    to fewer than `batch` rounds.

    Raises DraftsimError if ``batch < 1`` or the log has no rounds.
    """
    if batch < 1:
        raise DraftsimError(f"batch is {batch}, expected at least 1")
    if not len(log):
        raise DraftsimError("the log has no rounds: every request ended with its first token")
    bounds = np.searchsorted(log.rounds["request"], np.arange(len(log.requests) + 1))
    context = log.context
    # One sample at a time: of long recordings, the rounds of all would take too much memory.
    samples = [
        _summed(log, context, _dealt(bounds, batch, rng, whole and not i))
        for i, rng in enumerate(rngs)
    ]
    counts = [len(emitted) for emitted, *_ in samples]
    columns = (np.concatenate(column) for column in zip(*samples, strict=True))
    return BatchSteps._make([batch, log, np.cumsum(counts) - counts, *columns])


def _dealt(bounds: Ints, batch: int, rng: np.random.Generator, whole: bool = False) -> Ints:
    """Return rounds dealt to slots, shape (steps, batch); request i has those from bounds[i]."""
    counts = np.diff(bounds)
    usable = np.flatnonzero(counts)
    # A bootstrap sample of prompts serves all slots, each in its own order.
    drawn = rng.permutation(usable) if whole else rng.choice(usable, len(usable))
    total = int(counts[drawn].sum())
    # Slots begin in the midst of a request: else all would begin together.
    if whole:
        times = min(batch, math.ceil(FEWEST_STEPS * batch / total))
        steps = math.ceil(times * total / batch)
        slots = [(drawn, slot * total // batch) for slot in range(batch)]
    else:
        steps = min(total, max(FEWEST_STEPS, total // batch))
        slots = [(rng.permutation(drawn), int(rng.integers(total))) for _ in range(batch)]
    order = np.concatenate([own for own, _ in slots])
    # The slots' rounds are counted on, so that one search finds the request that each one runs.
    ends = np.cumsum(counts[order])
    place = (np.arange(steps)[:, None] + [begin for _, begin in slots]) % total
    place += total * np.arange(batch)
    now = ends.searchsorted(place, side="right")
    return np.asarray(place - ends[now] + bounds[order[now] + 1])


def _summed(log: RoundLog, context: Ints, index: Ints) -> tuple[Any, ...]:
    """Return columns of `BatchSteps` of the dealt rounds, from ``emitted`` on."""
    rounds = log.rounds[index]
    forwards = rounds["draft_forwards"].astype(np.int64)
    drafting, held, output = forwards > 0, context[index], rounds["position"].astype(np.int64)
    some = np.maximum(drafting.sum(axis=1), 1)
    return (
        rounds["emitted"].sum(axis=1, dtype=np.int64), forwards.max(axis=1),
        rounds["drafted"].mean(axis=1, dtype=np.float64) + 1,
        held.mean(axis=1), output.mean(axis=1),
        *((values * drafting).sum(axis=1) / some for values in (rounds["catch_up"], held, output)),
        (rounds["accepted"] < rounds["drafted"]).any(axis=1),
        (rounds["accepted"] < forwards - 1).any(axis=1), rounds["request"].astype(np.int64),
    )  # fmt: skip


def step_costs(
    steps: BatchSteps, latency: LatencyTable, context: float | None = None
) -> tuple[Floats, PassCount]:
    """Return seconds of every step, shape (steps,), and the passes that they took.

    `context` replaces the recorded lengths of prompts.
    """
    held, seen = steps.context, steps.draft_context
    if context is not None:
        held, seen = context + steps.output, context + steps.draft_output
    drafted, cached = steps.width - 1, np.maximum(held - 1, 0)
    calls = verification(drafted, cached) + passes_of(steps.longest, steps.catch_up, seen, "draft")
    extras = extras_of(steps.log.reads, sampling=steps.log.sampling)
    ran = Ran(
        steps.log, "draft", calls, steps.longest, drafted, cached, steps.rejected, steps.unread,
        extras=extras,
    )  # fmt: skip
    parts, passes = priced(ran, latency, steps.batch)
    return sum(parts, np.zeros(len(held))), passes


class Speedups(NamedTuple):
    """Decoding against plain decoding, as columns of a sweep; arrays of shape (prices,)."""

    wall_s: Floats
    """Cost of as many tokens as the log emits; in a batch, at the batch's rate."""
    speedup: Floats
    """Tokens per second over plain decoding's."""
    speedup_lo: Floats
    speedup_hi: Floats
    share_below_1: Floats
    """Share of prompts that take longer than under plain decoding, by the steps they are in."""
    outside: Floats
    """Share of passes read outside the measured cells, the larger one of the two sides."""


Taken = tuple[Floats, Floats, float]
"""The time of a log's samples: of a token in each, shape (samples, prices), and of every prompt, at
the mean of its steps, shape (prices, prompts); and the share of passes outside measured cells."""


class Samples:
    """All of a log's prompts, then bootstrap samples, `count` in all, in batches of one size.

    With one `seed`, logs of the same requests draw the same prompts in the same order.
    """

    def __init__(self, log: RoundLog, batch: int, count: int, seed: int) -> None:
        rngs = [np.random.default_rng([seed, i]) for i in range(count)]
        self.steps = in_steps(log, batch, rngs, whole=True)
        self._emitted = np.add.reduceat(self.steps.emitted, self.steps.starts)
        self._rounds = log.per_request(np.ones(len(log)))
        prompts = len(self._rounds)
        self._request = self.steps.request.ravel()
        self._drawn = np.bincount(self._request, minlength=prompts)
        self._priced: dict[tuple[LatencyTable, float | None], Taken] = {}

    @property
    def drawn(self) -> Bools:
        """Return the prompts that any sample holds, shape (prompts,)."""
        return np.asarray(self._drawn > 0)

    def each(self, costs: Floats | Ints) -> Floats:
        """Return costs of the steps per token of every sample, shape (samples,)."""
        return np.asarray(np.add.reduceat(costs, self.steps.starts) / self._emitted)

    def prompt(self, costs: Floats | Ints) -> Floats:
        """Return the cost of each prompt, its rounds at the mean of their steps; shape (prompts,).

        A step takes as long for every slot, whichever request drafts longest in it.
        """
        total = np.bincount(
            self._request, np.repeat(costs, self.steps.batch), minlength=len(self._rounds)
        )
        return np.asarray(total / np.maximum(self._drawn, 1) * self._rounds)

    def at_latency(self, latency: LatencyTable, context: float | None) -> Taken:
        """Return the time with measured or assumed passes; one price, cached."""
        if (latency, context) not in self._priced:
            seconds, passes = step_costs(self.steps, latency, context)
            each, prompt = self.each(seconds)[:, None], self.prompt(seconds)[None]
            self._priced[latency, context] = each, prompt, passes.outside
        return self._priced[latency, context]

    def at_ratios(self, c: Floats, verify: float) -> Taken:
        """Return the time with a draft pass of c and a verification of `verify` target passes."""
        steps = self.steps
        costs = RatioCosts.of(steps.emitted, steps.longest, steps.width > 1)
        each, prompt = (costs.summed(own).at(c, verify) for own in (self.each, self.prompt))
        return each.T, prompt, 0.0


class InBatches:
    """A log in batches of one size, resampled: prices any table or cost ratio.

    `resamples` come in addition to all prompts once, which give the value.  ``plain`` is that of
    another log of the same requests, with as many resamples.
    """

    def __init__(
        self, log: RoundLog, batch: int, resamples: int = 30, seed: int = 0,
        plain: Samples | None = None,
    ) -> None:  # fmt: skip
        self._own = Samples(log, batch, resamples + 1, seed)
        # Both sides draw the same prompts in the same order, so that the ratio is paired.
        self.plain = plain or Samples(autoregressive(log), batch, resamples + 1, seed)
        self._tokens = float(log.rounds["emitted"].sum(dtype=np.int64))
        self._prompts = len(log.requests)

    def at_latency(self, latency: LatencyTable, context: float | None = None) -> Speedups:
        """Price with measured or assumed passes; shape (1,)."""
        return self._compared(*(s.at_latency(latency, context) for s in (self._own, self.plain)))

    def at_ratios(self, c: Floats, verify: float) -> Speedups:
        """Price with draft passes of c, verifications of `verify` target passes; shape of `c`."""
        c = np.atleast_1d(c)
        return self._compared(self._own.at_ratios(c, verify), self.plain.at_ratios(np.zeros(1), 1))

    def _compared(self, ours: Taken, plain: Taken) -> Speedups:
        (each, prompt, outside), (plain_each, plain_prompt, plain_outside) = ours, plain
        ratios = plain_each / each
        value = ratios[0]
        low = high = np.full_like(value, np.nan)
        if self._prompts > 1:
            low, high = intervals(ratios[1:], prompts=self._prompts)
        slower = prompt > plain_prompt * (1 + 1e-12)
        drawn = self._own.drawn & self.plain.drawn
        return Speedups(
            self._tokens * each[0], value, low, high, slower[:, drawn].mean(axis=1),
            np.full(len(value), max(outside, plain_outside)),
        )  # fmt: skip
