"""Seconds of a pass that prompts share with decoding sequences.

Such a pass is not one of mean width: the sequences' attention costs what it costs alone, and
all tokens go through the layers together.  Where an engine was measured, what prompts add has
cells of its own (phase ``mixed``), of one prompt beside those that decode.  Elsewhere, and for more
prompt tokens than such cells have, the two passes are added less one launch, for the weights are
read, and the kernels launched, once: what prompts take by themselves was measured further, and
of several at a time.
"""

from __future__ import annotations

import math

import numpy as np

from simulator.serving.cost.lines import lines_of
from simulator.serving.cost.prompts import PromptsEach
from simulator.serving.cost.reader import Coverage, PassReader, Span
from simulator.serving.cost.slab import Floats
from simulator.serving.cost.work import Ints
from traces.latency.table import LatencyTable

COMPOSED = "composed"
"""Origin of passes put together from a decoding one and the prompts' own."""


class MixedPasses:
    """Prices what prompts make of a target pass that decodes."""

    def __init__(self, latency: LatencyTable) -> None:
        own = latency.has("target", "mixed")
        self._added = PassReader(latency, "target", "mixed") if own else None
        self._most = lines_of(latency, "target", "mixed").widest if own else 0.0
        self._launch_s = lines_of(latency, "target", "forward").quickest_s
        nothing = Span(math.inf, -math.inf)
        self._composed = Coverage("target", "mixed", COMPOSED, 0, nothing, nothing, nothing)

    @property
    def coverage(self) -> list[Coverage]:
        """Of the cells that were read, and the passes put together without any."""
        read = self._added.coverage if self._added is not None else []
        return [*read, self._composed] if self._composed.passes else read

    def seconds(
        self, decode_s: float, decoded: int, prompt_s: float, tokens: int, cached: int
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

    def each(self, decode_s: Floats, decoded: Ints, prompts: PromptsEach) -> Floats:
        """`seconds` of many passes."""
        found = np.empty(len(decode_s))
        own = (prompts.cached == 0) & (prompts.tokens <= self._most)
        if self._added is not None and own.any():
            sizes = zip(decoded[own].tolist(), prompts.tokens[own].tolist(), strict=True)
            found[own] = decode_s[own] + [self._added(d, tokens, 0.0) for d, tokens in sizes]
        if own.all():
            return found
        rest = ~own
        old, decode_s, prompt_s = self._composed, decode_s[rest], prompts.target_s[rest]
        sizes_of = decoded[rest], prompts.tokens[rest], prompts.cached[rest]
        spans = [
            Span(min(span.low, int(sizes.min())), max(span.high, int(sizes.max())))
            for span, sizes in zip(old[4:], sizes_of, strict=True)
        ]
        self._composed = Coverage(*old[:3], old.passes + len(prompt_s), *spans)
        together_s = decode_s + prompt_s - self._launch_s
        found[rest] = np.maximum(np.maximum(decode_s, prompt_s), together_s)
        return found


def _wider(span: Span, value: float) -> Span:
    return Span(min(span.low, value), max(span.high, value))
