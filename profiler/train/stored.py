"""The drafters' weights as the project holds them, and the ordinary folders made of them.

Whatever is the target's own is not stored: the draft model's embedding is a projection of the
target's, and EAGLE-3's head is some of its rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from policies.json_text import parse_json
from profiler.features import (
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    layer_config,
    write_drafter,
)
from profiler.features.checkpoint import Layout
from profiler.fetched.download import Say, digest
from profiler.fetched.fetch import made_from, place
from profiler.fetched.places import folder
from profiler.smollm2 import DRAFTERS, NAME, STORED
from profiler.train.draft import ProjectedDraft, draft_config, draft_model

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def store_draft(draft: ProjectedDraft, path: Path) -> None:
    """Write a trained draft model's own weights, in float16."""
    shape = {"hidden": draft.config.hidden_size, "layers": draft.config.num_hidden_layers}
    _store(draft.stored(), {"kind": "draft", **shape}, path)


def store_drafter(drafter: FeatureDrafter, path: Path) -> None:
    """Write a trained feature drafter's own weights, in float16."""
    weights = {
        name: value.half()
        for name, value in drafter.state_dict().items()
        if value.is_floating_point() and not name.startswith("lm_head.")
    }
    settings: dict[str, Any] = {"kind": drafter.kind}
    if isinstance(drafter, Eagle3):
        settings["depths"] = list(drafter.feature_layers)
        weights["draft_tokens"] = drafter.target_ids(torch.arange(drafter.draft_vocab_size)).int()
    if isinstance(drafter, Mtp):
        settings["modules"] = drafter.modules_in_turn
    _store(weights, settings, path)


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
        layout: Layout = "speculators" if isinstance(drafter, Mtp) else "eagle"
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
    for name in DRAFTERS:
        stored = STORED / f"{name}.safetensors"
        if not stored.is_file():
            continue
        wanted = digest(stored)
        into = folder(f"{NAME}-{name}")
        if made_from(into) != wanted:
            place(into, wanted, partial(write_folder, stored, target))
            say(f"{NAME}-{name} is now at {into}")
        made.append(into)
    return made


def _store(weights: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    kept = {name: value.detach().contiguous() for name, value in weights.items()}
    save_file(kept, part, metadata={"settings": json.dumps(settings)})
    part.chmod(0o644)
    part.rename(path)
