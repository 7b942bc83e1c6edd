"""Real decoding with EAGLE, EAGLE-3 and MTP drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.decoding.tokens import ModelToken
from profiler.features.drafters import FeatureDrafter
from profiler.features.runner import DrafterChain
from profiler.models.sampling import drafted
from profiler.models.stack import LayerRunner
from profiler.sources.exits import Draws
from profiler.sources.start_decoders import StateDecoder
from traces.acceptance.sampling import GREEDY, Sampling
from traces.replay.calls import DRAFTER, ONE_PASS


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


class FeatureDecoder(StateDecoder):
    """Decodes one prompt, drafting with `drafter` (`policies.core.Decoder`)."""

    takes_verified = True

    @torch.inference_mode()
    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, prompt: Tensor, max_new_tokens: int,
        eos: frozenset[int] = frozenset(), draws: Draws | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, prompt, max_new_tokens, eos)
        self._drafter, self._draws = drafter, draws
        self._chain = DrafterChain(drafter, target.cache.slots)
        logits, states = target.forward_with_states(prompt, 0, drafter.feature_layers)
        last = logits[-1:]
        self._last = last.argmax(-1) if draws is None else draws.first(last)  # (1,)
        self._chain.prefill(prompt, states)
        self._chain.learn(self._last)
        self._no_drafts = drafter.logits(drafter.fuse(states[:0]))  # (0, draft vocabulary)
        self._emit(self._last.tolist())

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """The next token of the chain; None when modules that run in turn are used up."""
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
        """One pass over the last token and the draft, which gives the accepted features."""
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
        self._emit(tokens)
        return accepted


class ParallelDecoder(FeatureDecoder):
    """Decodes one prompt greedily, drafting `width` tokens of a round by one pass."""

    def __init__(
        self, target: LayerRunner, drafter: FeatureDrafter, prompt: Tensor, max_new_tokens: int,
        eos: frozenset[int] = frozenset(), *, width: int,
    ) -> None:  # fmt: skip
        super().__init__(target, drafter, prompt, max_new_tokens, eos)
        self._width = width
        self._logits = self._no_drafts

    def draft(self, so_far: Sequence[Any]) -> ModelToken | None:
        """The next token of the round's pass, which runs before the first; None at its end."""
        offset = len(so_far)
        if offset >= self._width:
            return None
        if not offset:
            self._logits, read = self._chain.draft_all(self._width)
            self.calls.add(ONE_PASS, read)
        logits = self._logits[offset : offset + 1]
        own = logits.argmax(-1)
        return FeatureToken(self._drafter.target_ids(own), own, logits, GREEDY, self.eos or None)
