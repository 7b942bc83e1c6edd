"""Rounds of EAGLE-2's draft tree, to be timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
import torch

from profiler.features.runner import DrafterRunner, Trees
from profiler.latency.passes import UNTIMED
from profiler.latency.table import Block, Step, reaching
from profiler.models.stack import LayerRunner
from profiler.sources.feature_latency import CONTEXTS, PROMPTS, swept
from profiler.sources.tree_decoder import verify_tree
from profiler.sources.tree_record import BUDGET, GrownTrees
from traces.sources.starts.trees import candidates

DEPTH = 4
"""Layers of the trees that are timed."""
FIRST = (1, 2, 3, 5, 9)
"""Tokens that a round's first pass takes in."""
TREE_WIDTHS = (1, 2, 6, 11, 21, 40, BUDGET + 1)
"""Tokens that are verified, the root's included."""


def widest_tree(trees: Mapping[str, GrownTrees]) -> int:
    """Tokens of the target's widest pass that is timed of `trees`."""
    return max(*TREE_WIDTHS, *(grown.budget + 1 for grown in trees.values()))


def measure_trees(
    target: LayerRunner, trees: Mapping[str, GrownTrees], repeats: int,
    contexts: Sequence[int] = CONTEXTS, longest: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Cells of the rounds of `trees`; columns as in `traces.latency.table`.

    ``contexts`` go on to ``longest``, the tokens that a request gets to.
    """
    contexts = reaching(contexts, longest)
    with torch.inference_mode():
        return swept([*tree_rounds(target, trees, contexts)], target.device, repeats)


def tree_rounds(
    target: LayerRunner, trees: Mapping[str, GrownTrees], contexts: Sequence[int] = CONTEXTS
) -> Iterator[Block]:
    """A first pass over several tokens, some over a layer's nodes, and the target's over the best.

    Cells: ``forward`` over widths, ``tree`` over the nodes of a layer and ``prefill`` over prompts
    under each name, and the target's ``tree`` over widths; all over contexts.  What chooses the
    nodes is part of them: a layer's of the pass before, those verified of the target's.
    """
    for name, grown in trees.items():
        rounds = _Rounds(target, name, grown)
        widths = sorted({*TREE_WIDTHS, grown.budget + 1})
        widths = [w for w in widths if w <= 1 + candidates(grown.topk, DEPTH)]
        for context in contexts:
            fitting = [w for w in widths if context + w <= target.cache.slots]
            for n in range(max(len(fitting), len(FIRST)) if fitting else 0):
                wide, first = fitting[n % len(fitting)], FIRST[n % len(FIRST)]
                yield rounds.block(context, first, wide)
        for width in [w for w in PROMPTS if w <= target.cache.slots]:
            yield Block([[rounds.prompt(width)]])


class _Rounds:
    """Rounds of one drafter, each of which starts its own tree."""

    def __init__(self, target: LayerRunner, name: str, grown: GrownTrees) -> None:
        self.target, self.name, self.grown = target, name, grown
        self.drafter = grown.drafter
        room = target.cache.slots
        self.runner = DrafterRunner(self.drafter, room + max(FIRST) + grown.topk * DEPTH)
        device = target.device
        self.tokens = torch.zeros(max(room, *PROMPTS), dtype=torch.long, device=device)
        features = torch.zeros(len(self.tokens), self.drafter.feature_width, device=device)
        self.features = features.to(target.model.dtype)
        self.trees: Trees | None = None

    def block(self, context: int, first: int, width: int) -> Block:
        """Rounds at a context that take in `first` tokens and verify `width`."""
        growing = [self.grow(context)] * (DEPTH - 1)
        round_ = [self.begin(first, context), *growing, self.verify(width, context)]
        return Block([round_] * (UNTIMED + 3), UNTIMED)

    def begin(self, width: int, context: int) -> Step:
        def run() -> None:
            fused = self.drafter.fuse(self.features[:width])
            states, out = self.runner.run(self.tokens[:width], fused, context)
            logits = self.drafter.logits(states[-1:])
            path = context + width
            sees = torch.ones(1, path, dtype=torch.bool, device=logits.device)
            at = self.tokens.new_full((1,), path - 1)
            self.trees = Trees(self.runner, self.grown.topk, logits, out[-1:], at, sees)

        return Step(self.name, "forward", width, context, run)

    def grow(self, context: int) -> Step:
        def run() -> None:
            trees = self._begun(context)
            if len(trees.layers) == DEPTH:  # called by itself, to warm up
                self.begin(1, context).run()
                trees = self._begun(context)
            trees.grow()

        return Step(self.name, "tree", self.grown.topk, context, run)

    def verify(self, width: int, context: int) -> Step:
        last = self.tokens[:1]

        def run() -> None:
            trees = self._begun(context)
            while len(trees.layers) < DEPTH:
                trees.grow()
            cut = trees.cut(width - 1, DEPTH) if width > 1 else None
            verify_tree(self.target, last, cut, context, self.drafter.feature_layers, frozenset())

        return Step("target", "tree", width, context, run)

    def prompt(self, width: int) -> Step:
        def run() -> object:
            fused = self.drafter.fuse(self.features[:width])
            return self.runner.run(self.tokens[:width], fused, 0)

        return Step(self.name, "prefill", width, 0, run)

    def _begun(self, context: int) -> Trees:
        if self.trees is None:
            self.begin(1, context).run()
        assert self.trees is not None
        return self.trees
