"""Real decoding with EAGLE-2's draft tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from profiler.decoding.tokens import Fetched
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import (
    DrafterChain,
    Layer,
    Trees,
    check_tree,
    layer_signals,
    verify_tree,
)
from profiler.latency.table import Block
from profiler.models.sampling import top10_log_prob
from profiler.models.stack import LayerRunner
from profiler.sources.exits import ROOM, Begin, Modules
from profiler.sources.feature_decoder import OnFeaturesDecoder
from profiler.sources.latency import LayerRounds, tree_rounds
from profiler.sources.start_record import (
    LAYERS,
    TOPK,
    GrownTrees,
    Recorder,
    RecordOptions,
    TreeRecorder,
)
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import DRAFTER, DRAFTER_TREE, TREE
from traces.sources.starts.trees import Eagle2


class LayerToken(Fetched):
    """A layer of the tree, as a policy sees it; its signals come to the host when one is read."""

    __slots__ = ("_layer", "_values")

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._values: tuple[float, ...] | None = None

    def _fetch(self) -> tuple[float, ...]:
        if self._values is None:
            score, top, second, entropy = layer_signals(self._layer)[0].tolist()
            # Log-probabilities instead of logits, whose log-sum-exp is then 0.
            self._values = (top, second, 0.0, entropy, score, top, top)
        return self._values

    def _fetch_top10(self) -> float:
        return float(top10_log_prob(self._layer.logits[:1]))

    @property
    def token_id(self) -> int:
        """None of its own: a layer has several."""
        return -1

    @property
    def ends(self) -> bool:
        """Return False: a tree grows on next to a node that ends the text."""
        return False


class TreeDecoder(OnFeaturesDecoder):
    """Decodes one prompt, drafting trees with the drafter of `grown`.

    The target keeps the keys and values of the accepted path, moved together; the drafter reads
    accepted tokens again in a round's first pass, with the target's features instead of its own, as
    the authors' code does.

    ``target`` has room for the source's `budget` besides the text.
    """

    recorded_sampled = False

    @classmethod
    def room(cls, source: Any, modules: Modules) -> int:
        """Return room for the tree's nodes."""
        del modules
        return max(ROOM, int(source.budget) + 1)

    @classmethod
    def loaded(cls, drafter: FeatureDrafter, source: Any) -> GrownTrees:
        """Return the drafter with the shape of its trees."""
        return GrownTrees(drafter, source.topk or TOPK, source.depth or LAYERS, source.budget)

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> Recorder:
        """Return what records trees from every start."""
        return TreeRecorder(LayerRunner(target, trace.longest), module, trace.longest)

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        """Return True if the recorded trees are as deep."""
        del how
        return bool(found.layers >= module.layers)

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        """Return a digest of the drafter, and how its trees grow."""
        return {**super().provenance(module.drafter, modules), "topk": module.topk}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
        """Yield rounds that grow and verify trees."""
        return tree_rounds(rounds.target, {name: module}, rounds.contexts)

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, grown: GrownTrees, source: Eagle2, begin: Begin
    ) -> None:
        if source.depth is None or source.topk is None:
            raise DraftsimError(
                "a tree is really grown to a depth, with a number of nodes: name them, or its "
                "recording, as in eagle2:depth=6,topk=10"
            )
        super().__init__(target, begin)
        drafter, prompt = grown.drafter, begin.prompt
        check_tree(drafter.modules_in_turn)
        self._target, self._features = target, drafter.feature_layers
        self._budget, self._topk, self._depth = source.budget, source.topk, source.depth
        self._chain = DrafterChain(drafter, target.cache.slots + self._topk * (self._depth - 1))
        logits, states = target.forward_with_states(prompt, 0, self._features)
        self._last = logits[-1:].argmax(-1)  # (1,)
        self._chain.prefill(prompt, states)
        self._chain.learn(self._last)
        self._trees: Trees | None = None
        self._emit(self._last.tolist())

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> LayerToken | None:
        """Return the next layer; None at the tree's full depth."""
        if len(so_far) >= self._depth:
            return None
        if not so_far:
            self._trees, width = self._chain.tree(self._topk)
            self.calls.add(DRAFTER, width)
            return LayerToken(self._trees.layers[0])
        assert self._trees is not None
        self.calls.add(DRAFTER_TREE, self._topk)
        return LayerToken(self._trees.grow())

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token and the tree's best nodes."""
        cut = None if self._trees is None else self._trees.cut(self._budget, len(draft))
        picks, states, path = verify_tree(
            self._target, self._last, cut, self._slot, self._features, self.eos
        )
        self.calls.add(TREE, 1 if cut is None else len(cut.depth), verify=True)
        self.calls.end_round()
        self._trees = None
        self._last = picks[-1:]
        self._chain.learn(picks, states)
        self._emit(picks.tolist())
        return len(path) - 1
