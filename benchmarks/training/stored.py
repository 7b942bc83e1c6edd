"""Weights of trained drafters, written as `profiler.fetched.smollm2` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.training.draft import ProjectedDraft
from profiler.features.drafters import Eagle3, FeatureDrafter, Mtp


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


def _store(weights: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    kept = {name: value.detach().contiguous() for name, value in weights.items()}
    save_file(kept, part, metadata={"settings": json.dumps(settings)})
    part.chmod(0o644)
    part.rename(path)
