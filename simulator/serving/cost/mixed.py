"""Seconds of a pass that prompts share with decoding sequences.

Such a pass is not one of mean width: the sequences' attention costs what it costs alone, and
all tokens go through the layers together.  Where an engine was measured, what prompts add has
cells of its own (phase ``mixed``), of one prompt with those that decode.  Elsewhere, and for more
prompt tokens than such cells have, the two passes are added less one launch, for the weights are
read, and the kernels launched, once: what prompts take by themselves was measured further, and
of several at a time.
"""

from __future__ import annotations

import math

from simulator.serving.cost.reader import Coverage, PassReader, Span
from traces.latency.table import LatencyTable

COMPOSED = "composed"
"""Origin of passes put together from a decoding one and the prompts' own."""


class MixedPasses:
    """Prices what prompts make of a target pass that decodes."""

    def __init__(self, latency: LatencyTable) -> None:
        own = latency.has("target", "mixed")
        self._added = PassReader(latency, "target", "mixed") if own else None
        self._most = latency.grid("target", "mixed").widest if own else 0.0
        self._launch_s = latency.grid("target", "forward").quickest_s
        nothing = Span(math.inf, -math.inf)
        self._composed = Coverage("target", "mixed", COMPOSED, 0, nothing, nothing, nothing)

    @property
    def coverage(self) -> list[Coverage]:
        """The coverage of the cells that were read, and of the passes put together without any."""
        read = self._added.coverage if self._added is not None else []
        return [*read, self._composed] if self._composed.passes else read

    def seconds(
        self, decode_s: float, decoded: float, prompt_s: float, tokens: int, cached: int
    ) -> float:
        """Seconds of a pass over `decoded` tokens and prompts of `tokens`, `cached` before.

        By themselves they take `decode_s` and `prompt_s`; together never less than either.
        """
        if self._added is not None and not cached and tokens <= self._most:
            return decode_s + self._added(decoded, tokens, 0.0)
        old = self._composed
        self._composed = old._replace(
            passes=old.passes + 1, batch=_wider(old.batch, decoded),
            new_tokens=_wider(old.new_tokens, tokens), context=_wider(old.context, cached),
        )  # fmt: skip
        return max(decode_s, prompt_s, decode_s + prompt_s - self._launch_s)


def _wider(span: Span, value: float) -> Span:
    return Span(min(span.low, value), max(span.high, value))
