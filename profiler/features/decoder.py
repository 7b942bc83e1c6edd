"""Real decoding with EAGLE, EAGLE-3 and MTP drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.features.base import FeatureDrafter
from profiler.features.chain import DrafterChain
from profiler.signals import signals
from profiler.sources.stack import LayerRunner
from profiler.sources.start_decoders import StateDecoder
from profiler.tokens import ModelToken
from traces.sampling import GREEDY
from traces.sources.calls import DRAFTER


class FeatureToken(ModelToken):
    """A token of a drafter whose vocabulary may be smaller: its signals are of that one."""

    __slots__ = ()

    def _fetch(self) -> tuple[float, ...]:
        if self._values is None:
            of = signals(self._logits).stack()[0]
            # Of the likeliest token, drawn greedily.
            log_prob = of[:1] - of[2:3]
            self._values = tuple(torch.cat([of, *[log_prob] * 3]).tolist())
        return self._values


class FeatureDecoder(StateDecoder):
    """Decodes one prompt, drafting with `drafter` (`policies.core.Decoder`)."""

    takes_verified = True

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, prompt: Tensor, max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        super().__init__(target, prompt, max_new_tokens, eos)
        self._drafter = drafter
        self._chain = DrafterChain(drafter, target.cache.slots)
        logits, states = target.forward_with_states(prompt, 0, drafter.feature_layers)
        self._last = logits[-1:].argmax(-1)  # (1,)
        self._chain.prefill(prompt, states)
        self._chain.learn(self._last)
        self._emit(self._last.tolist())

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """The next token of the chain; None when modules that run in turn are used up."""
        offset = len(so_far)
        if offset >= self._drafter.modules_in_turn > 1:
            return None
        logits, width = self._chain.draft(offset, so_far[-1].device_id if so_far else None)
        self.calls.add(DRAFTER, width)
        drafted = self._drafter.target_ids(logits.argmax(-1))
        return FeatureToken(drafted, logits, GREEDY, self.eos or None)

    @torch.inference_mode()
    def verify(self, draft: Sequence[Any]) -> int:
        """One pass over the last token and the draft, which gives the accepted features."""
        drafted = [t.device_id for t in draft]
        logits, states = self._target.forward_with_states(
            torch.cat([self._last, *drafted]), self._slot, self._drafter.feature_layers
        )
        picks = logits.argmax(-1)
        accepted, tokens = self._compare(drafted, picks)
        self._last = picks[len(tokens) - 1][None]
        self._chain.learn(picks[: len(tokens)], states[: len(tokens)])
        self.calls.end_round()
        self._emit(tokens)
        return accepted
