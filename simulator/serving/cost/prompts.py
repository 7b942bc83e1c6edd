"""Seconds of the prompts that an iteration reads."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.serving.cost.reader import PassReader
from simulator.serving.cost.work import Chunk
from traces.latency.table import LatencyTable


class PromptCost:
    """Prices prompt chunks of `models`.

    Prompts processed whole are read from the prefill cells, chunks from the forward cells at
    their mean width and context.  A model without prefill cells reads prompts at no cost.
    """

    def __init__(self, latency: LatencyTable, models: Sequence[str]) -> None:
        self.models = models
        self._prefill = {
            m: PassReader(latency, m, "prefill") for m in models if latency.has(m, "prefill")
        }

    def prices(self, model: str) -> bool:
        """Whether prompts of `model` cost anything."""
        return model in self._prefill

    @property
    def readers(self) -> list[PassReader]:
        """What is read from."""
        return list(self._prefill.values())

    @property
    def unpriced(self) -> list[str]:
        """What is read at no cost because the table lacks its cells."""
        return [f"{m} prefill" for m in self.models if m not in self._prefill]

    def seconds(self, model: str, forward: PassReader | None, chunks: Sequence[Chunk]) -> float:
        """Seconds of one pass of `model` over `chunks`; ``forward`` reads its passes."""
        prefill = self._prefill.get(model)
        if prefill is None or forward is None or not chunks:
            return 0.0
        count = len(chunks)
        tokens = sum([c.tokens for c in chunks])
        cached = sum([c.slot.prefilled for c in chunks])
        whole = all(c.slot.prefill_left == c.tokens for c in chunks)
        reader, context = (prefill, 0.0) if whole and not cached else (forward, cached / count)
        return reader(count, tokens / count, context)
