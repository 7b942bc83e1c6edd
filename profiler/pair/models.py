"""The bundled pair's tokenizer and models: made, grown, saved and read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from profiler.pair.text import Document

EOS, PAD = "<|endoftext|>", "<|pad|>"  # EOS stands between documents, so it is BOS as well
VOCABULARY, HIDDEN, FEED_FORWARD, HEADS = 2048, 160, 432, 5
POSITIONS = 1024


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens; encoding adds no special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.text for document in documents), trainer)
    # The class's constructor has no type hints; a typed name for it keeps the check strict.
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(layers: int) -> LlamaForCausalLM:
    """A randomly initialised model of `layers` layers; all else is the same in both models."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FEED_FORWARD,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def grow(small: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model of `layers` layers that computes what `small` does: its added layers write zeros."""
    grown = build_model(layers)
    grown.load_state_dict(small.state_dict(), strict=False)
    layers_added: Any = grown.model.layers[small.config.num_hidden_layers :]
    for layer in layers_added:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes model (fp16) and tokenizer to `folder` as a Hugging Face directory."""
    torch.nn.Module.to(model, torch.float16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def load(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """(target, draft, tokenizer) under `folder`, in float32 and evaluation mode."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    return target, draft, tokenizer
