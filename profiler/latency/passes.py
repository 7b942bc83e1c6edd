"""Cells of a pair's passes, in rounds as decoding makes them, and of single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from profiler.decoding.single import DraftStep, ModelToken
from profiler.features.heads import ExitHeads
from profiler.latency.table import FIRST_WIDTHS, Block, Grid, Step, swept, up_to
from profiler.models.graphs import captured
from profiler.models.runner import Runner
from profiler.models.seq2seq import Seq2SeqRunner
from profiler.models.stack import LayerRunner
from traces.errors import DraftsimError

UNTIMED = 2
"""Rounds of a block that only bring the processor's caches into their usual state."""
UNTIMED_PLAIN = 6
"""The same of plain decoding, whose rounds are a single pass."""
PLAIN_BLOCKS = 3
"""Blocks of plain decoding in a sweep, at every context: every speedup is relative to it, and its
passes are fast or slow for stretches longer than a block."""

SETTLING = 4
"""Draft passes after a round's first that are measured by their place: each finds more of the
draft's weights in the processor's caches, which the target's pass left full of its own.
"""
SHORT = 2
"""Draft passes of a short round, at most."""

Pass = Callable[[int, int], Callable[[], object]]
"""A function of the tokens fed and the context that returns the call that makes the pass."""

RoundPoints = Sequence[tuple[int, int]]
"""Widths and contexts."""


class Passes:
    """Passes of one model over one sequence, or over a full rectangle: as many tokens of each.

    The sequences of a `batch` follow equal contexts.  A ragged pass runs the rectangle that its
    widest sequence and longest context span.

    The constructor fills every slot with real keys and values, unless they are ``filled``.
    """

    @torch.inference_mode()
    def __init__(self, runner: Runner, grid: Grid, batch: int = 1, filled: bool = False) -> None:
        self.runner: Any = runner
        self.batch = batch
        self.contexts = [c for c in grid.contexts if c + grid.widest <= runner.cache.slots]
        self.ids = random_ids(runner, runner.cache.slots)
        if not filled:
            runner.forward(self.ids, 0, keep=1)
        for row in range(1, batch):
            runner.cache.copy_row(0, row)

    def run(self, width: int, context: int, keep: int = 1) -> Callable[[], Any]:
        """Return a pass of `width` tokens after `context` others; `keep` last logits (0: all)."""
        runner, ids = self.runner, self.ids[:width]
        if self.batch == 1:
            return lambda: runner.forward(ids, context, keep=keep)
        ids = random_ids(runner, self.batch, width)
        places = torch.arange(context, context + width, device=runner.device).expand_as(ids)
        return lambda: runner.forward_batch(ids, places, context + width, keep=keep)

    def prefill(self, length: int) -> Callable[[], Any]:
        """Return the pass over a prompt."""
        return self.run(length, 0)


class Seq2SeqPasses(Passes):
    """Passes of an encoder-decoder over random sources of several lengths, encoded once.

    A decoder's pass attends to the source and to the tokens decoded so far, through as many
    attentions of the same cost, so its cells' ``context`` is the sum of both; they are measured
    with half of it on either side.  A trace's prompt length is that of the source, so the context
    that replay prices, prompt and output so far, is this sum.  ``prefill`` is the encoder's pass
    and the decoder's first.
    """

    def __init__(self, runner: Seq2SeqRunner, grid: Grid) -> None:
        self.runner, self.contexts = runner, list(grid.contexts)
        self.ids = random_ids(runner, min(runner.max_positions, runner.cache.slots))
        self._sources = {n: runner.encode(self.ids[:n]) for n in {c // 2 for c in grid.contexts}}
        for source in self._sources.values():
            runner.source = source
            runner.forward(self.ids, 0, keep=1)

    def run(self, width: int, context: int, keep: int = 1) -> Callable[[], Any]:
        """Return a pass of `width` tokens; half of the `context` is the source."""
        runner, source, ids = self.runner, self._sources[context // 2], self.ids[:width]

        def call() -> Tensor:
            runner.source = source
            logits: Tensor = runner.forward(ids, context - context // 2, keep=keep)
            return logits

        return call

    def prefill(self, length: int) -> Callable[[], Any]:
        """Return the encoder over `length` tokens, and the decoder's first pass."""
        runner, ids = self.runner, self.ids[:length]
        return lambda: runner.forward(runner.begin(ids), 0, keep=1)


def passes_of(runner: Runner, grid: Grid, batch: int = 1, filled: bool = False) -> Passes:
    """Return the passes of a model at a batch size, by the model's kind; see `Passes`."""
    if isinstance(runner, Seq2SeqRunner):
        return Seq2SeqPasses(runner, grid)
    return Passes(runner, grid, batch, filled)


def fitting_grid(grid: Grid, room: int, seq2seq: bool = False) -> Grid:
    """Return `grid` cut to contexts after which its widest pass fits a pair's `room` positions.

    An encoder-decoder has half of a context on either side (`Seq2SeqPasses`).

    Raises DraftsimError if it is to decode batches, or nothing fits.
    """
    if seq2seq and max(grid.batches, default=1) > 1:
        raise DraftsimError("encoder-decoder pairs are decoded one request at a time: use batch 1")
    last = (room - grid.widest) * (2 if seq2seq else 1)
    if last < min(grid.contexts):
        raise DraftsimError(
            f"the pair's {room} positions leave no room for a context of {min(grid.contexts)} and "
            f"a pass of {grid.widest} tokens: lower --max-gamma, or measure a pair with longer "
            "contexts"
        )
    return replace(grid, contexts=up_to(grid.contexts, last), prompts=up_to(grid.prompts, room))


def pass_blocks(
    target: Runner, draft: Runner | None, grid: Grid, batch: int = 1, *, apart: RoundPoints = (),
    short: bool = False, filled: bool = False,
) -> list[Block]:  # fmt: skip
    """Return prefill and decoding passes of both models over the grid, and the signals' cost.

    A target without a draft has only its own passes.  The runners have room for `batch` sequences.
    ``apart``: further (width, context) whose rounds are timed; ``short``: as in `decoding_blocks`;
    ``filled``: as in `Passes`.
    """
    verify = passes_of(target, grid, batch, filled)
    propose = None if draft is None else passes_of(draft, grid, batch, filled)
    # In a batch, further tokens of a prefill take as long each.
    blocks = [
        Block([[Step(name, "prefill", length, 0, passes.prefill(length), batch)]])
        for name, passes in (("target", verify), ("draft", propose)) if passes is not None
        for length in grid.prompts
        if length <= passes.runner.cache.slots and (batch == 1 or batch * length <= 4096)
    ]  # fmt: skip

    def whole(width: int, context: int) -> Callable[[], object]:
        return verify.run(width, context, keep=0)

    drafting = None if propose is None else propose.run
    widths = grid.widths if batch == 1 else grid.batch_widths
    # A pass over a batch outweighs what the caches keep: fewer rounds will do.
    untimed = UNTIMED if batch == 1 else 1
    points = [(widths, verify.contexts), *(([width], [context]) for width, context in apart)]
    for some, contexts in points:
        blocks += decoding_blocks(
            whole, drafting, some, contexts, batch=batch, untimed=untimed, short=short,
            longest=grid.longest,
        )  # fmt: skip
    if propose is not None:
        context = min(verify.contexts)
        logits = propose.run(1, context)().flatten(0, -2)  # (batch, vocab)
        token = logits.argmax(-1)

        def read() -> object:
            return ModelToken(DraftStep(logits, token)).prob

        blocks.append(signal_block(whole, propose.run, read, widths, context, batch, short))
    return blocks


def decoding_blocks(
    target: Pass, draft: Pass | None, widths: Sequence[int], contexts: Sequence[int],
    batch: int = 1, untimed: int = UNTIMED, short: bool = False, longest: int = Grid.longest,
) -> Iterator[Block]:  # fmt: skip
    """Yield a block for every width of the target's pass and context, with the drafting before it.

    The timed rounds differ in the tokens of their first draft pass (FIRST_WIDTHS); the next passes
    are separated by place (SETTLING).  No round has more than `longest` draft passes.

    ``short``: rounds have at most SHORT draft passes, not separated by place; one round is untimed
    and none is repeated.  That is enough on a GPU, whose caches hold little of a model.
    """
    for context in contexts:
        for width in widths:
            plain = width == 1 and not short
            before = max(untimed, UNTIMED_PLAIN) if plain else untimed
            own, before = [], min(before, 1) if short else before
            for number in range(before + len(FIRST_WIDTHS)):
                first = FIRST_WIDTHS[number % len(FIRST_WIDTHS)]
                run = target(width, context)
                verify = Step("target", "forward", width, context, run, batch)
                passes = min(width - 1, longest)
                own.append([*_drafting(draft, passes, first, context, batch, short), verify])
            yield from [Block(own, before)] * (PLAIN_BLOCKS if plain else 1)
        if draft is not None:
            # Two tokens in a later pass occur in no round; they show what a token more costs.
            pair = [Step("draft", "forward", n, context, draft(n, context), batch) for n in (1, 2)]
            yield Block([pair] * 3, 1)


def _drafting(
    draft: Pass | None, passes: int, first: int, context: int, batch: int, short: bool
) -> list[Step]:
    """Return a round's draft passes, the first over `first` tokens."""
    if draft is None:
        return []
    run, one = draft(first, context), draft(1, context)
    steps = [Step("draft", "catch_up", first, context, run, batch)]
    later = Step("draft", "forward", 1, context, one, batch)
    if short:
        return [*steps, *[later] * (SHORT - 1)][:passes]
    steps += [
        Step("draft", "settling", place, context, one, batch) for place in range(1, SETTLING + 1)
    ]
    return [*steps, *[later] * (passes - len(steps))][:passes]


def signal_block(
    target: Pass, draft: Pass, read: Callable[[], object], widths: Sequence[int], context: int,
    batch: int = 1, short: bool = False,
) -> Block:  # fmt: skip
    """Return rounds of a policy that reads the signals of every token it drafts."""
    width = max(w for w in widths if w <= max(5, min(widths)))
    reading = Step("draft", "signal", 1, 0, read, batch)
    verify = Step("target", "forward", width, context, target(width, context), batch)
    drafting = _drafting(draft, max(width - 1, 1), 1, context, batch, short)
    steps = [step for one in drafting for step in (one, reading)]
    return Block([[*steps, verify]] * (UNTIMED + 3), UNTIMED)


def random_ids(runner: Runner, *shape: int) -> Tensor:
    """Return token ids of a shape on the model's device, the same each time."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(runner.vocab_size, shape, generator=seeded).to(runner.device)


@torch.inference_mode()
def measure_layers(
    runner: LayerRunner, name: str, widths: Sequence[int], contexts: Sequence[int], grid: Grid, *,
    graphs: bool = False, exits: bool = False, check: Callable[[], None] = lambda: None,
    late: Callable[[], bool] = lambda: False,
) -> pd.DataFrame:  # fmt: skip
    """Return the cells of `layer_blocks` from sweeps of the `grid`, ``layer`` of a single layer."""
    blocks = [*layer_blocks(runner, name, widths, contexts, graphs=graphs, exits=exits)]
    cells = swept(blocks, runner.device, grid.repeats, warmup=grid.warmup, check=check, late=late)
    return a_layer(cells, runner.layers)


def layer_blocks(
    runner: LayerRunner, name: str, widths: Sequence[int], contexts: Sequence[int], *,
    graphs: bool = False, exits: bool = False,
) -> Iterator[Block]:  # fmt: skip
    """Yield blocks of the cells ``layer`` and ``head`` of a model, and ``head`` of an exit.

    A cell ``layer`` is the time of all layers, which run one after another (`a_layer`).  The head
    is the final norm, the output projection and the argmax; an exit's is its low-rank block, norm,
    projection and confidence.  ``graphs``: each is one CUDA graph; ``exits``: with the exit's.

    In graphs, layers with several tokens are timed at the shortest context alone: their attention
    is not split over the keys, as a whole pass's is.  At 4,096 tokens of context an H200 took twice
    as long for them as for the pass that contains them.
    """
    like, device = runner.model, runner.device
    hidden_size = like.config.get_text_config().hidden_size
    heads = ExitHeads((max(1, runner.layers // 2),), hidden_size).to(device)
    runner.forward(random_ids(runner, runner.cache.slots), 0, keep=1)

    def block(model: str, phase: str, width: int, context: int, run: Callable[[], Tensor]) -> Block:
        own = captured(run, device) if graphs else run
        return Block([[Step(model, phase, width, context, own)]] * 3, 1)

    for width in widths:
        states = torch.randn(width, hidden_size, device=device, dtype=like.dtype)
        for context in contexts[:1] if graphs and width > 1 else contexts:
            run = partial(runner.run_layers, states, context, range(runner.layers))
            yield block(name, "layer", width, context, run)

        def finish(states: Tensor = states) -> Tensor:
            return runner.logits(states).argmax(-1)

        def leave(states: Tensor = states) -> Tensor:
            logits = runner.project(heads.states(0, states)).float()
            return logits.amax(-1) - logits.logsumexp(-1)

        yield block(name, "head", width, 0, finish)
        if exits:
            yield block("exit", "head", width, 0, leave)


def a_layer(cells: pd.DataFrame, layers: int) -> pd.DataFrame:
    """Return the `cells` of `layer_blocks` with the time of all layers divided by their number."""
    each = cells["phase"].eq("layer").map({True: 1.0 / layers, False: 1.0})
    return cells.assign(median_s=cells["median_s"] * each, spread_s=cells["spread_s"] * each)
