"""Models of published sizes (`traces.operators.shapes`), built with random weights on the device.

A forward pass takes as long with random weights as with trained ones, so latencies need no
download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from traces.operators.shapes import Architecture, find_architecture

FAMILIES: Mapping[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config}


@dataclass(frozen=True, kw_only=True)
class DecoderShape(Architecture):
    """A decoder that transformers builds."""

    positions: int
    rope_theta: float = 10_000.0
    family: str = "llama"
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of the rotary positions."""

    @classmethod
    def of(cls, name: str, model: Any) -> DecoderShape:
        """Return the shape of a loaded model."""
        c = model.config.get_text_config()
        return cls(
            name, str(getattr(c, "_name_or_path", "") or name), c.num_hidden_layers,
            c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads,
            c.hidden_size // c.num_attention_heads, c.vocab_size, bool(c.tie_word_embeddings),
            positions=c.max_position_embeddings, family=c.model_type,
        )  # fmt: skip

    def config(self) -> Any:
        """Return the transformers configuration."""
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        return FAMILIES[self.family](
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
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
            self, hidden=8 * heads, inner=32, layers=1 + (self.layers > 12), heads=heads,
            kv_heads=kv_heads, head_dim=8, vocab=128, positions=min(self.positions, 1024), rope={},
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


def _known(like: str, positions: int, rope_theta: float = 10_000.0, **own: Any) -> DecoderShape:
    """Return a model of known sizes, some of them its `own`."""
    sizes = {**vars(find_architecture(like)), **own}
    return DecoderShape(**sizes, positions=positions, rope_theta=rope_theta)


_ALL = (
    _known("llama-3.1-8b", 131072, 500_000.0, rope=_llama3(8.0)),
    _known("llama-3.2-1b", 131072, 500_000.0, rope=_llama3(32.0)),
    _known("vicuna-7b", 4096),
    _known("vicuna-68m", 2048),
    _known("vicuna-13b", 4096),
    _known("vicuna-160m", 2048),
    _known("qwen2.5-32b", 131072, 1e6, family="qwen2"),
    # Its own table has 151936 rows; decoding a pair together takes one vocabulary.
    _known("qwen2.5-0.5b", 32768, 1e6, family="qwen2", vocab=152064),
    _known(
        "qwen2.5-1.5b", 32768, 1e6, family="qwen2", name="qwen2.5-coder-1.5b",
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
    _known(
        "qwen2.5-0.5b", 32768, 1e6, family="qwen2", name="qwen2.5-coder-0.5b",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    _known("codellama-7b", 16384, 1e6),
    _known(
        "llama-2-13b", 16384, 1e6, name="codellama-13b", hub="codellama/CodeLlama-13b-hf",
        vocab=32016,
    ),
    # Of GPT-2's depth and width with a three-layer draft, as CM-ASD's experiments have it.
    _known("vicuna-160m", 2048, name="cm-asd-12", hub="12 x 768, GPT-2's shape", vocab=50304),
    _known(
        "vicuna-160m", 2048, name="cm-asd-3", hub="3 x 768, GPT-2's width", vocab=50304, layers=3
    ),
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
