"""Writes drafters so that EAGLE's repository, vLLM and speculators read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from profiler.features.base import SHAPE, FeatureDrafter
from profiler.features.eagle import Eagle
from profiler.features.eagle3 import Eagle3
from traces.errors import DraftsimError

Layout = Literal["eagle", "speculators"]


def write_drafter(
    drafter: FeatureDrafter, folder: str | Path, *, layout: Layout = "eagle",
    dtype: torch.dtype = torch.float16, embedding: Tensor | None = None, target: str = "",
    speculative_tokens: int = 3, notes: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write ``config.json`` and ``model.safetensors`` into `folder`.

    Parameters
    ----------
    layout:
        ``eagle``: EAGLE's repository, for eagle and eagle3.  ``speculators``: eagle3 and mtp.
    dtype:
        Of the weights.
    embedding:
        (vocab, hidden) of the target, kept as ``embed_tokens.weight``; readers that have the
        target do not need it.
    target, speculative_tokens:
        Name of the target and usual draft length, which a ``speculators`` file says.
    notes:
        Further entries of ``config.json``: where the drafter is from.

    Raises
    ------
    DraftsimError
        If the layout has no such drafter, or the folder cannot be written.
    """
    refused = ("eagle", "mtp"), ("speculators", "eagle"), ("speculators", "p-eagle")
    if (layout, drafter.kind) in refused:
        raise DraftsimError(f"the {layout} format has no {drafter.kind} drafters that engines read")
    config = _layer(drafter) if layout == "eagle" else _speculators(
        drafter, target, speculative_tokens
    )  # fmt: skip
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    weights = {
        name: (w.to(dtype) if w.is_floating_point() else w).detach().cpu().contiguous()
        for name, w in drafter.state_dict().items()
    }
    if embedding is not None:
        weights["embed_tokens.weight"] = embedding.detach().to(dtype).cpu().contiguous()
    if layout == "speculators":
        weights = {n.replace("midlayer.", "layers.0."): w for n, w in weights.items()}
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        part = out / ".model.safetensors.part"
        save_file(weights, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors writes 0600
        text = out / ".config.json.part"
        text.write_text(json.dumps({**config, **(notes or {})}, indent=2) + "\n")
        os.replace(part, out / "model.safetensors")
        os.replace(text, out / "config.json")
    except OSError as error:
        raise DraftsimError(f"cannot write a drafter to {out}: {error}") from None


def _layer(drafter: FeatureDrafter) -> dict[str, Any]:
    """``config.json`` of EAGLE's repository: the layer as if it were a model."""
    given = drafter.config.to_dict()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        **{name: given[name] for name in SHAPE if given.get(name) is not None},
        # vLLM's loader and EAGLE's look for it next to rope_parameters.
        "rope_theta": given["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
    }  # fmt: skip
    if isinstance(drafter, Eagle):
        # vLLM reads this as biases of the attention, which EAGLE has none of.
        config["bias"] = drafter.fc.bias is not None
    if isinstance(drafter, Eagle3):
        config |= _eagle3(drafter)
    return config


def _eagle3(drafter: Eagle3) -> dict[str, Any]:
    return {
        "draft_vocab_size": drafter.draft_vocab_size,
        "target_hidden_size": drafter.target_width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        "norm_before_residual": drafter.midlayer.norm_before_residual,
        "norm_before_fc": drafter.input_norm is not None,
        **({"parallel_drafting": True} if drafter.one_pass else {}),
    }


def _speculators(drafter: FeatureDrafter, target: str, tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [f"{drafter.kind.capitalize()}DraftModel"],
        "speculators_model_type": drafter.kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": drafter.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": tokens,
                    "accept_tolerance": 0.0, "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": target},
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(drafter),
    }  # fmt: skip
    if isinstance(drafter, Eagle3):
        return config | _eagle3(drafter)
    return config | {"num_nextn_predict_layers": drafter.modules_in_turn}
