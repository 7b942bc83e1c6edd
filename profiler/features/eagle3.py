"""EAGLE-3's drafter: features of three depths, and a head over a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from profiler.features.base import FeatureDrafter


class WideLayer(nn.Module):
    """A decoder layer whose attention reads [normed embedding; normed feature].

    ``norm_before_residual``: the residual stream begins after the feature's norm.
    """

    def __init__(self, config: LlamaConfig, norm_before_residual: bool = False) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * width, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)

    def forward(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any,
    ) -> Tensor:  # fmt: skip
        """(batch, entries, hidden) each -> the same, not normed."""
        normed = self.hidden_norm(fused)
        residual = normed if self.norm_before_residual else fused
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(
            both, position_embeddings=rotary, attention_mask=mask, past_key_values=cache
        )
        states = residual + attended
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3(FeatureDrafter):
    """EAGLE-3 (Li et al., arXiv:2503.01840, sec. 3.1).

    Parameters are named as in EAGLE's repository.  The layer's output, not normed, is used as the
    next feature; the head reads it after ``norm``.

    Parameters
    ----------
    config:
        Of the layer.
    draft_tokens:
        Target ids that it can draft, ascending; None: all.
    feature_layers:
        Depths whose states it reads, ascending (see `default_depths`).
    target_width:
        Width of the target, where it is not the drafter's.
    norm_before_residual, norm_before_fc:
        Variants of the ``speculators`` format.
    """

    kind: ClassVar[str] = "eagle3"

    def __init__(
        self, config: LlamaConfig, draft_tokens: Sequence[int] | Tensor | None,
        feature_layers: Sequence[int], *, target_width: int | None = None,
        norm_before_residual: bool = False, norm_before_fc: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config)
        depths = tuple(feature_layers)
        if not depths or depths[0] < 0 or list(depths) != sorted(set(depths)):
            raise ValueError(f"feature_layers is {list(depths)}, expected ascending depths")
        self.feature_layers = depths
        self.target_width = target_width or config.hidden_size
        inputs = self.feature_width
        self.input_norm = LlamaRMSNorm(inputs, config.rms_norm_eps) if norm_before_fc else None
        self.fc = nn.Linear(inputs, config.hidden_size, bias=False)
        self.midlayer = WideLayer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if draft_tokens is None:
            draft_tokens = torch.arange(config.vocab_size)
        chosen = torch.as_tensor(draft_tokens, dtype=torch.long)
        outside = len(chosen) and not 0 <= int(chosen[0]) <= int(chosen[-1]) < config.vocab_size
        if not len(chosen) or outside or not bool((chosen.diff() > 0).all()):
            raise ValueError(
                f"draft_tokens must be ascending ids below {config.vocab_size}, each once"
            )
        self.lm_head = nn.Linear(config.hidden_size, len(chosen), bias=False)
        # d2t holds what to add to a draft id, t2d which target ids there are.
        self.register_buffer("d2t", chosen - torch.arange(len(chosen)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.t2d[chosen] = True
        lookup = torch.full((config.vocab_size,), -1)
        lookup[chosen] = torch.arange(len(chosen))
        self.register_buffer("_lookup", lookup, persistent=False)
        self._initialise()

    d2t: Tensor
    t2d: Tensor
    _lookup: Tensor

    @property
    def feature_width(self) -> int:
        """The width of all depths together."""
        return int(self.target_width) * len(self.feature_layers)

    @property
    def draft_vocab_size(self) -> int:
        """Tokens it can draft."""
        return int(self.lm_head.out_features)

    def logits(self, states: Tensor) -> Tensor:
        """Its own head, over the draft vocabulary."""
        out: Tensor = self.lm_head(states)
        return out

    def target_ids(self, drafted: Tensor) -> Tensor:
        """See `FeatureDrafter.target_ids`."""
        return drafted + self.d2t[drafted]

    def over_target(self, logits: Tensor) -> Tensor:
        """See `FeatureDrafter.over_target`."""
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        full[..., self.t2d] = logits
        return full

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """See `FeatureDrafter.draft_ids`; padding below 0 stays -1."""
        found: Tensor = self._lookup[tokens.clamp(min=0)]
        return found.masked_fill(tokens < 0, -1)

    def fuse(self, features: Tensor) -> Tensor:
        """The three depths become one."""
        given = features.to(self.dtype)
        if self.input_norm is not None:
            given = self.input_norm(given)
        out: Tensor = self.fc(given)
        return out

    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `FeatureDrafter.step`."""
        del module
        out = self.midlayer(embedded, fused, rotary, mask, cache)
        return self.norm(out), out
