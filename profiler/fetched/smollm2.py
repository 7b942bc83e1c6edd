"""SmolLM2's drafters: their weights as the project holds them, and ordinary folders of them.

The target's weights are not stored again. The draft model's embedding, 49,152 x 256 and four times
as large as its layers, is the target's embedding times a trained matrix (576 x 256). EAGLE-3's
head is some of the target's rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from policies.json_text import parse_json
from profiler.features.checkpoint import FileLayout, write_drafter
from profiler.features.drafters import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    layer_config,
)
from profiler.fetched.fetch import digest_of_file, made_from, place
from profiler.fetched.places import SMOLLM2, SMOLLM2_WEIGHTS, folder
from traces.aliases import Say

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def draft_config(target: Any, hidden: int, layers: int) -> LlamaConfig:
    """Return a Llama of `layers` layers of width `hidden` over the vocabulary of a target's config.

    Head size as the target's, two query heads to a key head, a feed-forward of 2.75 widths.
    """
    heads = max(2, hidden // int(target.head_dim))
    taken = (
        "vocab_size", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=True,
        **{name: getattr(target, name) for name in taken},
    )  # fmt: skip


def draft_model(
    config: LlamaConfig, stored: Mapping[str, Tensor], embedding: Tensor
) -> LlamaForCausalLM:
    """Return the ordinary Llama of stored weights and the target's embedding, in float16."""
    model = LlamaForCausalLM(config)
    weights = {
        name.replace("body.", "model.", 1): value.float()
        for name, value in stored.items()
        if name.startswith("body.")
    }
    table = embedding.float() @ stored["projection"].float()
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = table
    model.load_state_dict(weights)
    torch.nn.Module.to(model, torch.float16)
    return model


def read_stored(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and weights of a drafter as the project holds them."""
    with safe_open(path, "pt") as file:
        settings = parse_json(file.metadata()["settings"])
        return settings, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_folder(stored: Path, target: Path, into: Path) -> None:
    """Write the Hugging Face or EAGLE folder of stored weights, given the target's folder."""
    settings, weights = read_stored(stored)
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    if settings["kind"] == "draft":
        config = draft_config(model.config, settings["hidden"], settings["layers"])
        made = draft_model(config, weights, model.get_input_embeddings().weight.detach())
        made.save_pretrained(into)
        for name in TOKENIZER:
            if (target / name).is_file():
                shutil.copyfile(target / name, into / name)
    else:
        drafter = feature_drafter(settings, weights, model)
        embedding = model.get_input_embeddings().weight.detach()
        layout: FileLayout = "speculators" if isinstance(drafter, Mtp) else "eagle"
        write_drafter(drafter, into, layout=layout, embedding=embedding, target=target.name)
    for path in into.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def feature_drafter(
    settings: Mapping[str, Any], weights: dict[str, Tensor], target: Any
) -> FeatureDrafter:
    """Return the drafter of stored settings and weights, float32, attached to `target`."""
    config = layer_config(target.config)
    made: FeatureDrafter
    own = {name: value.float() for name, value in weights.items() if name != "draft_tokens"}
    if settings["kind"] in (Eagle3.kind, ParallelEagle3.kind):
        tokens = weights["draft_tokens"].long()
        kind = Eagle3 if settings["kind"] == Eagle3.kind else ParallelEagle3
        made = kind(config, tokens, settings["depths"], norm_before_residual=True)
        own["lm_head.weight"] = target.get_output_embeddings().weight.detach().float()[tokens]
        own |= {"d2t": made.d2t, "t2d": made.t2d}
    elif settings["kind"] == Mtp.kind:
        made = Mtp(config, settings["modules"])
    else:
        made = EagleDrafter(config)
    made.load_state_dict(own)
    return made.attach(target).eval()


def make_drafters(target: Path, say: Say = print) -> list[Path]:
    """Write the drafters' ordinary folders from the weights that the project holds."""
    made = []
    for name in SMOLLM2.drafters:
        stored = SMOLLM2_WEIGHTS / f"{name}.safetensors"
        if not stored.is_file():
            continue
        wanted = digest_of_file(stored)
        into = folder(f"{SMOLLM2.name}-{name}")
        if made_from(into) != wanted:
            place(into, wanted, partial(write_folder, stored, target))
            say(f"{SMOLLM2.name}-{name} is now at {into}")
        made.append(into)
    return made
