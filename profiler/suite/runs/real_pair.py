"""Pairs that the suite does not train: a user's, SmolLM2's, or random weights of its shapes.

Weights that are not on the machine cannot always be brought: 98 MB and no network.  A model of
random weights has the same passes and so the same latencies; its drafts are accepted by chance
alone, which its name says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from profiler import smollm2
from profiler.fetched import places as fetched
from profiler.models.loading import Pair, describe_model, load_pair
from profiler.prompts import Prompt, read_prompts
from profiler.recording.run import BUNDLED, model_path
from profiler.suite.environment import Workplace
from profiler.train.draft import draft_config, draft_model
from profiler.train.stored import read_stored
from traces.errors import DraftsimError

RANDOM = f"{smollm2.NAME}-random"
CONFIG: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""SmolLM2-135M's, but that nothing ends an output."""
SMALL = {
    "vocab_size": 2048,  # of the bundled pair's tokenizer
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
"""Settings that miniatures have instead."""


def smollm2_pair(
    place: Workplace, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt], str]:
    """Return SmolLM2 and its draft model, at most `most` prompts, and the pair's name.

    The prompts are the project's where none are named, as a user's turns where the tokenizer has a
    template for them.  Where the models were not fetched, a pair of random weights replaces them,
    with the bundled pair's tokenizer.

    Raises DraftsimError if models that are there cannot be loaded.
    """
    texts = read_prompts(prompts or BUNDLED / "prompts.jsonl", most)
    folders = fetched.folder(smollm2.NAME), fetched.folder(f"{smollm2.NAME}-draft")
    if not all((folder / "config.json").is_file() for folder in folders):
        place.say(
            f"{smollm2.NAME} is not on this machine (`draftsim fetch {smollm2.NAME}`): random "
            "weights of its shapes, whose latencies are its own and whose acceptance is not"
        )
        return _random(place), texts, RANDOM
    pair = _load(place, *folders)
    return pair, [_turn(pair, prompt) for prompt in texts], smollm2.NAME


def given_pair(
    place: Workplace, target: str, draft: str | None, prompts: Path | None, most: int
) -> tuple[Pair, list[Prompt], dict[str, Any]]:
    """Return a user's pair, by folder or name, a limited number of prompts, and an empty record.

    Raises DraftsimError if draft or prompts are not named, or one cannot be loaded.
    """
    if draft is None or prompts is None:
        raise DraftsimError("--target also takes --draft and --prompts: name all three")
    pair = _load(place, model_path(target, "target"), model_path(draft, "draft"))
    return pair, read_prompts(prompts, most), {}


def _load(place: Workplace, target: str | Path, draft: str | Path) -> Pair:
    dtype = str(place.dtype).removeprefix("torch.")
    return load_pair(target, draft, device=str(place.device), dtype=dtype)


def _turn(pair: Pair, prompt: Prompt) -> Prompt:
    if pair.tokenizer.chat_template is None:
        return prompt
    turns = [{"role": "user", "content": prompt.text}]
    text = pair.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return replace(prompt, text=text)


def _random(place: Workplace) -> Pair:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        BUNDLED / "target", trust_remote_code=False
    )
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG, **(SMALL if place.quick else {})})
    target: Any = LlamaForCausalLM(config)
    if place.quick:
        draft: Any = LlamaForCausalLM(draft_config(config, 64, 2))
    else:
        settings, weights = read_stored(smollm2.STORED / "draft.safetensors")
        shape = draft_config(config, settings["hidden"], settings["layers"])
        draft = draft_model(shape, weights, target.get_input_embeddings().weight.detach())
    for model in (target, draft):
        model.config._attn_implementation = "sdpa"
        model.generation_config.eos_token_id = None
        torch.nn.Module.to(model, device=place.device, dtype=place.dtype)
        model.eval()
    meta = {
        "target": describe_model(target, RANDOM), "draft": describe_model(draft, f"{RANDOM}-draft"),
        "tokenizer": {"class": type(tokenizer).__name__, "vocab_size": len(tokenizer)},
        "attention": "sdpa", "random_weights": True, **place.meta(),
    }  # fmt: skip
    return Pair(target, draft, tokenizer, meta)
