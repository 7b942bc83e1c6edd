"""Real decoding with EAGLE, EAGLE-3 and MTP drafters: chains, one pass, and EAGLE-2's tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.tokens import Fetched, ModelToken
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
from profiler.models.sampling import drafted, top10_log_prob
from profiler.models.stack import LayerRunner
from profiler.sources.exits import ROOM, Begin, Modules, SourceDecoder, digest
from profiler.sources.latency import LayerRounds, drafter_rounds, tree_rounds
from profiler.sources.start_record import (
    LAYERS,
    TOPK,
    FeatureRecorder,
    GrownTrees,
    RecordOptions,
    SourceRecorder,
    TreeRecorder,
)
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.replay.calls import DRAFTER, DRAFTER_TREE, ONE_PASS, TREE
from traces.sources.base import Source
from traces.sources.starts.features import Eagle, OnFeatures
from traces.sources.starts.parallel import Parallel
from traces.sources.starts.trees import Eagle2


class FeatureToken(ModelToken):
    """A token of a drafter whose vocabulary may be smaller: its signals are of that one.

    ``own_id`` (1,): the token in that vocabulary.
    """

    __slots__ = ("_own_id",)

    def __init__(
        self, device_id: Tensor, own_id: Tensor, logits: Tensor, sampling: Sampling,
        eos: frozenset[int] | None,
    ) -> None:  # fmt: skip
        super().__init__(device_id, logits, sampling, eos)
        self._own_id = own_id

    def _fetch(self) -> tuple[float, ...]:
        if self._values is None:
            numbers = drafted(self._logits, self._own_id, self._sampling)
            self._values = tuple(numbers.stack()[0].tolist())
        return self._values


class OnFeaturesDecoder(SourceDecoder):
    """The real side of a source whose drafter reads the target's features."""

    takes_verified = True
    recorded_sampled = True

    @classmethod
    def module(cls, modules: Modules, source: Source) -> Any:
        """Return the drafter that `source` names; DraftsimError if it was not loaded."""
        assert isinstance(source, OnFeatures)
        mine = {k: m for k, m in modules.items() if k.startswith(f"{source.name}.")}
        if source.key in mine:
            return mine[source.key]
        fitting = [m for m in mine.values() if source.model in (None, m.kind)]
        if len(fitting) != 1:
            raise DraftsimError(
                f"no drafter {source.model or ''!r} for this target: name its folder, "
                f"{source.name}:model=DIR"
            )
        return fitting[0]

    @classmethod
    def loaded(cls, drafter: FeatureDrafter, source: Any) -> Any:
        """Return the module of `source`, whose drafter was read from its folder.

        Raises DraftsimError if one of both drafts all tokens in one pass, the other does not.
        """
        if drafter.one_pass != source.one_pass:
            raise DraftsimError(
                f"{source.model} holds a drafter of kind {drafter.kind}: name it "
                f"{Parallel.name if drafter.one_pass else Eagle.name}:model={source.model}"
            )
        return drafter

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        """Return what records chains from every start."""
        chance = torch.Generator(target.device).manual_seed(how.seed)
        runner = LayerRunner(target, trace.longest)
        return FeatureRecorder(runner, module, trace.longest, how.offsets, trace.sampling, chance)

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        """Return a digest of the drafter."""
        del modules
        return {"drafter": digest(module)}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
        """Yield rounds that draft by the drafter."""
        return drafter_rounds(rounds.target, name, module, rounds.widths, rounds.contexts)


class FeatureDecoder(OnFeaturesDecoder):
    """Decodes one prompt, drafting with `drafter`."""

    sampled = True

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, source: OnFeatures, begin: Begin
    ) -> None:
        super().__init__(target, begin)
        self._target, self._drafter = target, drafter
        prompt, draws = begin.prompt, begin.draws
        self._chain = DrafterChain(drafter, target.cache.slots)
        logits, states = target.forward_with_states(prompt, 0, drafter.feature_layers)
        last = logits[-1:]
        self._last = last.argmax(-1) if draws is None else draws.first(last)  # (1,)
        self._chain.prefill(prompt, states)
        self._chain.learn(self._last)
        self._no_drafts = drafter.logits(drafter.fuse(states[:0]))  # (0, draft vocabulary)
        self.extend(self._last.tolist())

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next token of the chain; None when modules that run in turn are used up."""
        offset = len(so_far)
        if offset >= self._drafter.modules_in_turn > 1:
            return None
        logits, width = self._chain.draft(offset, so_far[-1].device_id if so_far else None)
        self.calls.add(DRAFTER, width)
        if self._draws is None:
            own = logits.argmax(-1)
            token, sampling = self._drafter.target_ids(own), GREEDY
        else:
            full, sampling = self._drafter.over_target(logits), self._draws.sampling
            token = self._draws.propose(full, 0, len(self.output), so_far)
            own = self._drafter.draft_ids(token)
        return FeatureToken(token, own, logits, sampling, self.eos or None)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token and the draft, which gives the accepted features."""
        fed = [t.device_id for t in draft]
        logits, states = self._target.forward_with_states(
            torch.cat([self._last, *fed]), self._slot, self._drafter.feature_layers
        )
        if self._draws is None:
            picks = logits.argmax(-1)
            accepted, tokens = self._compare(fed, picks)
        else:
            proposals = torch.cat([t.logits for t in draft] or [self._no_drafts])
            accepted, tokens = self._draws.settle(
                torch.cat([self._last[:0], *fed]), self._drafter.over_target(proposals),
                logits, len(self.output),
            )  # fmt: skip
            picks = self._last.new_tensor(tokens)
        self._last = picks[len(tokens) - 1][None]
        self._chain.learn(picks[: len(tokens)], states[: len(tokens)])
        self.calls.end_round()
        self.extend(tokens)
        return accepted


class ParallelDecoder(FeatureDecoder):
    """Decodes one prompt greedily, drafting `Parallel.k` tokens of a round by one pass."""

    sampled = False

    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, source: Parallel, begin: Begin
    ) -> None:
        if source.k is None or source.acceptance is not None:
            raise DraftsimError(
                f"{source.key!r} is really decoded by a drafter and a number of masks: name both, "
                "or its recording, as in parallel:model=DIR,k=8"
            )
        super().__init__(target, drafter, source, begin)
        self._width = source.k
        self._logits = self._no_drafts

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next token of the round's pass, which runs before the first; None at its
        end.
        """
        offset = len(so_far)
        if offset >= self._width:
            return None
        if not offset:
            self._logits, read = self._chain.draft_all(self._width)
            self.calls.add(ONE_PASS, read)
        logits = self._logits[offset : offset + 1]
        own = logits.argmax(-1)
        return FeatureToken(self._drafter.target_ids(own), own, logits, GREEDY, self.eos or None)


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

    The target's cache is compacted to the accepted path.  In a round's first pass the drafter reads
    the accepted tokens again, with the target's features instead of its own, as in the authors'
    code.

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
        drafter = super().loaded(drafter, source)
        return GrownTrees(drafter, source.topk or TOPK, source.depth or LAYERS, source.budget)

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
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
        return tree_rounds(rounds.target, name, module, rounds.contexts)

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
        self.extend(self._last.tolist())

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
        self.extend(picks.tolist())
        return len(path) - 1
