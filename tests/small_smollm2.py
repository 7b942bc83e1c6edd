"""A random-weight miniature of SmolLM2's architecture and its GGUF file, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = ("the cat sat on the mat and the dog sat on the log. " * 3, "user assistant system\n")


def tokenizer() -> Any:
    """A byte-level BPE with SmolLM2's special tokens and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(TEXT, trainer)
    wrap: Any = PreTrainedTokenizerFast
    made = wrap(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>",
        pad_token="<|im_end|>", unk_token="<|endoftext|>",
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def model(vocabulary: int, layers: int = 6, seed: int = 0) -> Any:
    """Three query heads to a key head, a tied embedding, sharp enough to have likely tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=48, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=3, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, source: Any, words: Any) -> None:
    """`source` and the tokenizer `words` as llama.cpp's converter lays them out, in float32."""
    config = source.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    state = json.loads(words.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(state["vocab"], key=state["vocab"].get))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(words.chat_template)
    for name, weights in source.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_gguf_name(name), _permuted(name, weights, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    renamed = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for theirs, own in renamed.items():
        name = name.replace(theirs, own)
    return name


def _permuted(name: str, weights: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp pairs neighbouring numbers in its rotary embedding, not the two halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            shape = (count, 2, weights.shape[0] // count // 2, weights.shape[1])
            return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape).contiguous()
    return weights
