"""Real decoding with lookups, parallel heads, mask tokens and skipped layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.single import ModelToken
from profiler.features.heads import MaskEmbeddings, ParallelHeads, mask_layout
from profiler.latency.table import Step
from profiler.models.runner import Runner
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
    mask_states,
)
from traces.acceptance.sampling import GREEDY
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
        self._target, self._lookup, self._kind = target, lookup, kind
        self._pending = begin.prompt  # true tokens that the target has not seen
        self._in_target = 0
        self._proposals: list[Proposal] = []
        lookup.extend(begin.prompt.tolist())
        if first:
            self._verify([])

    def draft(self, so_far: Sequence[Any]) -> RecordedToken | None:
        """Return the next token of this round's proposal; None at its end."""
        if not so_far:
            self.calls.add(self._kind, 1)
            self._proposals = self._lookup.propose()
        if len(so_far) >= len(self._proposals):
            return None
        return proposed(self._proposals[len(so_far)])

    def verify(self, draft: Sequence[Any]) -> int:
        """Run one target pass over the last token and the draft."""
        self.calls.end_round()
        return self._verify([t.token_id for t in draft])

    def _verify(self, draft: list[int]) -> int:
        drafted = self._pending.new_tensor(draft)
        logits = self._target.forward(
            torch.cat([self._pending, drafted]), self._in_target, keep=len(draft) + 1
        )
        picks = logits.argmax(-1)
        accepted, tokens = self._compare([drafted], picks)
        self._in_target += self._pending.shape[0] + len(tokens) - 1
        self._pending = picks[len(tokens) - 1][None]
        self._lookup.extend(tokens)
        self.extend(tokens)
        return accepted


class HeadsDecoder(SourceDecoder):
    """Drafts with parallel heads, of which the first `HeadsSource.k` (None: all) are used."""

    @classmethod
    def recorder(cls, target: Any, trace: Trace, module: Any, how: RecordOptions) -> SourceRecorder:
        """Return what records all starts in one pass."""
        return HeadsRecorder(LayerRunner(target, trace.longest), module)

    @classmethod
    def step(cls, target: LayerRunner, module: Any) -> Step:
        """Return a pass of all heads."""
        token = torch.zeros(1, dtype=torch.long, device=target.device)
        state = target.embed(token)
        return Step("heads", "forward", 1, 0, lambda: head_logits(target, module, state, token))

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, heads: ParallelHeads, source: HeadsSource, begin: Begin
    ) -> None:
        super().__init__(target, begin)
        self._target, self._heads = target, heads
        self._k = heads.k if source.k is None else min(source.k, heads.k)
        logits, states = target.forward_with_states(begin.prompt, 0)
        self._state = states[-1:]  # (1, hidden)
        self._last = logits[-1:].argmax(-1)  # (1,)
        self._logits = self._state  # (1, k, vocab) once a round drafts
        self.extend(self._last.tolist())

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next head's token; all heads run before the first."""
        at = len(so_far)
        if not at:
            self.calls.add(HEADS, 1)
            self._logits = head_logits(self._target, self._heads, self._state, self._last)
        if at >= self._k:
            return None
        logits = self._logits[:, at]
        return ModelToken(logits.argmax(-1), logits, GREEDY, self.eos or None)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token and the draft; the accepted state serves the heads."""
        drafted = [t.device_id for t in draft]
        logits, states = self._target.forward_with_states(
            torch.cat([self._last, *drafted]), self._slot
        )
        picks = logits.argmax(-1)
        accepted, tokens = self._compare(drafted, picks)
        self._state = states[len(tokens) - 1][None]
        self._last = picks[len(tokens) - 1][None]
        self.calls.end_round()
        self.extend(tokens)
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
        self._target, self._masks = target, masks
        self._k = masks.k if source.k is None else min(source.k, masks.k)
        prompt = begin.prompt
        if prompt.shape[0] > 1:
            target.forward(prompt[:-1], 0, keep=1)
        self._last = prompt[-1:]
        self._drafts = self._last.float()  # (k, vocab) once a pass has run
        _, tokens, _ = self._pass([], int(prompt.shape[0]) - 1)
        self.extend(tokens)

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """Return the next mask's token."""
        if len(so_far) >= self._k:
            return None
        logits = self._drafts[len(so_far)][None]
        return ModelToken(logits.argmax(-1), logits, GREEDY, self.eos or None)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one pass over the last token, the draft, and the masks after each of them."""
        accepted, tokens, width = self._pass([t.device_id for t in draft], self._slot)
        self.calls.add(PASS, width, verify=True)
        self.calls.end_round()
        self.extend(tokens)
        return accepted

    def _pass(self, drafted: list[Tensor], start: int) -> tuple[int, list[int], int]:
        """Return accepted drafts, tokens to emit, and the width of the pass."""
        feed = torch.cat([self._last, *drafted])
        count, k, device = int(feed.shape[0]), self._k, feed.device
        width = count * (k + 1)
        masks = mask_states(self._target, self._masks, 1)[:k].repeat(count, 1)
        hidden = torch.cat([self._target.embed(feed), masks])
        inner, positions = mask_layout(count, torch.arange(count, device=device), k)
        before = torch.ones(width, start, dtype=torch.bool, device=device)
        hidden = self._target.run_layers(
            hidden, start, range(self._target.layers), mask=torch.cat([before, inner], 1),
            positions=positions + start,
        )  # fmt: skip
        logits = self._target.logits(hidden)
        picks = logits[:count].argmax(-1)
        accepted, tokens = self._compare(drafted, picks)
        chosen = len(tokens) - 1
        self._last = picks[chosen][None]
        self._drafts = logits[count + chosen * k : count + (chosen + 1) * k]
        return accepted, tokens, width


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
        del gamma
        return how if source.skip is None else replace(how, skip=source.skip)

    @classmethod
    def fits(cls, found: Any, module: Any, how: RecordOptions) -> bool:
        """Return True if the same layers were skipped, or any may be."""
        del module
        return how.skip is None or list(how.skip) == found.meta.get("skip")

    @torch.inference_mode()
    def __init__(self, target: LayerRunner, module: None, source: LayerSkip, begin: Begin) -> None:
        super().__init__(target, begin)
        skip = default_skip(target.layers) if source.skip is None else source.skip
        self._target, self._kept = target, kept_layers(target.layers, list(skip))
        self._last = target.forward(begin.prompt, 0, keep=1).argmax(-1)
        self.extend(self._last.tolist())

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
        return ModelToken(logits.argmax(-1), logits, GREEDY, self.eos or None)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """Run one full pass over the last token and the draft."""
        drafted = [t.device_id for t in draft]
        feed = torch.cat([self._last, *drafted])
        picks = self._target.forward(feed, self._slot).argmax(-1)
        accepted, tokens = self._compare(drafted, picks)
        self._last = picks[len(tokens) - 1][None]
        self.calls.end_round()
        self.extend(tokens)
        return accepted
