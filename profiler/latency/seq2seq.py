"""The latency cells of an encoder-decoder pair, in the same table as a causal pair's.

A decoder's pass attends to the source and to the tokens decoded so far, through as many
attentions of the same cost, so its cells' ``context`` is the sum of both; they are measured
with half of it on either side.  A trace's prompt length is that of the source, so the context
that replay prices, prompt and output so far, is this sum.  ``prefill`` is the encoder's pass
and the decoder's first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from profiler.decoding.single import ModelToken
from profiler.latency.layers import measure_layers
from profiler.latency.passes import decoding_blocks, signal_block
from profiler.latency.table import Block, Grid, Step
from profiler.models.seq2seq import Seq2SeqRunner
from traces.acceptance.sampling import GREEDY
from traces.errors import DraftsimError


def fitting_grid(grid: Grid, *runners: Seq2SeqRunner) -> Grid:
    """Return the points of `grid` whose halves, and passes after them, fit the models' positions.

    Raises DraftsimError if batches are asked for, or nothing fits.
    """
    if max(grid.batches, default=1) > 1:
        raise DraftsimError("encoder-decoder pairs are decoded one request at a time: use batch 1")
    room = min(min(r.max_positions, r.cache.slots) for r in runners)
    fitting = replace(
        grid,
        contexts=[c for c in grid.contexts if c - c // 2 + grid.widest <= room],
        prompts=[n for n in grid.prompts if n <= room],
    )
    if not fitting.contexts or not fitting.prompts:
        raise DraftsimError(
            f"the pair's {room} positions leave no room for a context of {min(grid.contexts)} and "
            f"a pass of {grid.widest} tokens: measure a pair with longer contexts"
        )
    return fitting


def seq2seq_blocks(target: Seq2SeqRunner, draft: Seq2SeqRunner, grid: Grid) -> list[Block]:
    """Prefill and decoding passes of both models over the grid, and the signals' cost."""
    target_at, draft_at = _Passes(target, grid), _Passes(draft, grid)
    draft_at.run(1, min(grid.contexts))()  # leaves a source in place
    logits = draft.forward(draft_at.ids[:1], 0, keep=1)
    token = logits.argmax(-1)

    def verify(width: int, context: int) -> Callable[[], object]:
        return target_at.run(width, context, width)

    def read() -> object:
        return ModelToken(token, logits, GREEDY, None).prob

    blocks = [
        Block([[Step(name, "prefill", n, 0, passes.prefill(n))]])
        for name, passes in (("target", target_at), ("draft", draft_at))
        for n in grid.prompts
    ]
    blocks += decoding_blocks(
        verify, draft_at.run, grid.widths, grid.contexts, longest=grid.longest
    )
    blocks.append(signal_block(verify, draft_at.run, read, grid.widths, min(grid.contexts)))
    return blocks


def seq2seq_layers(runner: Seq2SeqRunner, model: str, grid: Grid) -> pd.DataFrame:
    """Run `measure_layers` on the decoder, at the same contexts as the passes."""
    passes, parts = _Passes(runner, grid), []
    for context in grid.contexts:
        passes.run(1, context)()  # leaves the source in place
        part = measure_layers(runner, model, replace(grid, contexts=[context - context // 2]))
        parts.append(part.assign(context=context))
    return pd.concat(parts, ignore_index=True)


class _Passes:
    """Passes of one model over random sources of several lengths, encoded once."""

    def __init__(self, runner: Seq2SeqRunner, grid: Grid) -> None:
        seeded = torch.Generator().manual_seed(0)
        room = min(runner.max_positions, runner.cache.slots)
        ids = torch.randint(runner.vocab_size, (room,), generator=seeded)
        self.ids: Tensor = ids.to(runner.device)
        self._runner = runner
        self._sources = {n: runner.encode(self.ids[:n]) for n in {c // 2 for c in grid.contexts}}
        for source in self._sources.values():
            runner.source = source
            runner.forward(self.ids, 0, keep=1)  # real keys and values in every slot

    def run(self, width: int, context: int, keep: int = 1) -> Callable[[], object]:
        """Return a pass of `width` tokens that attends to `context` others, half of them the
        source.
        """
        runner, source, tokens = self._runner, self._sources[context // 2], self.ids[:width]

        def call() -> object:
            runner.source = source
            return runner.forward(tokens, context - context // 2, keep=keep)

        return call

    def prefill(self, length: int) -> Callable[[], object]:
        """Return the encoder over `length` tokens, and the decoder's first pass."""
        runner, tokens = self._runner, self.ids[:length]
        return lambda: runner.forward(runner.begin(tokens), 0, keep=1)
