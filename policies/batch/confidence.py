"""Batch policies that read the draft's confidence: freeze, adaptive and scheduled verification."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.batch.base import BatchPolicy, IterationCost, TextbookCost
from policies.core import Load
from policies.estimators import AcceptanceEstimator, DraftProbability
from policies.spec import flag, parameter, whole, within


@dataclass(eq=False)
class ConfidenceFreeze(BatchPolicy):
    """Ends the draft where the batch's mean probability falls below `threshold`.

    vLLM ``ConfidenceThresholdPolicy`` (one stored version): k freezes at the first step
    whose mean top-1 probability over the batch is below the threshold.  The trigger
    tokens are kept.  A sequence that already finished its draft does not count.

    Parameters
    ----------
    gamma:
        K, draft steps at most.
    threshold:
        0.4 is transformers'; vLLM's default was not read.
    stop_early:
        False: all K draft steps run, as there (the decision stays on the device), and
        only k tokens are verified; True: the remaining steps are saved.
    """

    reads = ("top_prob",)
    gamma: int = parameter(5, whole, 1)
    threshold: float = parameter(0.4, within, 0, 1)
    stop_early: bool = parameter(False, flag)

    def plan(self, loads: Sequence[Load]) -> int:
        return self.gamma

    def keep_drafting(self, drafts: Sequence[Sequence[Any]]) -> bool:
        steps = max(map(len, drafts))
        return not (self.stop_early and steps and self._below(drafts, steps - 1))

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        steps = max(map(len, drafts))
        frozen = next((i + 1 for i in range(steps) if self._below(drafts, i)), steps)
        return [min(frozen, len(draft)) for draft in drafts]

    def _below(self, drafts: Sequence[Sequence[Any]], step: int) -> bool:
        probs = [draft[step].top_prob for draft in drafts if len(draft) > step]
        return bool(sum(probs) / len(probs) < self.threshold)


@dataclass(eq=False, repr=False)
class AdaptiveVerification(BatchPolicy):
    """Verifies the likeliest drafted tokens of the batch, as long as they are worth their cost.

    vLLM "adaptive verification" (documentation): every drafted token survives with the
    running product of the acceptance estimates along its draft; the best S tokens over
    all sequences are verified, S maximising (B + sum of survivals) / cost(B, B + S).
    All drafting is paid for.  Survival never rises along a draft, so the choice is a prefix of
    each; the rest is dropped.

    Parameters
    ----------
    gamma:
        Tokens drafted per sequence.
    budget:
        Verified tokens per iteration at most, the B others included; None: no limit.
    cost:
        Seconds of an iteration (`policies.batch.base.IterationCost`).
    estimator:
        Acceptance of one token (`policies.estimators`); default the draft's probability.
    """

    reads = ("prob",)
    gamma: int = parameter(5, whole, 1)
    budget: int | None = parameter(None, whole, 1)
    cost: IterationCost | None = None
    estimator: AcceptanceEstimator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cost = self.cost or TextbookCost(per_token=0.02)
        self._estimate = self.estimator or DraftProbability()
        vars(self)["reads"] = self._estimate.reads
        self._context = 0.0
        self._curves: dict[tuple[int, int, int], npt.NDArray[np.float64]] = {}

    def plan(self, loads: Sequence[Load]) -> int:
        self._context = sum(load.context for load in loads) / len(loads)
        return self.gamma

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        chances = [[self._estimate(t, i) for i, t in enumerate(draft)] for draft in drafts]
        return self._likeliest(chances, self._size(chances))

    def _size(self, chances: Sequence[Sequence[float]]) -> int:
        """Return how many drafts to verify, from each draft's acceptance estimates."""
        batch = len(chances)
        survivals = np.sort(_survivals(chances)[0])[::-1]
        room = len(survivals)
        if self.budget is not None:
            room = max(0, min(room, self.budget - batch))
        gain = batch + np.concatenate([[0.0], np.cumsum(survivals)])[: room + 1]
        steps = max(map(len, chances))
        return int(np.argmax(gain / self._curve(batch, steps)[: room + 1]))

    def _likeliest(self, chances: Sequence[Sequence[float]], size: int) -> list[int]:
        """Return how many of the `size` likeliest drafts each sequence has."""
        survivals, owners = _survivals(chances)
        # A stable sort keeps equal survivals in drafted order, hence prefixes.
        order = np.argsort(-survivals, kind="stable")[:size]
        lengths: list[int] = np.bincount(owners[order], minlength=len(chances)).tolist()
        return lengths

    def _curve(self, batch: int, steps: int) -> npt.NDArray[np.float64]:
        """Return seconds by drafts verified, 0 to batch * steps; kept per context."""
        bucket = int(self._context) // CONTEXT_BUCKET
        key = (batch, steps, bucket)
        if key not in self._curves:
            context = (bucket + 0.5) * CONTEXT_BUCKET
            tokens = np.arange(batch, batch * (steps + 1) + 1)
            self._curves[key] = self._step_s(batch, steps, tokens, context)
        return self._curves[key]

    def _step_s(
        self, batch: int, steps: int, tokens: npt.NDArray[np.int64], context: float
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of iterations that verify this many `tokens`, rising, their shape."""
        return np.array([self._cost(batch, steps, n, context) for n in tokens.tolist()])


@dataclass(eq=False, repr=False)
class ConfidenceScheduled(AdaptiveVerification):
    """Verifies the likeliest drafts of the batch by smoothed confidences, as vLLM's DSpark does.

    vLLM pull request 47808 (``enable_adaptive_verification``; its blog of 2026-08-14): the
    confidences of every request are smoothed over its rounds; how many drafts the batch verifies
    maximises expected tokens per second by the confidences of the step before, which is all that
    the host knows in time; which ones is decided by those of this step.  A request's first round
    has no step before, and counts with its own confidences.

    Parameters
    ----------
    gamma:
        Tokens drafted per sequence; 7 is DeepSeek-V4's block.
    ema:
        Weight of a request's earlier confidences, 0.8 there (``adaptive_verification_ema_alpha``).
    captured:
        Largest step in tokens that has a CUDA graph (``max_cudagraph_capture_size``): up to there
        the cost is a staircase, because a step is padded to the next graph's size.  None: no
        graphs, the cost as it is given.
    budget, cost, estimator:
        See `AdaptiveVerification`.
    """

    gamma: int = parameter(7, whole, 1)
    ema: float = parameter(0.8, within, 0, 1)
    captured: int | None = parameter(None, whole, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._requests: Sequence[Hashable] = ()
        self._smoothed: dict[Hashable, list[float]] = {}

    def plan_each(self, requests: Sequence[Hashable], loads: Sequence[Load]) -> Sequence[int]:
        self._requests = tuple(requests)
        return super().plan_each(requests, loads)

    def allot(self, drafts: Sequence[Sequence[Any]]) -> Sequence[int]:
        before, now = [], []
        for request, draft in zip(self._requests, drafts, strict=True):
            known = self._smoothed.get(request, [])
            chances = [self._estimate(token, i) for i, token in enumerate(draft)]
            smoothed = [
                self.ema * known[i] + (1 - self.ema) * c if i < len(known) else c
                for i, c in enumerate(chances)
            ]
            # The host sizes the step for as many drafts as there are.
            before.append([known[i] if i < len(known) else c for i, c in enumerate(smoothed)])
            now.append(smoothed)
        # A draft that ended early says nothing of the positions after its end.
        self._smoothed = {
            request: [*smoothed, *self._smoothed.get(request, [])[len(smoothed) :]]
            for request, smoothed in zip(self._requests, now, strict=True)
        }
        return self._likeliest(now, self._size(before))

    def _step_s(
        self, batch: int, steps: int, tokens: npt.NDArray[np.int64], context: float
    ) -> npt.NDArray[np.float64]:
        """Return the base's seconds, padded to graph sizes and never falling, as vLLM does."""
        if self.captured is not None:
            sizes = graph_sizes(self.captured)
            # A step beyond the last graph runs as it is.
            last = tokens > self.captured
            tokens = np.where(last, tokens, np.append(sizes, 0)[np.searchsorted(sizes, tokens)])
        return np.maximum.accumulate(super()._step_s(batch, steps, tokens, context))


def graph_sizes(largest: int) -> npt.NDArray[np.int64]:
    """Return the steps, in tokens, that vLLM captures CUDA graphs of, up to `largest`.

    >>> graph_sizes(32).tolist()
    [1, 2, 4, 8, 16, 24, 32]
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max(largest, 256) + 1, 16)]
    return np.array(sorted({*(n for n in sizes if n <= largest), largest}))


CAPTURED: tuple[int, ...] = tuple(graph_sizes(512).tolist())
"""Tokens of the CUDA graphs that vLLM captures by default."""


def _survivals(
    chances: Sequence[Sequence[float]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the chance that each draft and all before it are accepted, and whose it is."""
    parts = [np.cumprod(np.asarray(one, dtype=np.float64)) for one in chances]
    owners = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
    return np.concatenate([*parts, np.zeros(0)], dtype=np.float64), owners


CONTEXT_BUCKET = 256
"""Contexts closer than this share one evaluation of the cost, tokens."""
