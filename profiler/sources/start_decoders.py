"""Real decoding with lookups, parallel heads, mask tokens and skipped layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.tokens import ModelToken
from profiler.features.heads import MaskEmbeddings, ParallelHeads
from profiler.models.runner import Runner
from profiler.models.sampling import verify_greedily
from profiler.models.stack import LayerRunner
from profiler.sources.exits import ROOM, Begin, Modules, SourceDecoder
from profiler.sources.start_record import (
    CHUNK,
    HeadsRecorder,
    MasksRecorder,
    RecordOptions,
    SkipRecorder,
    SourceRecorder,
    default_skip,
    head_logits,
    kept_layers,
    mask_logits,
)
from traces.acceptance.tape import RecordedToken
from traces.acceptance.trace import Trace
from traces.replay.calls import HEAD, LAYER, PASS
from traces.sources.base import Source
from traces.sources.lookups.sources import proposed
from traces.sources.lookups.text import Lookup, Proposal
from traces.sources.starts.sources import HEADS, HeadsSource, LayerSkip, Space


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
        """Return the next token of this round's proposal; None at its end."""
        if not so_far:
            self.calls.add(self._kind, 1)
            self._found = self._lookup.propose()
        if len(so_far) >= len(self._found):
            return None
        return proposed(self._found[len(so_far)])

    def verify(self, draft: Sequence[Any]) -> int:
        """Run one target pass over the last token and the draft."""
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

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        """Return what records all starts in one pass."""
        return HeadsRecorder(LayerRunner(target, trace.longest), module)

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


class SpaceDecoder(SourceDecoder):
    """Verifies the draft and drafts after every candidate in the same pass (SPACE)."""

    @classmethod
    def room(cls, source: Any, modules: Modules) -> int:
        """Return room for the masks after every drafted token."""
        return ROOM * (1 + int(cls.module(modules, source).k))

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        """Return what records some starts in a pass."""
        return MasksRecorder(LayerRunner(target, trace.longest + CHUNK * module.k), module)

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
        """Return the next mask's token."""
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

    @classmethod
    def module(cls, modules: Modules, source: Source) -> None:
        """Return None: there is nothing to train."""

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        """Return what records chains from every start."""
        runner = LayerRunner(target, trace.longest + CHUNK * how.offsets)
        return SkipRecorder(runner, None if how.skip is None else list(how.skip), how.offsets)

    @classmethod
    def asked(cls, how: RecordOptions, source: Any, gamma: int) -> RecordOptions:
        """Return `how` with the layers that the source skips."""
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
        """Run one pass through the kept layers."""
        feed = so_far[-1].device_id if so_far else self._last
        hidden = self._target.run_layers(
            self._target.embed(feed), self._slot + len(so_far), self._kept
        )
        logits = self._target.logits(hidden)
        self.calls.add(LAYER, 1, len(self._kept))
        self.calls.add(HEAD, 1)
        return self._token(logits)
