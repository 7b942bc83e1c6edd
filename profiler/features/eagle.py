"""EAGLE's drafter: one decoder layer that continues the target's final features."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from profiler.features.base import FeatureDrafter


class Eagle(FeatureDrafter):
    """EAGLE (Li et al., arXiv:2401.15077, sec. 3.1): ``fc`` over [embedding; feature], a layer.

    The layer has no input norm.  Its output goes to the target's head as it is, instead of a normed
    state of the target.  Parameters are named as in EAGLE's repository.

    ``bias``: whether ``fc`` has one (as those for Vicuna and LLaMA-2; not in vLLM).
    """

    kind: ClassVar[str] = "eagle"

    def __init__(self, config: LlamaConfig, bias: bool = False) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        layer: Any = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self._initialise()

    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `FeatureDrafter.step`; the output is both."""
        del module
        states = self.fc(torch.cat([embedded, fused], -1))
        out: Tensor = self.layers[0](
            states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        return out, out
