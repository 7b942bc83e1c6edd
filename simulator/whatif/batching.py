"""Rounds of single streams put together into the steps of a full batch.

A policy that decides for one request acts alike in any batch, so the rounds of a replay
can be dealt to B slots, each going through the requests in an order of its own, and the
k-th round of every slot makes the k-th step.  A step drafts as often as its longest draft
(the batch stays padded, as under CUDA graphs) and verifies the ragged total; the costs
are those of `simulator.serving.cost.iteration`.  Slots are always full and prompts cost nothing:
what arrivals, admission and prefill do to it is the serving simulator's to say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.host import host_seconds
from simulator.pricing import autoregressive
from traces.errors import DraftsimError
from traces.latency.settling import settling_s
from traces.latency.table import EXTRAPOLATED, Estimate, LatencyTable
from traces.replay.rounds import RoundLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FEWEST_STEPS = 200


class Steps(NamedTuple):
    """Steps of a batch, arrays of shape (steps,)."""

    batch: int
    emitted: Ints
    """Tokens of all slots."""
    longest: Ints
    """Draft passes: those of the slot that drafted longest."""
    width: Floats
    """Mean tokens per slot in the target's pass."""
    catch_up: Floats
    """Mean tokens per slot in the first draft pass."""
    context: Floats
    """Mean tokens in the cache per slot."""
    rolled_back: Bools
    """Whether any slot had a draft rejected."""
    reads: bool
    """Whether the policy reads signals."""
    request: Ints
    """Whose round each slot runs, shape (steps, batch)."""


def in_steps(log: RoundLog, batch: int, rng: np.random.Generator) -> Steps:
    """Steps of `batch` slots; requests are drawn with replacement, so that steps vary with them.

    Raises
    ------
    DraftsimError
        If ``batch < 1`` or the log has no rounds.
    """
    if batch < 1:
        raise DraftsimError(f"batch is {batch}, expected at least 1")
    if not len(log):
        raise DraftsimError("the log has no rounds: every request ended with its first token")
    bounds = np.searchsorted(log.rounds["request"], np.arange(len(log.requests) + 1))
    counts = np.diff(bounds)
    usable = np.flatnonzero(counts)
    # A bootstrap sample of prompts serves all slots, each in its own order.
    drawn = rng.choice(usable, len(usable))
    total = int(counts[drawn].sum())
    steps = min(total, max(FEWEST_STEPS, total // batch))
    index = np.empty((steps, batch), dtype=np.int64)
    for slot in range(batch):
        order = rng.permutation(drawn)
        lengths = counts[order]
        ends = np.cumsum(lengths)
        offset = np.arange(total) - np.repeat(ends - lengths, lengths)
        rows = np.repeat(bounds[order], lengths) + offset
        # Slots begin in the midst of a request: else all would begin together.
        index[:, slot] = np.take(rows, np.arange(steps) + rng.integers(total), mode="wrap")
    rounds, context = log.rounds[index], log.context[index]
    forwards = rounds["draft_forwards"].astype(np.int64)
    drafting = forwards > 0
    some = np.maximum(drafting.sum(axis=1), 1)
    rejected = np.asarray((rounds["accepted"] < rounds["drafted"]).any(axis=1), dtype=np.bool_)
    return Steps(
        batch, rounds["emitted"].sum(axis=1, dtype=np.int64), forwards.max(axis=1),
        rounds["drafted"].mean(axis=1, dtype=np.float64) + 1,
        (rounds["catch_up"] * drafting).sum(axis=1) / some,
        context.mean(axis=1), rejected, bool(log.reads), rounds["request"].astype(np.int64),
    )  # fmt: skip


class StepCosts(NamedTuple):
    """What the steps of a batch take, and how far that is known."""

    seconds: Floats
    """Of every step, shape (steps,)."""
    passes: int
    """Model passes of all steps."""
    outside: int
    """Those of them that were read outside the measured cells."""


def step_costs(steps: Steps, latency: LatencyTable, context: float | None = None) -> StepCosts:
    """Costs of every step; `context` replaces the recorded one."""
    batch = steps.batch
    held = steps.context if context is None else np.full(len(steps.width), float(context))
    # Rounded to whole tokens: a table is read once per distinct width.
    width = np.round(steps.width * batch) / batch
    read = latency.estimate(
        "target", "forward", batch=batch, new_tokens=width, context=np.maximum(held - 1, 0)
    )
    passes, outside = len(width), _outside(read)
    total = read.seconds + host_seconds(latency, "host_round", batch)
    ran = steps.longest > 0
    if ran.any():
        count = steps.longest[ran]
        first = np.maximum(np.round(steps.catch_up[ran] * batch) / batch, 1.0)
        draft = latency.estimate(
            "draft", latency.first_draft_phase("draft"), batch=batch, new_tokens=first,
            context=np.maximum(held[ran] - first, 0),
        )  # fmt: skip
        later = latency.estimate("draft", "forward", batch=batch, context=held[ran] + count / 2)
        passes += int(count.sum())
        outside += _outside(draft) + _outside(later, count - 1)
        each = host_seconds(latency, "host_draft", batch)
        if steps.reads:
            each += host_seconds(latency, "signal", batch)
        total[ran] += draft.seconds + (count - 1) * later.seconds + count * each
        total[ran] += settling_s(latency, "draft", batch, count - 1)
    if latency.has("target", "rollback"):
        total += steps.rolled_back * host_seconds(latency, "rollback", batch)
    return StepCosts(np.asarray(total), passes, outside)


def _outside(read: Estimate, times: Ints | int = 1) -> int:
    return int(((read.origin == EXTRAPOLATED) * times).sum())


class InBatch(NamedTuple):
    """Decoding in a full batch beside plain decoding in one as large; arrays of shape (prices,)."""

    speedup: Floats
    """Tokens per second over plain decoding's."""
    low: Floats
    high: Floats
    wall: Floats
    """Cost of as many tokens as the log emits, at the batch's rate."""
    below_1: Floats
    """Share of prompts that take longer than under plain decoding, by the steps they are in."""
    outside: float = 0.0
    """Share of passes read outside the measured cells, of either side's the larger one."""


class InBatches:
    """A log in batches of one size, resampled: prices any table or cost ratio.

    Parameters
    ----------
    log:
        Rounds of single streams under a policy.
    batch:
        Slots.
    resamples:
        Bootstrap samples of prompts.
    confidence, seed:
        Of the percentile interval.
    """

    def __init__(
        self, log: RoundLog, batch: int, resamples: int = 30, confidence: float = 0.95,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.confidence = confidence
        plain = autoregressive(log)
        # Both sides draw the same prompts in the same order, so that the ratio is paired.
        self.runs = [
            [in_steps(one, batch, np.random.default_rng([seed, i])) for one in (log, plain)]
            for i in range(resamples + 1)
        ]
        self._rounds = [one.per_request(np.ones(len(one))) for one in (log, plain)]
        self._tokens = float(log.rounds["emitted"].sum(dtype=np.int64))

    def at_latency(self, latency: LatencyTable, context: float | None = None) -> InBatch:
        """With measured or assumed passes; shape (1,)."""
        sides: list[list[Floats]] = [[], []]
        passes, outside = np.zeros(2), np.zeros(2)
        for run in self.runs:
            for side, steps in enumerate(run):
                costs = step_costs(steps, latency, context)
                sides[side].append(costs.seconds[None])
                passes[side] += costs.passes
                outside[side] += costs.outside
        found = self._compared(*sides)
        return found._replace(outside=float((outside / passes).max()))

    def at_ratios(self, c: Floats, verify: float) -> InBatch:
        """With a draft pass of c and a verification of `verify` target passes; shape of `c`."""
        c = np.atleast_1d(c)
        ours = [
            np.multiply.outer(c, run.longest) + np.where(run.longest > 0, verify, 1.0)
            for run, _ in self.runs
        ]
        return self._compared(ours, [np.ones((1, len(plain.emitted))) for _, plain in self.runs])

    def _compared(self, ours: list[Floats], plain: list[Floats]) -> InBatch:
        """From the costs of every run's steps, each of shape (prices or 1, steps)."""
        own, theirs = (
            np.array([cost.sum(axis=1) / steps.emitted.sum()
                      for cost, steps in zip(costs, runs, strict=True)])
            for costs, runs in zip((ours, plain), zip(*self.runs, strict=True), strict=True)
        )  # fmt: skip
        ratios = theirs / own
        value = ratios.mean(axis=0)
        low = high = np.full_like(value, np.nan)
        if len(ratios) > 2:
            tails = [50 * (1 - self.confidence), 50 * (1 + self.confidence)]
            low, high = np.percentile(ratios, tails, axis=0)
        slower = self._per_prompt(0, ours) > self._per_prompt(1, plain) * (1 + 1e-12)
        drawn = self._drawn(0) & self._drawn(1)
        return InBatch(
            value, low, high, self._tokens * own.mean(axis=0), slower[:, drawn].mean(axis=1)
        )

    def _drawn(self, side: int) -> Bools:
        """Which prompts any run of a side holds, shape (prompts,)."""
        return np.asarray(self._counts(side) > 0)

    def _counts(self, side: int) -> Ints:
        """Rounds of each prompt in all runs, shape (prompts,)."""
        prompts = len(self._rounds[side])
        return np.asarray(
            sum(np.bincount(run[side].request.ravel(), minlength=prompts) for run in self.runs)
        )

    def _per_prompt(self, side: int, costs: list[Floats]) -> Floats:
        """Cost of each prompt, its rounds at the mean of their steps; shape (prices or 1, prompts).

        A step takes as long for every slot, whoever drafts longest in it.
        """
        from scipy.sparse import coo_array

        rounds = self._rounds[side]
        total = np.zeros((len(costs[0]), len(rounds)))
        for run, cost in zip(self.runs, costs, strict=True):
            request = run[side].request
            # How often each prompt is in each step, as one product over the prices.
            steps = np.repeat(np.arange(len(request)), self.batch)
            share = coo_array(
                (np.ones(request.size), (steps, request.ravel())), (len(request), len(rounds))
            )
            total += np.asarray(cost @ share.tocsr())
        return total / np.maximum(self._counts(side), 1) * rounds
