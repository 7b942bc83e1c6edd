"""Real decoding with other sources than a draft model: features, lookups, heads, skipped layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from profiler.decoding.single import DraftStep, ModelToken
from profiler.features.drafters import FeatureDrafter
from profiler.features.heads import HydraHeads, MaskEmbeddings, ParallelHeads
from profiler.features.runner import (
    DrafterChain,
    Layer,
    Trees,
    check_tree,
    layer_signals,
    verify_tree,
)
from profiler.latency.passes import UNTIMED
from profiler.latency.table import Block, Step
from profiler.models.runner import Runner
from profiler.models.sampling import verify_greedily
from profiler.models.stack import LayerRunner
from profiler.sources.exits import ROOM, Begin, Modules, SourceDecoder, digest_of_weights
from profiler.sources.latency import AFTER_DRAFTER, LayerRounds, drafter_rounds, tree_rounds
from profiler.sources.start_record import (
    LAYERS,
    TOPK,
    FeatureRecorder,
    GrownTrees,
    HeadsRecorder,
    HydraRecorder,
    MasksRecorder,
    RecordOptions,
    SkipRecorder,
    TreeRecorder,
    default_skip,
    head_logits,
    hydra_logits,
    kept_layers,
    mask_logits,
)
from traces.errors import DraftsimError
from traces.replay.calls import DRAFTER, DRAFTER_TREE, HEAD, LAYER, ONE_PASS, PASS, TREE
from traces.replay.decoder import RecordedToken
from traces.sources.base import Source
from traces.sources.lookups.sources import proposed
from traces.sources.lookups.text import Lookup, Proposal
from traces.sources.starts.parallel import Eagle, OnFeatures, Parallel
from traces.sources.starts.sources import HEADS, HYDRA, HeadsSource, LayerSkip, Space
from traces.sources.starts.trees import Eagle2


class OnFeaturesDecoder(SourceDecoder):
    """The real side of a source whose drafter reads the target's features."""

    takes_verified = True
    recorder: ClassVar[Any] = FeatureRecorder
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
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        return {"drafter": digest_of_weights(module)}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
        return drafter_rounds(rounds.target, name, module, rounds.widths, rounds.contexts)


class FeatureDecoder(OnFeaturesDecoder):
    """Decodes one prompt, drafting with `drafter`."""

    sampled = True

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, source: OnFeatures, begin: Begin
    ) -> None:
        super().__init__(target, begin)
        self._drafter = drafter
        self._chain = DrafterChain(drafter, target.cache.slots)
        logits, states = target.forward_with_states(begin.prompt, 0, drafter.feature_layers)
        self._chain.prefill(begin.prompt, states)
        self._emit_first(logits[-1:])
        self._chain.learn(self._last)

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next token of the chain; None when modules that run in turn are used up."""
        offset = len(so_far)
        if offset >= self._drafter.modules_in_turn > 1:
            return None
        logits, width = self._chain.draft(offset, so_far[-1].device_id if so_far else None)
        self.calls.add(DRAFTER, width)
        return self._token(logits, so_far)

    def _token(self, logits: Tensor, so_far: Sequence[Any] = (), at: int = 0) -> ModelToken:
        """Return the token drafted from logits over the drafter's vocabulary, (1, vocab).

        The token's signals are of that vocabulary, which may be smaller than the target's.
        """
        if self._draws is None:
            own = logits.argmax(-1)
            step = DraftStep(logits, self._drafter.target_ids(own), own=own)
        else:
            full = self._drafter.over_target(logits)
            token = self._draws.propose(full, at, len(self.output), so_far)
            own = self._drafter.draft_ids(token)
            step = DraftStep(logits, token, self._draws.sampling, own)
        return ModelToken(step, eos=self.eos)

    def _proposals(self, draft: Sequence[Any]) -> list[Tensor]:
        return [self._drafter.over_target(t.logits) for t in draft]

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token and the draft, which gives the accepted features."""
        logits, states = self._target.forward_with_states(
            self._fed(draft), self._slot, self._drafter.feature_layers
        )
        accepted, emitted = self._settle(draft, logits)
        self._chain.learn(emitted, states[: len(emitted)])
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
        self._logits = self._last  # (k, draft vocabulary) once a round drafts

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next token of the round's pass, run before the first; None at its end."""
        offset = len(so_far)
        if offset >= self._width:
            return None
        if not offset:
            self._logits, read = self._chain.draft_all(self._width)
            self.calls.add(ONE_PASS, read)
        return self._token(self._logits[offset : offset + 1])


class LayerStep(DraftStep):
    """A layer of the tree, as policies see it.  Its id is -1, because a layer has several tokens.

    It ends no draft: a tree grows on next to a node that ends the text.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer.logits[:1], layer.tokens[:1, 0])
        self.ids, self._layer = [-1], layer

    @cached_property
    def values(self) -> list[Sequence[float]]:
        score, top, second, entropy = layer_signals(self._layer)[0].tolist()
        # Log-probabilities instead of logits, whose log-sum-exp is then 0.
        return [(top, second, 0.0, entropy, score, top, top)]


class TreeDecoder(OnFeaturesDecoder):
    """Decodes one prompt, drafting trees with the drafter of `grown`.

    The target's cache is compacted to the accepted path.  In a round's first pass the drafter reads
    the accepted tokens again, with the target's features instead of its own, as in the authors'
    code.

    ``target`` has room for the source's `budget` besides the text.
    """

    recorder = TreeRecorder
    recorded_sampled = False

    @classmethod
    def room(cls, source: Any, modules: Modules) -> int:
        return max(ROOM, int(source.budget) + 1)

    @classmethod
    def loaded(cls, drafter: FeatureDrafter, source: Any) -> GrownTrees:
        """Return the drafter with the shape of its trees."""
        drafter = super().loaded(drafter, source)
        return GrownTrees(drafter, source.topk or TOPK, source.depth or LAYERS, source.budget)

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        return bool(found.layers >= module.layers)

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        return {**super().provenance(module.drafter, modules), "topk": module.topk}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: Any) -> Iterator[Block]:
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
        drafter = grown.drafter
        check_tree(drafter.modules_in_turn)
        self._features = drafter.feature_layers
        self._budget, self._topk, self._depth = source.budget, source.topk, source.depth
        self._chain = DrafterChain(drafter, target.cache.slots + self._topk * (self._depth - 1))
        logits, states = target.forward_with_states(begin.prompt, 0, self._features)
        self._chain.prefill(begin.prompt, states)
        self._emit_first(logits[-1:])
        self._chain.learn(self._last)
        self._trees: Trees | None = None

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next layer; None at the tree's full depth."""
        if len(so_far) >= self._depth:
            return None
        if not so_far:
            self._trees, width = self._chain.tree(self._topk)
            self.calls.add(DRAFTER, width)
            return ModelToken(LayerStep(self._trees.layers[0]))
        assert self._trees is not None
        self.calls.add(DRAFTER_TREE, self._topk)
        return ModelToken(LayerStep(self._trees.grow()))

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


class LookupDecoder(SourceDecoder):
    """Decodes one prompt with drafts from a lookup.

    ``lookup`` must be new.  ``kind``: index of the lookup's own calls in
    `traces.replay.calls.CALL_KINDS`.  ``first=0`` begins with the verification of the
    prompt, as transformers does.
    """

    def __init__(
        self, target: Runner, lookup: Lookup, kind: int, begin: Begin, first: int = 1
    ) -> None:
        super().__init__(target, begin)
        self._lookup, self._kind = lookup, kind
        self._pending = begin.prompt  # true tokens that the target has not seen
        self._found: list[Proposal] = []
        lookup.extend(begin.prompt.tolist())
        if first:
            self._verify([])

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        if not so_far:
            self.calls.add(self._kind, 1)
            self._found = self._lookup.propose()
        if len(so_far) >= len(self._found):
            return None
        return proposed(self._found[len(so_far)])

    def verify(self, draft: Sequence[Any]) -> int:
        self.calls.end_round()
        return self._verify([t.token_id for t in draft])

    def _verify(self, draft: list[int]) -> int:
        drafted = self._pending.new_tensor(draft)
        start = self._prompt + len(self.output) - self._pending.shape[0]
        logits = self._target.forward(
            torch.cat([self._pending, drafted]), start, keep=len(draft) + 1
        )
        accepted, emitted, tokens = verify_greedily(drafted, logits)
        self._pending = emitted[-1:]
        self._lookup.extend(tokens)
        self.extend(tokens)
        return accepted


class HeadsDecoder(SourceDecoder):
    """Drafts with parallel heads, of which the first `HeadsSource.k` (None: all) are used."""

    recorder = HeadsRecorder

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, heads: ParallelHeads, source: HeadsSource, begin: Begin
    ) -> None:
        super().__init__(target, begin)
        self._heads = heads
        self._k = heads.k if source.k is None else min(source.k, heads.k)
        logits, states = target.forward_with_states(begin.prompt, 0)
        self._state = states[-1:]  # (1, hidden)
        self._logits = self._state  # (1, k, vocab) once a round drafts
        self._emit_first(logits[-1:])

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next head's token; all heads run before the first."""
        at = len(so_far)
        if not at:
            self.calls.add(HEADS, 1)
            self._logits = head_logits(self._target, self._heads, self._state, self._last)
        if at >= self._k:
            return None
        return self._token(self._logits[:, at])

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token and the draft; the accepted state serves the heads."""
        logits, states = self._target.forward_with_states(self._fed(draft), self._slot)
        accepted, emitted = self._settle(draft, logits)
        self._state = states[len(emitted) - 1][None]
        return accepted


class HydraDecoder(HeadsDecoder):
    """Drafts with Hydra's heads in turn, one for every token."""

    recorder = HydraRecorder
    cells = (("hydra", "forward"),)
    _heads: Any

    @classmethod
    def provenance(cls, module: Any, modules: Modules) -> dict[str, Any]:
        return {"heads": digest_of_weights(module)}

    @classmethod
    def blocks(cls, rounds: LayerRounds, name: str, module: HydraHeads) -> Iterator[Block]:
        """Yield rounds of all heads in turn and the target's pass over what they draft."""
        target, state = rounds.target, rounds.states[:1]
        tokens = torch.zeros(1, module.k, dtype=torch.long, device=target.device)

        def draft(at: int) -> Step:
            def run() -> object:
                return hydra_logits(target, module, state, tokens[:, : at + 1]).argmax(-1)

            return Step("hydra", "forward", 1, 0, run)

        def verify() -> object:
            return target.forward(tokens[0], 0).argmax(-1).tolist()

        step = Step("target", AFTER_DRAFTER, module.k, 0, verify)
        yield Block([[*map(draft, range(module.k)), step]] * (UNTIMED + 3), UNTIMED)

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next head's token; None after the last head's."""
        if len(so_far) >= self._k:
            return None
        self.calls.add(HYDRA, 1)
        return self._token(
            hydra_logits(self._target, self._heads, self._state, self._fed(so_far)[None])
        )


class SpaceDecoder(SourceDecoder):
    """Verifies the draft and drafts after every candidate in the same pass (SPACE)."""

    recorder = MasksRecorder

    @classmethod
    def room(cls, source: Any, modules: Modules) -> int:
        """Return room for the masks after every drafted token."""
        return ROOM * (1 + int(cls.module(modules, source).k))

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, masks: MaskEmbeddings, source: Space, begin: Begin
    ) -> None:
        super().__init__(target, begin)
        self._masks = masks
        self._k = masks.k if source.k is None else min(source.k, masks.k)
        if self._prompt > 1:
            target.forward(begin.prompt[:-1], 0, keep=1)
        logits = self._pass([])
        self._drafts = self._foreseen[0]  # (k, vocab)
        self._emit_first(logits)

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        if len(so_far) >= self._k:
            return None
        return self._token(self._drafts[len(so_far)][None])

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token, the draft, and the masks after each of them."""
        logits = self._pass(draft)
        self.calls.add(PASS, len(logits) * (self._k + 1), verify=True)
        accepted, emitted = self._settle(draft, logits)
        self._drafts = self._foreseen[len(emitted) - 1]
        return accepted

    def _pass(self, draft: Sequence[Any]) -> Tensor:
        """Return the target's logits after the last token and the draft, (1 + count, vocab)."""
        feed = self._fed(draft)
        at = torch.arange(feed.shape[0], device=feed.device)
        logits, self._foreseen = mask_logits(
            self._target, self._masks, feed, at, self._k, self._slot
        )
        return logits


class LayerSkipDecoder(SourceDecoder):
    """Drafts with some of the target's layers left out (Draft & Verify).

    Draft states stay in the cache for the rest of the round and are then overwritten by the
    verification, which runs every layer.
    """

    recorder = SkipRecorder

    @classmethod
    def module(cls, modules: Modules, source: Source) -> None:
        """Return None: there is nothing to train."""

    @classmethod
    def asked(cls, how: RecordOptions, source: Any, gamma: int) -> RecordOptions:
        return how if source.skip is None else replace(how, skip=source.skip)

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        """Return True if the same layers were skipped, or any may be."""
        return how.skip is None or list(how.skip) == found.meta.get("skip")

    @torch.inference_mode()
    def __init__(self, target: LayerRunner, module: None, source: LayerSkip, begin: Begin) -> None:
        super().__init__(target, begin)
        skip = default_skip(target.layers) if source.skip is None else source.skip
        self._kept = kept_layers(target.layers, list(skip))
        self._emit_first(target.forward(begin.prompt, 0, keep=1))

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken:
        feed = so_far[-1].device_id if so_far else self._last
        hidden = self._target.run_layers(
            self._target.embed(feed), self._slot + len(so_far), self._kept
        )
        logits = self._target.logits(hidden)
        self.calls.add(LAYER, 1, len(self._kept))
        self.calls.add(HEAD, 1)
        return self._token(logits)
