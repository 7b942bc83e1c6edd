"""The common part of all drafters on the target's features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from traces.errors import DraftsimError

SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "mlp_bias", "attention_bias",
)  # fmt: skip
"""Settings of a model's configuration that one decoder layer depends on."""


def layer_config(config: Any) -> LlamaConfig:
    """The configuration of one Llama layer in the shape of a model's.

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

    def attach_as(self, other: FeatureDrafter) -> Self:
        """Use the embedding and output head that `other`, of the same target, has attached."""
        self._embedding, self._head = other._embedding, other._head
        return self

    @property
    def feature_width(self) -> int:
        """Numbers of one feature."""
        return int(self.config.hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """(...,) target ids -> (..., hidden)."""
        table = self._embedding if self.embed_tokens is None else self.embed_tokens.weight
        if table is None:
            raise DraftsimError("no embedding: attach a target to this drafter first")
        return nn.functional.embedding(tokens, table).to(self.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """(..., hidden) states of `step` -> (..., draft vocabulary)."""
        if self._head is None:
            raise DraftsimError("no output head: attach a target to this drafter first")
        return nn.functional.linear(states.to(self._head.dtype), self._head)

    def target_ids(self, drafted: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return drafted

    def over_target(self, logits: Tensor) -> Tensor:
        """Its logits (..., draft vocabulary) over the target's; -inf where it lacks a token."""
        return logits

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, any shape; -1 where the draft vocabulary lacks one."""
        return tokens

    def fuse(self, features: Tensor) -> Tensor:
        """(..., feature_width) of the target -> (..., hidden), what `step` reads."""
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

        Returns
        -------
        The head's input, and what replaces the next feature; (batch, entries, hidden) each.
        """

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (batch, entries) positions, (batch, entries, head_dim) each."""
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = self._rotary(like, positions)
        return cos, sin

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
