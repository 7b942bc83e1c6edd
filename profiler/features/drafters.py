"""The kinds of drafters on the target's features: EAGLE, EAGLE-3, P-EAGLE and MTP modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from traces.errors import DraftsimError

SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "mlp_bias", "attention_bias",
)  # fmt: skip
"""Settings of a model's configuration that one decoder layer depends on."""


def layer_config(config: Any) -> LlamaConfig:
    """Return the configuration of one Llama layer in the shape of a model's.

    ``config``: a transformers configuration, or the contents of a ``config.json``.
    """
    given = config if isinstance(config, dict) else config.get_text_config().to_dict()
    settings = {name: given[name] for name in SHAPE if given.get(name) is not None}
    made = LlamaConfig(
        **settings, num_hidden_layers=1, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    made._attn_implementation = "sdpa"
    return made


class FeatureDrafter(nn.Module, ABC):
    """A small network that drafts from the target's features (see the package's docstring).

    ``config``: of its decoder layer.  Embedding and head are the target's (see `attach`), as
    far as the drafter has none of its own.
    """

    kind: ClassVar[str]
    feature_layers: tuple[int, ...] = ()
    """Depths whose states are its feature, 1 = after the first layer; none: the final one."""
    modules_in_turn = 1
    """Networks of which the j-th drafts the j-th token; 1: the same one drafts them all."""
    one_pass: ClassVar[bool] = False
    """True if later tokens of a round read masks, so that one pass drafts all of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Embedding | None = None
        self._embedding: Tensor | None = None
        self._head: Tensor | None = None
        self._rotary = LlamaRotaryEmbedding(config)

    def attach(self, target: Any) -> Self:
        """Use the embedding and output head of `target`, a transformers causal model.

        Raises DraftsimError if the sizes do not fit.
        """
        given = target.config.get_text_config()
        own = self.config
        fits = own.vocab_size == given.vocab_size and self.feature_width == given.hidden_size * max(
            1, len(self.feature_layers)
        )
        if not fits or any(d > given.num_hidden_layers for d in self.feature_layers):
            depths = f" after layers {list(self.feature_layers)}" if self.feature_layers else ""
            raise DraftsimError(
                f"this {self.kind} drafter reads features of width {self.feature_width}{depths} "
                f"over {own.vocab_size} tokens, and the target has {given.num_hidden_layers} "
                f"layers of width {given.hidden_size} and {given.vocab_size} tokens: it was "
                "trained for another"
            )
        self._embedding = target.get_input_embeddings().weight.detach()
        self._head = target.get_output_embeddings().weight.detach()
        return self

    @property
    def feature_width(self) -> int:
        """Numbers of one feature."""
        return int(self.config.hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """Map (...,) target ids -> (..., hidden)."""
        table = self._embedding if self.embed_tokens is None else self.embed_tokens.weight
        if table is None:
            raise DraftsimError("no embedding: attach a target to this drafter first")
        return nn.functional.embedding(tokens, table).to(self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Map (..., hidden) states of `step` -> (..., draft vocabulary)."""
        if self._head is None:
            raise DraftsimError("no output head: attach a target to this drafter first")
        return nn.functional.linear(states.to(self._head.dtype), self._head)

    def target_ids(self, drafted: Tensor) -> Tensor:
        """Return target ids of draft ids, any shape."""
        return drafted

    def over_target(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary; -inf for tokens that the drafter lacks."""
        return logits

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, any shape; -1 where the draft vocabulary lacks one."""
        return tokens

    def fuse(self, features: Tensor) -> Tensor:
        """Map (..., feature_width) of the target -> (..., hidden), what `step` reads."""
        return features.to(self.dtype)

    def following(self, tokens: Tensor, fed_back: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of a later token of a round: a token and its feature, (..., hidden).

        By default they are what the drafter gave for the token before it.
        """
        return tokens, fed_back

    @abstractmethod
    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run entries through the layer.

        Parameters
        ----------
        embedded, fused: (batch, entries, hidden).
        rotary: of the entries' positions, from `rotary`.
        mask: (batch or 1, 1, entries, seen) booleans.
        cache: with ``update(keys, values, layer)``, as transformers' caches.
        module: which of `modules_in_turn`.

        Returns the head's input, and what replaces the next feature; (batch, entries, hidden) each.
        """

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, entries) positions -> cosines and sines, (batch, entries, head_dim) each."""
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = self._rotary(like, positions)
        return cos, sin

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def default_depths(layers: int) -> tuple[int, int, int]:
    """Return depths that EAGLE-3 reads of a target of `layers` layers: 2, half, and all but 3.

    As EAGLE's repository and vLLM have them; where these are not three in ascending order the
    target is too small for them, and it is the first, the middle and the last but one.

    >>> default_depths(30), default_depths(4)
    ((2, 15, 27), (1, 2, 3))
    """
    usual = (2, layers // 2, layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    if layers < 4:
        raise DraftsimError(
            f"a target of {layers} layers has no three depths to read: name the depths"
        )
    return 1, layers // 2, layers - 1


class EagleDrafter(FeatureDrafter):
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
        states = self.fc(torch.cat([embedded, fused], -1))
        out: Tensor = self.layers[0](
            states, attention_mask=mask, position_embeddings=rotary, past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        return out, out


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
        """Map (batch, entries, hidden) each -> the same, not normed."""
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
    config: Configuration of the layer.
    draft_tokens: Target ids that it can draft, ascending; None: all.
    feature_layers: Depths whose states it reads, ascending (see `default_depths`).
    target_width: Width of the target, where it is not the drafter's.
    norm_before_residual, norm_before_fc: Variants of the ``speculators`` format.
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
        return int(self.target_width) * len(self.feature_layers)

    @property
    def draft_vocab_size(self) -> int:
        """Tokens it can draft."""
        return int(self.lm_head.out_features)

    def logits(self, states: Tensor) -> Tensor:
        """Return its own head, over the draft vocabulary."""
        out: Tensor = self.lm_head(states)
        return out

    def target_ids(self, drafted: Tensor) -> Tensor:
        return drafted + self.d2t[drafted]

    def over_target(self, logits: Tensor) -> Tensor:
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        full[..., self.t2d] = logits
        return full

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """See `FeatureDrafter.draft_ids`; padding below 0 stays -1."""
        found: Tensor = self._lookup[tokens.clamp(min=0)]
        return found.masked_fill(tokens < 0, -1)

    def fuse(self, features: Tensor) -> Tensor:
        given = features.to(self.dtype)
        if self.input_norm is not None:
            given = self.input_norm(given)
        out: Tensor = self.fc(given)
        return out

    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = self.midlayer(embedded, fused, rotary, mask, cache)
        return self.norm(out), out


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
        self.mtp_layers = nn.ModuleList()
        width, eps = config.hidden_size, config.rms_norm_eps
        for i in range(modules):
            layer: Any = LlamaDecoderLayer(config, i)
            layer.token_layernorm = LlamaRMSNorm(width, eps)
            layer.hidden_layernorm = LlamaRMSNorm(width, eps)
            layer.input_proj = nn.Linear(2 * width, width, bias=False)
            layer.final_layernorm = LlamaRMSNorm(width, eps)
            self.mtp_layers.append(layer)
        self._initialise()

    def step(
        self, embedded: Tensor, fused: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None,
        cache: Any, module: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        layer: Any = self.mtp_layers[module]
        both = torch.cat([layer.token_layernorm(embedded), layer.hidden_layernorm(fused)], -1)
        out: Tensor = layer(
            layer.input_proj(both), attention_mask=mask, position_embeddings=rotary,
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        normed: Tensor = layer.final_layernorm(out)
        return normed, normed


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

    def __init__(self, config: LlamaConfig, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        self.mask_token = nn.Parameter(torch.zeros(config.hidden_size))
        self.mask_state = nn.Parameter(torch.zeros(config.hidden_size))

    def embed(self, tokens: Tensor) -> Tensor:
        """Map (...,) target ids or MASK -> (..., hidden)."""
        known = super().embed(tokens.clamp(min=0))
        return torch.where((tokens == MASK)[..., None], self.mask_token.to(known.dtype), known)

    def following(self, tokens: Tensor, fed_back: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(tokens, MASK), self.mask_state.to(fed_back).expand_as(fed_back)
