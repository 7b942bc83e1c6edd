"""A random-weight miniature of the Llama architecture, and drafters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from profiler.features.checkpoint import write_drafter
from profiler.features.drafters import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    layer_config,
)
from tests.conftest import ROOT

DRAFTED = [i for i in range(96) if i % 3]
"""Target ids that the miniature's EAGLE-3 drafter can draft."""


def miniature(layers: int = 4, seed: int = 0) -> Any:
    """A target with grouped-query attention and tied embeddings, in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=36, intermediate_size=56, num_hidden_layers=layers,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=160,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).eval()


def drafters(target: Any, seed: int = 1) -> dict[str, FeatureDrafter]:
    """One of each kind, with random weights, attached to `target`."""
    torch.manual_seed(seed)
    layer = layer_config(target.config)
    made: dict[str, FeatureDrafter] = {
        "eagle": EagleDrafter(layer),
        "eagle-bias": EagleDrafter(layer, bias=True),
        "eagle3": Eagle3(layer, DRAFTED, (1, 2, 3)),
        "eagle3-variant": Eagle3(
            layer, None, (0, 2), norm_before_residual=True, norm_before_fc=True
        ),
        "mtp": Mtp(layer),
        "mtp-several": Mtp(layer, 3),
        "p-eagle": ParallelEagle3(layer, DRAFTED, (1, 2, 3)),
    }
    for drafter in made.values():
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        drafter.attach(target).eval()
    return made


def write_random(folder: Path) -> Path:
    """Random drafters for the bundled target: ``one`` and ``another`` (EAGLE), ``three``."""
    torch.manual_seed(0)
    layer = layer_config(AutoConfig.from_pretrained(ROOT / "profiler" / "bundled" / "target"))
    write_drafter(EagleDrafter(layer), folder / "one")
    write_drafter(EagleDrafter(layer), folder / "another")
    write_drafter(Eagle3(layer, range(0, 2000, 2), (2, 4, 5)), folder / "three")
    write_drafter(ParallelEagle3(layer, range(0, 2000, 2), (2, 4, 5)), folder / "masks")
    return folder
