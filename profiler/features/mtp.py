"""Multi-token prediction: decoder layers after the target that each foresee one token more."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from profiler.features.base import FeatureDrafter


class MtpLayer(LlamaDecoderLayer):
    """A Llama layer after two norms and a projection of [embedding; previous state]."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_layernorm = LlamaRMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.final_layernorm = LlamaRMSNorm(width, eps)


class Mtp(FeatureDrafter):
    """MTP modules (DeepSeek-V3, arXiv:2412.19437, sec. 2.2; FastMTP, arXiv:2509.18362).

    A module reads the target's final state (or the module before), and the token's embedding; the
    normed output goes to the target's head and is used as the next state.  With one module it
    drafts every token in turn, as EAGLE's layer does; with several the j-th drafts the j-th and no
    draft is longer.  Parameters are named as in the ``speculators`` format.
    """

    kind: ClassVar[str] = "mtp"

    def __init__(self, config: LlamaConfig, modules: int = 1) -> None:
        super().__init__(config)
        if modules < 1:
            raise ValueError(f"modules is {modules}, expected at least 1")
        self.modules_in_turn = modules
        self.mtp_layers = nn.ModuleList(MtpLayer(config, i) for i in range(modules))
        self._initialise()

    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `FeatureDrafter.step`."""
        layer: Any = self.mtp_layers[module]
        both = torch.cat([layer.token_layernorm(embedded), layer.hidden_layernorm(fused)], -1)
        out: Tensor = layer(
            layer.input_proj(both), attention_mask=mask, position_embeddings=rotary,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        normed: Tensor = layer.final_layernorm(out)
        return normed, normed
