"""llama.cpp's drafting: a largest length, a least probability, and a least number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.core import DraftPolicy
from policies.spec import ordered, parameter, whole, within
from policies.vectorised import Below, Lengths, OwnStop, Starts, VectorisedPlan


@dataclass(eq=False)
class LlamaCppDraft(DraftPolicy):
    """Stops before a token that the draft gave less than `p_min` (llama.cpp ``draft-simple``).

    That token was paid for and is dropped, and so is a draft of fewer than `gamma_min`
    tokens.  Source of the behaviour: ggml-org/llama.cpp, ``common/speculative.cpp`` (2026),
    and what its server counted.  The probability is normalised over the ten likeliest tokens
    that its sampler keeps, not over the vocabulary.  One thing differs there: a proposed end of
    the text does not end the draft.

    Parameters
    ----------
    gamma, gamma_min, p_min:
        ``--spec-draft-n-max``, ``-n-min`` and ``-p-min``, with the server's defaults.
    """

    reads = ("top10_prob",)
    gamma: int = parameter(3, whole, 1)
    gamma_min: int = parameter(0, whole, 0)
    p_min: float = parameter(0.0, within, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        ordered("gamma_min", self.gamma_min, "gamma", self.gamma)
        if not self.p_min:
            vars(self)["reads"] = ()  # without the test, no signal is fetched

    def keep_drafting(self, draft: Sequence[Any]) -> bool:
        return len(draft) < self.gamma and not self._unsure(draft)

    def submit(self, draft: Sequence[Any]) -> int:
        kept = len(draft) - self._unsure(draft)
        return kept if kept >= self.gamma_min else 0

    def _unsure(self, draft: Sequence[Any]) -> bool:
        return bool(draft and self.p_min and draft[-1].top10_prob < self.p_min)

    def vectorised(self, batch: int) -> VectorisedPlan:
        return VectorisedPlan(stop=OwnStop(self._lengths))

    def _lengths(self, starts: Starts) -> Lengths:
        found = Lengths(starts.most)
        if self.p_min:
            found = Below("top10_prob", self.p_min, drops=True).lengths(starts)
        forwards = np.minimum(found.forwards, self.gamma)
        kept = forwards if found.sent is None else np.minimum(found.sent, forwards)
        return Lengths(forwards, np.where(kept >= self.gamma_min, kept, 0))
