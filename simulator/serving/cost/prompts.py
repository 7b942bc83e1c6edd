"""Seconds of the prompts that an iteration reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.serving.cost.reader import PassReader
from simulator.serving.cost.work import Chunk
from traces.latency.table import LatencyTable


class Prompts(NamedTuple):
    """The time of one iteration's prompt chunks by themselves, and the chunks."""

    draft_s: float
    target_s: float
    tokens: int
    """Zero where the target's prompts have no price."""
    cached: int
    """Tokens of the same prompts that were processed before."""


NO_PROMPTS = Prompts(0.0, 0.0, 0, 0)


class PromptCost:
    """Prices prompt chunks of `models`.

    Prompts processed whole are read from the prefill cells: each at its own length, for attention
    grows with the square, and several together as much less than one by one as prompts alike of
    their mean length are.  Chunks are read from the forward cells at their mean width and context.
    A model without prefill cells reads prompts at no cost.
    """

    def __init__(self, latency: LatencyTable, models: Sequence[str]) -> None:
        self.models = models
        self._prefill = {
            m: PassReader(latency, m, "prefill") for m in models if latency.has(m, "prefill")
        }
        # The longest prompts of which several were measured in one pass.
        self._longest = {m: latency.grid(m, "prefill").widest_together for m in self._prefill}

    def prices(self, model: str) -> bool:
        """Return True if prompts of `model` cost anything."""
        return model in self._prefill

    @property
    def readers(self) -> list[PassReader]:
        """Return the readers in use."""
        return list(self._prefill.values())

    @property
    def unpriced(self) -> list[str]:
        """Return what is read at no cost because the table lacks its cells."""
        return [f"{m} prefill" for m in self.models if m not in self._prefill]

    def seconds(self, model: str, forward: PassReader | None, chunks: Sequence[Chunk]) -> float:
        """Seconds of one pass of `model` over `chunks`; ``forward`` reads its passes."""
        prefill = self._prefill.get(model)
        if prefill is None or forward is None or not chunks:
            return 0.0
        if len(chunks) == 1:  # as mostly, and then it is worth while to be quick
            [(slot, tokens)] = chunks
            if not slot.prefilled and slot.prefill_left == tokens:
                return prefill(1, float(tokens), 0.0)
        lengths = [c.tokens for c in chunks]
        cached = sum([c.slot.prefilled for c in chunks])
        if not cached and all(c.slot.prefill_left == c.tokens for c in chunks):
            return self._whole(prefill, lengths, self._longest[model])
        return forward(len(chunks), sum(lengths) / len(chunks), cached / len(chunks))

    @staticmethod
    def _whole(prefill: PassReader, lengths: Sequence[int], longest: float) -> float:
        count, mean = len(lengths), sum(lengths) / len(lengths)
        # Beyond the longest that were measured together, prompts share as much as those.
        alike = min(mean, longest)
        together_s = prefill(count, alike, 0.0)
        if all(length == alike for length in lengths):
            return together_s
        if not together_s:  # a drafter without a model of its own
            return 0.0
        alone_s = sum([prefill(1, length, 0.0) for length in lengths])
        return together_s * alone_s / (count * prefill(1, alike, 0.0))
