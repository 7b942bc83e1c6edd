"""Measures the passes and the host's work of batched decoding.

Every cell runs what `profiler.decoding.batch` runs.  A cell of batch B and N new tokens is a pass
over the full rectangle of B x N tokens after equal contexts; a ragged pass runs the
rectangle that its widest sequence and longest context span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from policies.lengths.basic import Fixed
from policies.together import PerRequest, Together
from profiler.decoding.batch import (
    BatchedDecoder,
    BatchToken,
    DraftStep,
    Stream,
    enter,
    speculate_batch,
)
from profiler.latency.host import HOST_GAMMAS, Spent, host_cells
from profiler.latency.passes import Pass, Points, random_ids, rounds, signal_block
from profiler.latency.table import Block, Grid, Step, Stopwatch
from profiler.machine import Repeats, Timing
from profiler.models.runner import Runner

MOST_PREFILLED = 4096
"""Most tokens of a measured prefill of a batch; further tokens take as long each."""


def batch_blocks(
    target: Runner, draft: Runner | None, grid: Grid, *, apart: Points = (), short: bool = False
) -> list[Block]:
    """Return prefill and decoding passes and the signals' cost, at every batch above 1.

    ``target`` and ``draft`` (None: there is none) have room for ``max(grid.batches)`` sequences.
    ``apart`` and ``short``: as in `profiler.latency.passes.pass_blocks`.
    """
    blocks: list[Block] = []
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    for runner in models.values():
        _fill(runner)
    contexts = [c for c in grid.contexts if c + grid.widest <= target.cache.slots]
    for batch in [b for b in grid.batches if b > 1]:
        for name, runner in models.items():
            for length in grid.prompts:
                if length <= runner.cache.slots and batch * length <= MOST_PREFILLED:
                    run = batch_pass(runner, batch, length, 0, 1)
                    blocks.append(Block([[Step(name, "prefill", length, 0, run, batch)]]))
        verify = _passes(target, batch, 0)
        propose = None if draft is None else _passes(draft, batch, 1)
        # A pass over a batch outweighs what the caches keep: fewer rounds will do.
        blocks += rounds(
            verify, propose, grid.batch_widths, contexts, apart, batch=batch, untimed=1, short=short
        )
        if draft is not None and propose is not None:
            read = _signals(torch.randn(batch, draft.vocab_size, device=draft.device,
                                        dtype=draft.model.dtype))  # fmt: skip
            blocks.append(
                signal_block(verify, propose, read, grid.batch_widths, min(contexts), batch, short)
            )
    return blocks


def _passes(runner: Runner, batch: int, keep: int) -> Pass:
    return lambda width, context: batch_pass(runner, batch, width, context, keep)


def _fill(runner: Runner) -> None:
    """Put real keys and values into every slot of every row."""
    with torch.inference_mode():
        runner.forward(random_ids(runner, runner.cache.slots), 0, keep=1)
        for row in range(1, runner.cache.batch):
            runner.cache.copy_row(0, row)


def batch_pass(
    runner: Runner, batch: int, width: int, context: int, keep: int
) -> Callable[[], Tensor]:
    """Return a call that makes one pass over `width` tokens of every sequence; its logits."""
    ids = random_ids(runner, batch, width)
    places = torch.arange(context, context + width, device=runner.device).expand(batch, width)
    return lambda: runner.forward_batch(ids, places, context + width, keep=keep)


def _signals(logits: Tensor) -> Callable[[], object]:
    picks = logits.argmax(-1)
    return lambda: BatchToken(DraftStep(logits, picks), 0, None).prob


class _Idle(Runner):
    """A replacement for a model that does no work, so that only the host's time is left."""

    def __init__(self, like: Runner) -> None:
        self.device, self.cache, self.max_positions = like.device, like.cache, like.max_positions
        shape = (1, max(HOST_GAMMAS) + 1, like.vocab_size)
        rows = torch.randn(shape, device=like.device, dtype=like.model.dtype)
        # Alike for all sequences: they then accept alike and end together.
        self._rows = rows.repeat(like.cache.batch, 1, 1)

    def forward_batch(
        self, tokens: Tensor, positions: Tensor, visible: int, *, first: int = 0, keep: int = 0
    ) -> Tensor:
        """Return some fixed rows, as many as asked for."""
        del positions, visible, first
        return self._rows[: tokens.shape[0], : keep or tokens.shape[1]]


def measure_batch_host(
    target: Runner, draft: Runner, batches: Sequence[int], *, repeats: int = 15, tokens: int = 40
) -> pd.DataFrame:
    """Measure seconds per iteration and per batched draft step outside the models, by a linear fit.

    The real loop decodes `tokens` tokens a sequence, both models replaced by ones that do
    nothing; one row per phase and batch above 1, named ``host_round`` and ``host_draft``.
    """
    batches = [b for b in batches if b > 1]
    idle = _Idle(target), _Idle(draft)
    watch, again = Stopwatch(target.device), Repeats()

    def run(batch: int, gamma: int) -> tuple[Timing, list[int]]:
        decoder, together = BatchedDecoder(*idle, watch_eos=False), PerRequest(Fixed(gamma))
        prompt = torch.zeros(4, dtype=torch.long, device=target.device)
        enter(decoder, together, [Stream(k, prompt, tokens) for k in range(batch)])
        log: list[int] = []
        return watch.measure(_run_into(log, decoder, together)), log

    def spent(batch: int, gamma: int) -> Spent:
        taken, log = again.best(partial(run, batch, gamma))
        return taken.seconds, len(log), sum(log)

    parts = [host_cells(b, HOST_GAMMAS, repeats, partial(spent, b)) for b in batches]
    return pd.concat(parts, ignore_index=True)


def _run_into(log: list[int], decoder: BatchedDecoder, together: Together) -> Callable[[], object]:
    """Append each iteration's draft steps to `log`."""
    return lambda: log.extend(
        max(outcome.draft_forwards for _, outcome in iteration)
        for iteration in speculate_batch(decoder, together)
    )
