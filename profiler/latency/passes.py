"""The cells of a pair's passes, in rounds as decoding makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

Pass = Callable[[int, int], Callable[[], object]]
"""From tokens fed and context to the call that makes the pass."""


def pass_blocks(target: Runner, draft: Runner, grid: Grid) -> list[Block]:
    """Prefill and decoding passes of both models over the grid, and the signals' cost."""
    ids = {"target": random_ids(target, target.cache.slots)}
    ids["draft"] = ids["target"][: draft.cache.slots] % draft.vocab_size
    blocks = []
    for name, runner in (("target", target), ("draft", draft)):
        runner.forward(ids[name], 0, keep=1)  # real keys and values in every slot
        for length in grid.prompts:
            if length <= runner.cache.slots:
                run = _pass(runner, ids[name][:length], 0, 1)
                blocks.append(Block([[Step(name, "prefill", length, 0, run)]]))
    logits = draft.forward(ids["draft"][:1], 0, keep=1)
    token = logits.argmax(-1)

    def verify(width: int, context: int) -> Callable[[], object]:
        return _pass(target, ids["target"][:width], context, width)

    def propose(width: int, context: int) -> Callable[[], object]:
        return _pass(draft, ids["draft"][:width], context, 1)

    def read() -> object:
        return ModelToken(token, logits, GREEDY, None).prob

    contexts = [c for c in grid.contexts if c + grid.widest <= target.cache.slots]
    blocks += decoding_blocks(verify, propose, grid.widths, contexts)
    blocks.append(signal_block(verify, propose, read, grid.widths, min(contexts)))
    return blocks


def decoding_blocks(
    target: Pass, draft: Pass, widths: Sequence[int], contexts: Sequence[int], batch: int = 1,
    untimed: int = UNTIMED,
) -> Iterator[Block]:  # fmt: skip
    """Yield a block for every width of the target's pass and context, with the drafting before it.

    The timed rounds differ in what their first draft pass catches up on (FIRST_WIDTHS); the next
    passes are kept apart by place (SETTLING).
    """
    for context in contexts:
        for width in widths:
            own, before = [], max(untimed, UNTIMED_PLAIN) if width == 1 else untimed
            for number in range(before + len(FIRST_WIDTHS)):
                first = FIRST_WIDTHS[number % len(FIRST_WIDTHS)]
                run = target(width, context)
                verify = Step("target", "forward", width, context, run, batch)
                own.append([*_drafting(draft, width - 1, first, context, batch), verify])
            yield from [Block(own, before)] * (PLAIN_BLOCKS if width == 1 else 1)
        # Two tokens in a later pass occur in no round; they show what a token more costs.
        pair = [Step("draft", "forward", n, context, draft(n, context), batch) for n in (1, 2)]
        yield Block([pair] * 3, 1)


def _drafting(draft: Pass, passes: int, first: int, context: int, batch: int) -> list[Step]:
    """Return a round's draft passes, the first over `first` tokens."""
    run, one = draft(first, context), draft(1, context)
    steps = [Step("draft", "catch_up", first, context, run, batch)]
    steps += [
        Step("draft", "settling", place, context, one, batch) for place in range(1, SETTLING + 1)
    ]
    later = Step("draft", "forward", 1, context, one, batch)
    return [*steps, *[later] * (passes - len(steps))][:passes]


def signal_block(
    target: Pass, draft: Pass, read: Callable[[], object], widths: Sequence[int], context: int,
    batch: int = 1,
) -> Block:  # fmt: skip
    """Return rounds of a policy that reads the signals of every token it drafts."""
    width = max(w for w in widths if w <= max(5, min(widths)))
    reading = Step("draft", "signal", 1, 0, read, batch)
    verify = Step("target", "forward", width, context, target(width, context), batch)
    drafting = _drafting(draft, max(width - 1, 1), 1, context, batch)
    steps = [step for one in drafting for step in (one, reading)]
    return Block([[*steps, verify]] * (UNTIMED + 3), UNTIMED)


def random_ids(runner: Runner, *shape: int) -> Tensor:
    """Return token ids of a shape on the model's device, the same each time."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(runner.vocab_size, shape, generator=seeded).to(runner.device)


def _pass(runner: Runner, ids: Tensor, context: int, keep: int) -> Callable[[], object]:
    return lambda: runner.forward(ids, context, keep=keep)
