"""Encoder-decoder pairs of five kinds with random weights, and their recordings."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from commands.common.progress import progress_bar
from profiler.models.loading import Pair, describe_model
from profiler.profile import Settings, profile_trace
from profiler.prompts import Prompt
from traces.acceptance.sampling import GREEDY, Sampling
from traces.acceptance.trace import Trace

VOCABULARY, POSITIONS, NEW, GAMMA = 60, 64, 20, 8
BART_LIKE: dict[str, tuple[Any, Any]] = {
    "bart": (BartConfig, BartForConditionalGeneration),
    "mbart": (MBartConfig, MBartForConditionalGeneration),
    "marian": (MarianConfig, MarianMTModel),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration),
}
KINDS = (*BART_LIKE, "t5")


def build(kind: str, layers: int) -> Any:
    """Return a model with random weights and `layers` layers on either side."""
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "tie_word_embeddings": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(
            num_layers=layers, d_kv=16, d_ff=48, num_heads=2,
            relative_attention_num_buckets=12, relative_attention_max_distance=20,
            initializer_factor=2.0, **shared,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).eval()
    configured, made = BART_LIKE[kind]
    config = configured(
        encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=POSITIONS,
        bos_token_id=0, forced_eos_token_id=None, init_std=0.6, **shared,
    )  # fmt: skip
    return made(config).eval()


@cache
def models(kind: str) -> tuple[Any, Any]:
    """A target, and a draft that lacks its later layers, which add little: they often agree."""
    torch.set_num_threads(1)
    target, draft = build(kind, 3), build(kind, 1)
    for name, weights in target.named_parameters():
        deep = any(f".{part}.{i}." in name for part in ("layers", "block") for i in (1, 2))
        if deep and any(part in name for part in ("out_proj", "fc2", ".o.", ".wo.")):
            weights.data *= 0.02 if kind in ("bart", "marian") else 0.25
        # Initialised to nothing in some classes; positions must matter here.
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(weights, generator=torch.Generator().manual_seed(7))
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if k in draft.state_dict()})
    return target, draft


@cache
def pair(kind: str) -> Pair:
    torch.set_num_threads(1)
    target, draft = models(kind)
    described = {"target": describe_model(target, kind), "draft": describe_model(draft, kind)}
    return Pair(target, draft, Letters(), {**described, "dtype": "float32"})


class Letters:
    """A tokenizer of single letters, 3 to 28, that ends with EOS."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*(ord(letter) - ord("a") + 3 for letter in text), 2]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def source(length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def recorded(kind: str, sampling: Sampling = GREEDY) -> Trace:
    """The trace of three sources, made as `draftsim profile` makes it."""
    import tempfile

    texts = ("speculation", "encoder", "ab")
    prompts = [Prompt(str(i), "all", text) for i, text in enumerate(texts)]
    settings = Settings(NEW, GAMMA, sampling)
    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        return profile_trace(pair(kind), prompts, settings, Path(folder), progress)
