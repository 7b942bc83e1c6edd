"""Real decoding with Kangaroo's adapter: a fixed shallow exit followed by an attention block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.features.heads import Adapter, AdapterRunner
from profiler.models.stack import LayerRunner
from profiler.sources.early_exit import EarlyExitDecoder, ExitToken
from traces.acceptance.sampling import GREEDY
from traces.replay.calls import ADAPTER
from traces.sources.exits.early_exit import Kangaroo


class KangarooDecoder(EarlyExitDecoder):
    """Decodes one prompt, drafting by the adapter (`policies.core.Decoder`).

    A position enters the adapter's keys and values when something is drafted after it, or, being
    the last of a fully accepted draft, together with the next that does.

    Parameters as in `EarlyExitDecoder`, with an adapter instead of the heads.
    """

    def __init__(
        self, target: LayerRunner, adapter: Adapter, source: Kangaroo, prompt: Tensor,
        max_new_tokens: int, eos: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._adapter, self._exit = AdapterRunner(adapter, target), adapter.layer
        self._pending: list[Tensor] = []  # (1, hidden) each: exit states the adapter lacks
        super().__init__(target, adapter, source, prompt, max_new_tokens, eos)

    @torch.inference_mode()
    def _prefill(self, prompt: Tensor) -> Tensor:
        target = self._target
        hidden = target.run_layers(target.embed(prompt), 0, range(self._exit))
        self._adapter.run(hidden, 0)
        hidden = target.run_layers(hidden, 0, range(self._exit, target.layers))
        return target.logits(hidden[-1:])

    @torch.inference_mode()
    def draft(self, so_far: Sequence[Any]) -> ExitToken:
        """Run the last token to the exit, and the adapter over what it lacks."""
        self._enter(so_far[-1].device_id if so_far else self._last)
        self._run(self._ledger.deepen(self._exit))
        width = len(self._pending)
        slot = self._prompt + len(self.output) - 1 + len(self._states) - width
        states = self._adapter.run(torch.cat(self._pending), slot)
        self._pending.clear()
        logits = self._target.project(states[-1:])
        self.calls.add(ADAPTER, width)
        return ExitToken(logits.argmax(-1), logits, GREEDY, self.eos, self._exit)

    def verify(self, draft: Sequence[Any]) -> int:
        """As early exit does; what was refused leaves nothing for the adapter to take in."""
        accepted = super().verify(draft)
        if accepted < len(draft):
            self._pending.clear()
        return accepted

    def _run(self, segments: list[tuple[int, int, int]]) -> None:
        for first, last, width in segments:
            if first < self._exit <= last:
                super()._run([(first, self._exit, width)])
                self._pending.append(self._states[-1])
                first = self._exit  # noqa: PLW2901
            if first < last:
                super()._run([(first, last, width)])
