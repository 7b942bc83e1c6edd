"""P-EAGLE: an EAGLE-3 drafter that foresees every token of a round in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from profiler.features.eagle3 import Eagle3

MASK = -1
"""The token id of a mask, which is not a target id."""


class ParallelEagle3(Eagle3):
    """EAGLE-3's layer with mask tokens (P-EAGLE, arXiv:2602.01469, sec. 3).

    A later token of a round reads a learnt embedding and a learnt state instead of the token and
    the feature that an autoregressive drafter feeds itself.  So no token waits for another, and one
    pass over the round's entries and masks drafts them all.  The state is kept after ``fc``; vLLM's
    files keep it before, so they are not read, and these not by vLLM.

    Parameters are those of `Eagle3`.
    """

    kind: ClassVar[str] = "p-eagle"
    one_pass: ClassVar[bool] = True

    def __init__(
        self, config: LlamaConfig, draft_tokens: Sequence[int] | Tensor | None,
        feature_layers: Sequence[int], *, target_width: int | None = None,
        norm_before_residual: bool = False, norm_before_fc: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            config, draft_tokens, feature_layers, target_width=target_width,
            norm_before_residual=norm_before_residual, norm_before_fc=norm_before_fc,
        )  # fmt: skip
        self.mask_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.mask_state = nn.Parameter(torch.zeros(config.hidden_size))

    def embed(self, tokens: Tensor) -> Tensor:
        """(...,) target ids or MASK -> (..., hidden)."""
        known = super().embed(tokens.clamp(min=0))
        return torch.where((tokens == MASK)[..., None], self.mask_token.to(known.dtype), known)

    def following(self, tokens: Tensor, fed_back: Tensor) -> tuple[Tensor, Tensor]:
        """Masks, whatever was drafted; see `FeatureDrafter.following`."""
        return torch.full_like(tokens, MASK), self.mask_state.to(fed_back).expand_as(fed_back)
