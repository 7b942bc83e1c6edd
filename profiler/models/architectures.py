"""Model architectures by their published shapes, built with random weights on the device.

A forward pass takes as long with random weights as with trained ones, so latencies need no
download.  Every shape is that of the ``config.json`` on the Hugging Face hub named as source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

FAMILIES: Mapping[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config}


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's shape; sizes as in its published configuration."""

    name: str
    source: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    positions: int
    rope_theta: float = 10_000.0
    tied: bool = False
    family: str = "llama"
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of the rotary positions."""

    @classmethod
    def of(cls, name: str, model: Any) -> DecoderShape:
        """Return the shape of a loaded model."""
        c = model.config.get_text_config()
        return cls(
            name, str(getattr(c, "_name_or_path", "") or name), c.hidden_size,
            c.intermediate_size, c.num_hidden_layers, c.num_attention_heads,
            c.num_key_value_heads, c.vocab_size, c.max_position_embeddings,
            tied=bool(c.tie_word_embeddings), family=c.model_type,
        )  # fmt: skip

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one transformer layer's matrices."""
        kv = 2 * self.kv_heads * self.head_width
        return self.hidden_size * (2 * self.hidden_size + kv + 3 * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """Weights of the whole model, norms and biases left out."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def kv_values(self) -> int:
        """Numbers that one token occupies in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_width

    def config(self) -> Any:
        """Return the transformers configuration."""
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        return FAMILIES[self.family](
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            rope_parameters={**rope, **self.rope},
            tie_word_embeddings=self.tied,
            # No end token: lengths are what the measurement says they are.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def miniature(self) -> DecoderShape:
        """Return the same structure at a size that a CPU runs without delay."""
        group = self.heads // self.kv_heads
        kv_heads = 2 if group < 4 else 1
        heads = kv_heads * group
        return replace(
            self, hidden_size=8 * heads, intermediate_size=32, layers=1 + (self.layers > 12),
            heads=heads, kv_heads=kv_heads, vocab_size=128, positions=min(self.positions, 1024),
            rope={},
        )  # fmt: skip

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the model with random weights, made on the device itself, in eval mode.

        Raises torch.OutOfMemoryError where it does not fit.
        """
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                self.config(), dtype=dtype, attn_implementation="sdpa"
            )
        return model.eval()


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


_ALL = (
    DecoderShape(
        "llama-3.1-8b", "meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, 131072,
        500_000.0, rope=_llama3(8.0),
    ),
    DecoderShape(
        "llama-3.2-1b", "meta-llama/Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, 131072,
        500_000.0, tied=True, rope=_llama3(32.0),
    ),
    DecoderShape("vicuna-7b", "lmsys/vicuna-7b-v1.5", 4096, 11008, 32, 32, 32, 32000, 4096),
    DecoderShape("vicuna-68m", "double7/vicuna-68m", 768, 3072, 2, 12, 12, 32000, 2048),
    DecoderShape("vicuna-13b", "lmsys/vicuna-13b-v1.5", 5120, 13824, 40, 40, 40, 32000, 4096),
    DecoderShape("vicuna-160m", "double7/vicuna-160m", 768, 3072, 12, 12, 12, 32000, 2048),
    DecoderShape(
        "qwen2.5-32b", "Qwen/Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064, 131072, 1e6,
        family="qwen2",
    ),
    # Its own table has 151936 rows; decoding a pair together takes one vocabulary.
    DecoderShape(
        "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 152064, 32768, 1e6, tied=True,
        family="qwen2",
    ),
    DecoderShape(
        "qwen2.5-coder-1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct", 1536, 8960, 28, 12, 2, 151936,
        32768, 1e6, tied=True, family="qwen2",
    ),
    DecoderShape(
        "qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct", 896, 4864, 24, 14, 2, 151936,
        32768, 1e6, tied=True, family="qwen2",
    ),
    DecoderShape(
        "codellama-7b", "codellama/CodeLlama-7b-hf", 4096, 11008, 32, 32, 32, 32016, 16384, 1e6
    ),
    DecoderShape(
        "codellama-13b", "codellama/CodeLlama-13b-hf", 5120, 13824, 40, 40, 40, 32016, 16384, 1e6
    ),
    # Of GPT-2's depth and width with a three-layer draft, as CM-ASD's experiments have it.
    DecoderShape("cm-asd-12", "12 x 768, GPT-2's shape", 768, 3072, 12, 12, 12, 50304, 2048),
    DecoderShape("cm-asd-3", "3 x 768, GPT-2's width", 768, 3072, 3, 12, 12, 50304, 2048),
)  # fmt: skip

ARCHITECTURES: Mapping[str, DecoderShape] = {a.name: a for a in _ALL}


@dataclass(frozen=True)
class PairShape:
    """A target and its draft; without a draft, a target that is measured layer by layer."""

    name: str
    target: DecoderShape
    draft: DecoderShape | None = None

    @property
    def parameters(self) -> int:
        """Weights of both models."""
        return self.target.parameters + (self.draft.parameters if self.draft else 0)

    def miniature(self) -> PairShape:
        """Return the pair at a size that a CPU runs without delay."""
        draft = self.draft.miniature() if self.draft else None
        return replace(self, target=self.target.miniature(), draft=draft)


PAIRS: Mapping[str, PairShape] = {
    name: PairShape(name, ARCHITECTURES[target], ARCHITECTURES[draft] if draft else None)
    for name, target, draft in (
        ("llama-3.1-8b+1b", "llama-3.1-8b", "llama-3.2-1b"),
        ("qwen2.5-coder-1.5b+0.5b", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
        ("vicuna-7b+68m", "vicuna-7b", "vicuna-68m"),
        ("cm-asd-12+3", "cm-asd-12", "cm-asd-3"),
        ("vicuna-13b+160m", "vicuna-13b", "vicuna-160m"),
        ("qwen2.5-32b+0.5b", "qwen2.5-32b", "qwen2.5-0.5b"),
        ("codellama-7b", "codellama-7b", None),
        ("codellama-13b", "codellama-13b", None),
    )
}
"""Most important first: without enough time or memory the last ones are left out."""
