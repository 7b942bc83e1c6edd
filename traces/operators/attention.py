"""Seconds of attention over the cache.

Two kernels do it.  Where every sequence has one new token, its cache is shared among
multiprocessors and read at nearly the memory's bandwidth (*split*).  Where some sequence has more,
in a verification or next to a prompt, each multiprocessor reads the whole cache of one sequence for
one head and up to 64 of its tokens (*unsplit*).  Hopper's kernels split either way.

    split    = launch + sequences x heads_kv x each + bytes of the cache / (share x bandwidth)
    unsplit  = launch + read x (context + tokens / 2) x max(1, blocks / multiprocessors)
    blocks   = sequences x heads x ceil(tokens / 64)

A long prompt is bound by arithmetic, not by reading (`COMPUTED`).

Both are read from timings where a GPU has them for as many heads; elsewhere the laws are fitted to
the timings of the same GPU, or else of others.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from policies.arrays import Floats
from traces.latency.interpolate import non_negative
from traces.latency.table import combined
from traces.operators.devices import Device
from traces.operators.shapes import ARCHITECTURES, BYTES, Architecture
from traces.operators.table import OperatorTable

MEASURED, OWN_LAW, LAW = "measured", "by bytes, fitted on this GPU", "by bytes, fitted on others"
PROMPT = 1024
"""Tokens of the prompt in the steps that time sequences decoding with a prompt."""
TILE = 64
"""Tokens of a sequence that an unsplit block takes."""
SPLIT = (11.7e-6, 0.0187e-6, 0.897)
"""Launch, seconds for a sequence's head, and share of the bandwidth: the means of those fitted to
the RTX 4090 and to the RTX PRO 6000, each of which predicts the other within 6% in the median."""
UNSPLIT_S = 5e-6
READ_S = {"rtx-3090": 51e-9, "rtx-a6000": 48e-9, "rtx-4090": 32e-9, "rtx-pro-6000": 22.8e-9}
"""Seconds an unsplit block takes for a token of the cache.  Timed on all but the RTX 3090, whose
multiprocessors are the A6000's at another clock."""
OTHERS_READ_S = 37e-9
"""The same of an A100 and others: 52 cycles at its clock, where those timed take 47 to 86; assumed
within a factor of 1.4."""
COMPUTED = 0.6
"""Share of its peak at which a GPU whose attention was not timed attends to long contexts.  Long
prompts reach 0.59 on the RTX PRO 6000 and 0.85 on the RTX 4090, and 0.6 on an A100 and an H100 in
the papers on FlashAttention 2 and 3."""
PUBLISHED = 1024
"""Tokens that a prompt of 2,048 attends to in the mean.  Published prompts on an A100 and an H100
are no longer; up to there a token takes what `OTHERS_READ_S` says."""
HOPPER = ("h100", "h200", "h800", "h20")
"""GPUs whose kernels split the cache for several tokens a sequence, too (FlashAttention 3)."""


class Heads(NamedTuple):
    """The heads of one GPU."""

    heads: float
    kv_heads: float
    head_dim: int

    @property
    def cached_bytes(self) -> float:
        """Bytes that a token of the cache takes in one layer."""
        return 2 * self.kv_heads * self.head_dim * BYTES


def heads_of(model: Architecture, shared: int) -> Heads:
    """Return the heads of one of the GPUs that share a model."""
    return Heads(model.heads / shared, model.kv_heads_on(shared), model.head_dim)


class Plane(NamedTuple):
    """Seconds by size and context: (sizes,), (contexts,) and (sizes, contexts)."""

    sizes: Floats
    contexts: Floats
    seconds: Floats

    def at(self, sizes: Floats, contexts: Floats) -> Floats:
        """Return seconds between the timings; beyond the last they go on in proportion."""
        inside = np.clip(sizes, self.sizes[0], self.sizes[-1])
        near = np.clip(contexts, self.contexts[0], None)
        lines = np.array([_carried(self.contexts, line, near) for line in self.seconds])
        at = np.clip(self.sizes.searchsorted(inside) - 1, 0, max(len(self.sizes) - 2, 0))
        after = np.minimum(at + 1, len(self.sizes) - 1)
        gap = self.sizes[after] - self.sizes[at]
        share = np.divide(inside - self.sizes[at], gap, out=np.zeros(len(at)), where=gap > 0)
        each = np.arange(len(at))
        found = lines[at, each] * (1 - share) + lines[after, each] * share
        return np.asarray(found * np.maximum(sizes / self.sizes[-1], 1.0))


def _carried(contexts: Floats, seconds: Floats, at: Floats) -> Floats:
    found = np.interp(at, contexts, seconds)
    if len(contexts) > 1:
        slope = (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2])
        found += np.maximum(at - contexts[-1], 0) * max(slope, 0.0)
    return np.asarray(found)


class Timed(NamedTuple):
    """The timings of one GPU for one number of heads."""

    split: Plane
    chunk: Plane
    """By tokens of a prompt's chunk."""
    unsplit: Plane
    """By sequences that decode in a step with a chunk of a few tokens."""
    with_prompts: Plane
    """Time that decoding sequences add to a prompt of `PROMPT` tokens in the same step."""

    def chunk_s(self, width: Floats, context: Floats) -> Floats:
        """Return seconds of a prompt's chunk after this context.

        One longer than those timed takes what its parts take one after the other: each attends to
        those before it, so that a prompt of twice the tokens takes four times as long.
        """
        most = float(self.chunk.sizes[-1])
        found = self.chunk.at(np.minimum(width, most), context)
        begun = most
        while (longer := width > begun).any():
            left = np.minimum(width[longer] - begun, most)
            found[longer] += self.chunk.at(left, context[longer] + begun)
            begun += most
        return found


class AttentionOperators:
    """Attention on one device, at any model's heads."""

    def __init__(self, table: OperatorTable, device: Device) -> None:
        self.device = device
        self._timed: dict[Heads, Timed] = {}
        for name, timed in timed_planes(table, device.name).items():
            model, _, shared = name.partition("@tp")
            if model in ARCHITECTURES:
                heads = heads_of(ARCHITECTURES[model], int(shared or 1))
                self._timed.setdefault(heads, timed)

    @property
    def splits_all(self) -> bool:
        """True if passes over several tokens of a sequence share its cache, too."""
        return self.device.name in HOPPER

    def origin(self, model: Architecture, shared: int) -> str:
        """Return how attention of a model is known."""
        if heads_of(model, shared) in self._timed:
            return MEASURED
        return OWN_LAW if self._timed else LAW

    def split_s(self, heads: Heads, batch: Floats, context: Floats) -> Floats:
        """Return seconds of a layer with one new token a sequence; never less than its bytes."""
        least = batch * context * heads.cached_bytes / self.device.bandwidth
        timed = self._timed.get(heads)
        if timed is None:
            return np.maximum(self.by_law(self.law, heads, batch, context), least)
        return np.maximum(timed.split.at(batch, context), least)

    def unsplit_s(self, heads: Heads, batch: Floats, width: Floats, context: Floats) -> Floats:
        """Return the same with `width` new tokens a sequence, or in a step with a prompt."""
        tiles = np.ceil(width / TILE)
        law = self._unsplit_law(heads, batch, width, context)
        timed = self._timed.get(heads)
        if timed is None:
            return law
        alone = timed.chunk_s(width, context)
        several = timed.unsplit.at(batch, context)
        grown = alone * law / self._unsplit_law(heads, np.ones(len(batch)), width, context)
        few = np.where(batch > 1, several, alone)
        # A sequence is never cheaper with others than alone.
        return np.maximum(np.where(tiles > 1, grown, few), alone)

    def with_prompts_s(self, heads: Heads, batch: Floats, width: Floats, context: Floats) -> Floats:
        """Return the seconds that decoding sequences add to a prompt's attention."""
        split = self.split_s(heads, batch, context + width)
        if self.splits_all:
            return split
        timed = self._timed.get(heads)
        found = self.unsplit_s(heads, batch, width, context)
        if timed is not None:
            found = np.maximum(found, timed.with_prompts.at(batch, context))
        return np.maximum(found, split)

    def pass_s(self, heads: Heads, batch: Floats, width: Floats, context: Floats) -> Floats:
        """Return seconds of a layer's attention in a pass over `width` tokens a sequence."""
        split = self.split_s(heads, batch, context + width)
        wide = width > 1
        if not wide.any():
            return split
        unsplit = self.unsplit_s(heads, batch, width, context)
        if self.splits_all:
            # Many tokens are bound by arithmetic, however the cache is shared.
            unsplit = np.where(width > TILE, unsplit, split)
        return np.where(wide, np.maximum(unsplit, split), split)

    @cached_property
    def law(self) -> tuple[float, float, float]:
        """Launch, seconds for a sequence's head and share of the bandwidth, of `split_s`."""
        if not self._timed:
            return SPLIT
        features, target = [], []
        for heads, timed in self._timed.items():
            batch, context = combined(timed.split.sizes, timed.split.contexts)
            seconds = timed.split.seconds.ravel()
            read = batch * context * heads.cached_bytes / self.device.bandwidth
            columns = np.stack([np.ones(len(batch)), batch * heads.kv_heads, read], axis=1)
            features.append(columns / seconds[:, None])
            target.append(np.ones(len(seconds)))
        launch, each, times = non_negative(np.concatenate(features), np.concatenate(target))
        return float(launch), float(each), float(1 / max(times, 1.0))

    def by_law(
        self, law: tuple[float, float, float], heads: Heads, batch: Floats, context: Floats
    ) -> Floats:
        """Return seconds with one token a sequence, by a `law` of this GPU or another."""
        launch, each, share = law
        read = batch * context * heads.cached_bytes / (share * self.device.bandwidth)
        return np.asarray(launch + each * batch * heads.kv_heads + read)

    def _unsplit_law(self, heads: Heads, batch: Floats, width: Floats, context: Floats) -> Floats:
        read_s = READ_S.get(self.device.name, 27e-9 if self.splits_all else OTHERS_READ_S)
        blocks = batch * heads.heads * np.ceil(width / TILE)
        waves, attended = blocks / self.device.processors, context + width / 2
        paced_s = read_s * attended
        if self.device.name not in READ_S:
            each = 4 * TILE * heads.head_dim * self.device.processors / self.device.flops
            further = np.maximum(attended - PUBLISHED, 0.0)
            further *= max(read_s - each / COMPUTED, 0.0)
            paced_s = np.where(width > TILE, paced_s - further, paced_s)
        return np.asarray(UNSPLIT_S + np.maximum(read_s * attended, paced_s * waves))


def timed_planes(table: OperatorTable, device: str) -> dict[str, Timed]:
    """Return the timings of a GPU by what they are of: a model, and the GPUs that share it."""
    rows = table.of(device=device, operator="attention", longest=0)
    found = {}
    for (name, shared), own in rows.groupby(["model", "tensor_parallel"], sort=False):
        timed = _timed(own)
        if timed is not None:
            found[str(name) if shared == 1 else f"{name}@tp{shared}"] = timed
    return found


def _timed(rows: pd.DataFrame) -> Timed | None:
    alone = rows[rows["batch"] == 0]
    few = int(alone["tokens"].min()) if len(alone) else 0
    fresh = rows[(rows["context"] == 0) & (rows["batch"] > 0)]
    unsplit = _plane(fresh[fresh["tokens"] == few], "batch", "batch_context")
    by_prompt = fresh[fresh["tokens"] == PROMPT]
    prompt = alone.loc[(alone["tokens"] == PROMPT) & (alone["context"] == 0), "seconds"]
    if len(prompt):
        added = np.maximum(by_prompt["seconds"] - prompt.median(), 0)
        by_prompt = by_prompt.assign(seconds=added)
    with_prompts = _plane(by_prompt, "batch", "batch_context")
    split = _plane(rows[rows["tokens"] == 0], "batch", "batch_context")
    chunk = _plane(alone, "tokens", "context")
    if split is None or chunk is None or unsplit is None:
        return None
    return Timed(split, chunk, unsplit, with_prompts or unsplit)


def _plane(rows: pd.DataFrame, size: str, context: str) -> Plane | None:
    if rows.empty:
        return None
    table = rows.pivot_table(index=size, columns=context, values="seconds", aggfunc="median")
    # A context that few sizes have is filled in between its neighbours.
    table = table.interpolate(axis=1, method="index", limit_direction="both")
    return Plane(table.index.to_numpy(float), table.columns.to_numpy(float), table.to_numpy(float))
