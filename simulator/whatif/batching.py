"""Rounds of single streams put together into the steps of a full batch.

A policy that decides for one request acts alike in any batch, so the rounds of a replay
can be dealt to B slots, each going through the requests in an order of its own, and the
k-th round of every slot makes the k-th step.  A step drafts as often as its longest draft
(the batch stays padded, as under CUDA graphs) and verifies the ragged total; the costs
are those of `simulator.serving.cost`.  Slots are always full and prompts cost nothing:
what arrivals, admission and prefill do to it is the serving simulator's to say.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.pricing import autoregressive
from simulator.whatif.cost import host_seconds
from traces.errors import DraftsimError
from traces.latency import LatencyTable
from traces.rounds import RoundLog

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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
    rolled_back: npt.NDArray[np.bool_]
    """Whether any slot had a draft rejected."""
    reads: bool
    """Whether the policy reads signals."""


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
        context.mean(axis=1), rejected, bool(log.reads),
    )  # fmt: skip


def step_seconds(steps: Steps, latency: LatencyTable, context: float | None = None) -> Floats:
    """Seconds of every step, shape (steps,); `context` replaces the recorded one."""
    batch = steps.batch
    held = steps.context if context is None else np.full(len(steps.width), float(context))
    # Rounded to whole tokens: a table is read once per distinct width.
    width = np.round(steps.width * batch) / batch
    total = latency.seconds(
        "target", "forward", batch=batch, new_tokens=width, context=np.maximum(held - 1, 0)
    )
    total = total + host_seconds(latency, "host_round", batch)
    ran = steps.longest > 0
    if ran.any():
        count = steps.longest[ran]
        first = np.maximum(np.round(steps.catch_up[ran] * batch) / batch, 1.0)
        draft = latency.seconds(
            "draft", latency.first_draft_phase, batch=batch, new_tokens=first,
            context=np.maximum(held[ran] - first, 0),
        )  # fmt: skip
        later = latency.seconds("draft", "forward", batch=batch, context=held[ran] + count / 2)
        each = host_seconds(latency, "host_draft", batch)
        if steps.reads:
            each += host_seconds(latency, "signal", batch)
        total[ran] += draft + (count - 1) * later + count * each
    if latency.has("target", "rollback"):
        total += steps.rolled_back * host_seconds(latency, "rollback", batch)
    return np.asarray(total)


class BatchSpeedup(NamedTuple):
    """Tokens per second over plain decoding's in the same batch, with its interval."""

    speedup: Floats
    low: Floats
    high: Floats


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

    def at_latency(self, latency: LatencyTable, context: float | None = None) -> BatchSpeedup:
        """With measured or assumed passes; shape (1,)."""
        ratios = []
        for run, plain in self.runs:
            ours = run.emitted.sum() / step_seconds(run, latency, context).sum()
            theirs = plain.emitted.sum() / step_seconds(plain, latency, context).sum()
            ratios.append([ours / theirs])
        return self._interval(np.array(ratios))

    def at_ratios(self, c: Floats, verify: float) -> BatchSpeedup:
        """With a draft pass of c and a verification of `verify` target passes; shape of `c`."""
        ratios = []
        for run, plain in self.runs:
            drafting = run.longest > 0
            cost = c * run.longest.sum() + np.where(drafting, verify, 1.0).sum()
            per_step = plain.emitted.sum() / len(plain.emitted)
            ratios.append(run.emitted.sum() / cost / per_step)
        return self._interval(np.array(ratios))

    def _interval(self, ratios: Floats) -> BatchSpeedup:
        value = ratios.mean(axis=0)
        if len(ratios) < 3:
            return BatchSpeedup(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
        tails = [50 * (1 - self.confidence), 50 * (1 + self.confidence)]
        low, high = np.percentile(ratios, tails, axis=0)
        return BatchSpeedup(value, low, high)
