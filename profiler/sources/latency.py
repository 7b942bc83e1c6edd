"""Timing of draft sources other than a draft model: single layers, heads, lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch

from profiler.features.drafters import FeatureDrafter
from profiler.features.heads import ExitHeads, ParallelHeads, log_confidence
from profiler.features.runner import DrafterRunner, Trees, verify_tree
from profiler.latency.passes import UNTIMED, UNTIMED_PLAIN
from profiler.latency.table import Block, Step, reaching, swept
from profiler.models.runner import Runner
from profiler.models.stack import LayerRunner
from profiler.sources.start_record import BUDGET, GrownTrees, head_logits
from traces.acceptance.trace import Trace
from traces.sources.base import eos_of
from traces.sources.lookups.sources import LookupSource, served_before, served_in
from traces.sources.lookups.text import searching
from traces.sources.starts.trees import candidates

LATER = 3
"""Passes of one token after a round's first."""
CONTEXTS = (32, 128, 256)
PROMPTS = (32, 64, 128, 256)


def measure_drafters(
    target: LayerRunner, drafters: Mapping[str, FeatureDrafter | GrownTrees], repeats: int,
    widths: Sequence[int] = (1, 2, 3, 5, 9), contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,), longest: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Measure cells of the passes of `drafters` alone; columns as in `traces.latency.table`.

    ``contexts`` go on to ``longest``, the tokens that a request gets to.  ``widths`` and
    ``batches`` are of chains: trees have widths of their own, and grow for one sequence.
    """
    contexts = reaching(contexts, longest)
    wide = Runner(target.model, target.cache.slots, max(batches)) if max(batches) > 1 else target
    blocks: list[Block] = []
    with torch.inference_mode():
        for name, drafter in drafters.items():
            if isinstance(drafter, GrownTrees):
                blocks += tree_rounds(target, name, drafter, contexts)
                continue
            for batch in (1, *(b for b in batches if b > 1)):
                runner = target if batch == 1 else wide
                blocks += drafter_rounds(runner, name, drafter, widths, contexts, batch)
        cells = swept(blocks, target.device, repeats)
    return without_verifications(cells)


AFTER_DRAFTER = "after a drafter"
"""Phase of the target's passes in rounds that are run to time a drafter's."""


def without_verifications(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells without those of `AFTER_DRAFTER`."""
    return cells[cells["phase"] != AFTER_DRAFTER].reset_index(drop=True)


def drafter_rounds(
    target: Runner, name: str, drafter: FeatureDrafter, widths: Sequence[int],
    contexts: Sequence[int], batch: int = 1,
) -> Iterator[Block]:  # fmt: skip
    """Yield a first pass over several tokens, some of one, and the target's pass that verifies
    them.

    Cells, under the drafter's `name`: ``forward`` over widths and contexts, head and choice of the
    tokens included, and ``prefill`` over prompts.  No later pass follows that of a one-pass
    drafter; its widths reach a longest draft of masks after as many verified tokens.  ``target``
    is a `LayerRunner` where `batch` is 1, and has room for `batch` sequences.
    """
    room = target.cache.slots
    runner = DrafterRunner(drafter, room, batch)
    most = max(*widths) - 1 if drafter.one_pass else 1  # tokens that a pass chooses
    if drafter.one_pass:
        widths = (*widths, 2 * most + 1)
    longest = max(*widths, LATER + 1, *PROMPTS)
    tokens = torch.zeros(batch, longest, dtype=torch.long, device=target.device)
    features = torch.zeros(
        batch, longest, drafter.feature_width, dtype=target.model.dtype, device=target.device
    )
    own = drafter.fuse(features[:, :1])

    def states(width: int, context: int, fused: torch.Tensor, module: int = 0) -> torch.Tensor:
        return runner.run(tokens[:, :width], fused, context, module=module)[0]

    def draft(width: int, context: int, fused: torch.Tensor | None = None) -> Step:
        read = max(1, width - most + 1)  # the others are masks, which have no features

        def run() -> object:
            of = drafter.fuse(features[:, :read]) if fused is None else fused
            of = torch.cat([of, of[:, -1:].expand(-1, width - read, -1)], 1)
            logits = drafter.logits(states(width, context, of)[:, -most:])
            return drafter.target_ids(logits.argmax(-1))

        return Step(name, "forward", width, context, run, batch)

    def prompt(width: int) -> Step:
        def run() -> object:
            return [
                states(width, 0, drafter.fuse(features[:, :width]), module)
                for module in range(drafter.modules_in_turn)
            ]

        return Step(name, "prefill", width, 0, run, batch)

    for context in contexts:
        for width in [w for w in widths if context + max(w, LATER + 1) <= room]:
            # Its own phase: the target's cells hold passes after no drafter's.
            verify = Step(
                "target", AFTER_DRAFTER, LATER + 1, context,
                _verify(target, drafter, context, batch), batch,
            )  # fmt: skip
            # Later passes are fed the drafter's own output: nothing of the target's is fused.
            later = [] if drafter.one_pass else [draft(1, context, own)] * LATER
            yield Block([[draft(width, context), *later, verify]] * (UNTIMED + 3), UNTIMED)
    for width in [w for w in PROMPTS if w <= room]:
        yield Block([[prompt(width)]])


def _verify(
    target: Runner, drafter: FeatureDrafter, context: int, batch: int
) -> Callable[[], object]:
    """Return the target's pass over a draft of every sequence."""
    if isinstance(target, LayerRunner):
        runner = target
        apart = torch.zeros(LATER + 1, dtype=torch.long, device=target.device).split(1)

        def run() -> object:
            fed = torch.cat(apart)
            logits, _ = runner.forward_with_states(fed, context, drafter.feature_layers)
            return logits.argmax(-1).tolist()

        return run
    ids = torch.zeros(batch, LATER + 1, dtype=torch.long, device=target.device)
    places = torch.arange(context, context + LATER + 1, device=target.device).expand_as(ids)
    visible = context + LATER + 1
    return lambda: target.forward_batch(ids, places, visible).argmax(-1).tolist()


DEPTH = 4
"""Layers of the trees that are timed."""
FIRST = (1, 2, 3, 5, 9)
"""Tokens that a round's first pass takes in."""
TREE_WIDTHS = (1, 2, 6, 11, 21, 40, BUDGET + 1)
"""Tokens that are verified, the root's included."""


def tree_rounds(
    target: LayerRunner, name: str, grown: GrownTrees, contexts: Sequence[int] = CONTEXTS
) -> Iterator[Block]:
    """Yield a first pass over several tokens, some over a layer's nodes, and the target's over the
    best.

    Cells: ``forward`` over widths, ``tree`` over the nodes of a layer and ``prefill`` over prompts
    under `name`, and the target's ``tree`` over widths; all over contexts.  They include the
    choice of nodes: that of a layer counts to the pass before, that of the verified nodes to the
    target's pass.
    """
    drafter, room = grown.drafter, target.cache.slots
    runner = DrafterRunner(drafter, room + max(FIRST) + grown.topk * DEPTH)
    tokens = torch.zeros(max(room, *PROMPTS), dtype=torch.long, device=target.device)
    features = torch.zeros(
        len(tokens), drafter.feature_width, dtype=target.model.dtype, device=target.device
    )
    trees: list[Trees] = []  # that of the round, once it has begun

    def run(width: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        return runner.run(tokens[:width], drafter.fuse(features[:width]), context)

    def begin(width: int, context: int) -> None:
        states, out = run(width, context)
        path = context + width
        sees = torch.ones(1, path, dtype=torch.bool, device=states.device)
        at = tokens.new_full((1,), path - 1)
        trees[:] = [Trees(runner, grown.topk, drafter.logits(states[-1:]), out[-1:], at, sees)]

    def grow(context: int) -> None:
        if not trees or len(trees[0].layers) == DEPTH:  # called by itself, to warm up
            begin(1, context)
        trees[0].grow()

    def verify(width: int, context: int) -> None:
        if not trees:
            begin(1, context)
        while len(trees[0].layers) < DEPTH:
            trees[0].grow()
        cut = trees[0].cut(width - 1, DEPTH) if width > 1 else None
        verify_tree(target, tokens[:1], cut, context, drafter.feature_layers, frozenset())

    widths = sorted({*TREE_WIDTHS, grown.budget + 1})
    widths = [w for w in widths if w <= 1 + candidates(grown.topk, DEPTH)]
    for context in contexts:
        fitting = [w for w in widths if context + w <= room]
        growing = Step(name, "tree", grown.topk, context, partial(grow, context))
        for n in range(max(len(fitting), len(FIRST)) if fitting else 0):
            wide, first = fitting[n % len(fitting)], FIRST[n % len(FIRST)]
            beginning = Step(name, "forward", first, context, partial(begin, first, context))
            end = Step("target", "tree", wide, context, partial(verify, wide, context))
            round_ = [beginning, *[growing] * (DEPTH - 1), end]
            yield Block([round_] * (UNTIMED + 3), UNTIMED)
    for width in [w for w in PROMPTS if w <= room]:
        yield Block([[Step(name, "prefill", width, 0, partial(run, width, 0))]])


WIDTHS = (1, 2, 3, 5, 9, 17, 25)


def widest_pass(modules: Mapping[str, Any]) -> int:
    """Return the number of tokens of the target's widest pass that is timed of `modules`."""
    trees = [module.budget + 1 for module in modules.values() if isinstance(module, GrownTrees)]
    return max((*WIDTHS, *TREE_WIDTHS, *trees) if trees else WIDTHS)


class LayerRounds:
    """Rounds that draft token by token from the first `depth` layers, then run the others.

    A call of few layers costs more per layer than one of many.  So the layers of a single token are
    timed `depth` at a time, as in drafting, and those of wider passes up to the end, as in
    verification.
    """

    def __init__(
        self, target: LayerRunner, depth: int, widths: Sequence[int], contexts: Sequence[int]
    ) -> None:
        self.target, self.depth, self.widths, self.contexts = target, depth, widths, contexts
        room = target.cache.slots
        self.states = target.embed(torch.zeros(room, dtype=torch.long, device=target.device))
        target.run_layers(self.states, 0, range(target.layers))  # real states in every slot

    def part(self, width: int, context: int, which: range) -> Step:
        """Return single layers over `width` tokens."""
        apart = list(self.states[:width].split(1))

        def run() -> object:
            return self.target.run_layers(torch.cat(apart), context, which).split(1)

        return Step("exit", "layer", width, context, run)

    def head(self, width: int) -> Step:
        """Return the output head over `width` tokens."""
        apart = list(self.states[:width].split(1))
        return Step(
            "target", "head", width, 0,
            lambda: self.target.logits(torch.cat(apart)).argmax(-1).tolist(),
        )  # fmt: skip

    def by_exits(self, exits: ExitHeads | None) -> Iterator[Block]:
        """Yield rounds that test the first of these exit heads, if there are any."""
        target, depth, one = self.target, self.depth, self.states[:1]

        def confidence() -> object:
            assert exits is not None
            return float(log_confidence(target.project(exits.states(0, one)), 1.1))

        for context in self.contexts:
            for width in [w for w in self.widths if context + w <= target.cache.slots]:
                draft = [self.part(1, context, range(depth))]
                if exits is not None:
                    draft.append(Step("exit", "head", 1, 0, confidence))
                if width > 1:
                    rest = self.part(width, context, range(depth, target.layers))
                    round_ = [*draft * (width - 1), rest]
                else:  # plain decoding, exit by exit
                    round_ = draft * (target.layers // depth)
                before = UNTIMED if width > 1 else UNTIMED_PLAIN
                yield Block([[*round_, self.head(width)]] * (before + 3), before)

    def by(self, draft: Callable[[int, int], Step]) -> Iterator[Block]:
        """Yield rounds in which `draft`, of a width and a context, follows the first layers."""
        target, depth, widths = self.target, self.depth, self.widths
        for context in [c for c in self.contexts if c + 4 <= target.cache.slots]:
            wide = max(w for w in widths if w <= max(4, min(widths)))
            ends: list[Step] = []
            if wide > 1:
                rest = self.part(wide, context, range(depth, target.layers))
                ends = [rest, self.head(wide)]
            one = self.part(1, context, range(depth))
            rounds = [
                [step for width in (first, 1, 1) for step in (one, draft(width, context))] + ends
                for first in (1, 2)
            ]
            yield Block(rounds * (UNTIMED + 1), 2 * UNTIMED)


def pass_rounds(
    target: LayerRunner, heads: Sequence[ParallelHeads], widths: Sequence[int],
    contexts: Sequence[int],
) -> Iterator[Block]:  # fmt: skip
    """Yield rounds of a lookup, or of parallel `heads`: a pass of the target follows the draft."""
    tokens = torch.zeros(max(widths), dtype=torch.long, device=target.device)
    state = target.embed(tokens[:1])
    draft = [
        Step("heads", "forward", 1, 0, partial(head_logits, target, module, state, tokens[:1]))
        for module in heads
    ]

    def verify(width: int, context: int) -> Step:
        apart = list(tokens[:width].split(1))

        def run() -> object:
            return target.forward(torch.cat(apart), context).argmax(-1).tolist()

        return Step("target", "pass", width, context, run)

    for context in contexts:
        for width in [w for w in widths if context + w <= target.cache.slots]:
            yield Block([[*draft, verify(width, context)]] * (UNTIMED_PLAIN + 3), UNTIMED_PLAIN)


def lookup_step(trace: Trace, source: LookupSource) -> Step:
    """Return one round's work of a lookup on the longest request: take in tokens and propose."""
    longest = max(range(len(trace.requests)), key=lambda i: trace.requests[i].tokens)
    prompt, said = served_in(trace, longest)
    lookup = source.lookup(eos_of(trace), lambda: served_before(trace, longest))
    return Step(source.name, "forward", 1, 0, searching(lookup, prompt + said))
