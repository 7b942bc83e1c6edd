"""The cells of a pair's passes, in rounds as decoding makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.tokens import ModelToken
from profiler.latency.table import FIRST_WIDTHS, Block, Grid, Step
from profiler.models.runner import Runner
from traces.acceptance.sampling import GREEDY

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
"""From tokens fed and context to the call that makes the pass."""

Points = Sequence[tuple[int, int]]
"""Widths and contexts."""


def pass_blocks(
    target: Runner, draft: Runner | None, grid: Grid, *, apart: Points = (), short: bool = False
) -> list[Block]:
    """Return prefill and decoding passes of both models over the grid, and the signals' cost.

    A target without a draft has only its own passes.  ``apart``: further (width, context) whose
    rounds are timed; ``short``: as in `decoding_blocks`.
    """
    ids = {"target": random_ids(target, target.cache.slots)}
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    blocks = []
    for name, runner in models.items():
        ids[name] = ids["target"][: runner.cache.slots] % runner.vocab_size
        runner.forward(ids[name], 0, keep=1)  # real keys and values in every slot
        for length in grid.prompts:
            if length <= runner.cache.slots:
                run = _pass(runner, ids[name][:length], 0, 1)
                blocks.append(Block([[Step(name, "prefill", length, 0, run)]]))

    def verify(width: int, context: int) -> Callable[[], object]:
        return _pass(target, ids["target"][:width], context, width)

    contexts = [c for c in grid.contexts if c + grid.widest <= target.cache.slots]
    if draft is None:
        return [*blocks, *rounds(verify, None, grid.widths, contexts, apart, short=short)]
    proposer, logits = draft, draft.forward(ids["draft"][:1], 0, keep=1)
    token = logits.argmax(-1)

    def propose(width: int, context: int) -> Callable[[], object]:
        return _pass(proposer, ids["draft"][:width], context, 1)

    def read() -> object:
        return ModelToken(token, logits, GREEDY, None).prob

    blocks += rounds(
        verify, propose, grid.widths, contexts, apart, short=short, longest=grid.longest
    )
    blocks.append(signal_block(verify, propose, read, grid.widths, min(contexts), short=short))
    return blocks


def rounds(
    target: Pass, draft: Pass | None, widths: Sequence[int], contexts: Sequence[int],
    apart: Points, **settings: Any,
) -> Iterator[Block]:  # fmt: skip
    """Yield `decoding_blocks` over a grid, and at points by themselves."""
    yield from decoding_blocks(target, draft, widths, contexts, **settings)
    for width, context in apart:
        yield from decoding_blocks(target, draft, [width], [context], **settings)


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


def _pass(runner: Runner, ids: Tensor, context: int, keep: int) -> Callable[[], object]:
    return lambda: runner.forward(ids, context, keep=keep)
