"""Reads and writes drafters in the formats of EAGLE's repository, vLLM and speculators.

EAGLE's repository: ``config.json`` of one Llama layer and ``fc.weight`` with ``layers.0.*``
(EAGLE, EAGLE-2) or ``midlayer.*``, ``norm``, ``lm_head``, ``d2t`` and ``t2d`` (EAGLE-3).  The
``speculators`` format: ``speculators_model_type`` (eagle, eagle3, mtp), the layer under
``transformer_layer_config``, and ``layers.0.*`` for EAGLE-3.  MiMo's checkpoints: MTP modules
as ``model.mtp_layers.*`` among the target's own weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from profiler.features.drafters import (
    SHAPE,
    Eagle3,
    EagleDrafter,
    FeatureDrafter,
    Mtp,
    ParallelEagle3,
    default_depths,
    layer_config,
)
from traces.errors import DraftsimError
from traces.store.text import read_object

Tensors = dict[str, Tensor]

KINDS = ("eagle", "eagle3", "mtp")
UNREAD = ("rotary_emb", "verifier_", "t2d", "mask_hidden")


def read_drafter(folder: str | Path, target: Any) -> FeatureDrafter:
    """Return the drafter kept in `folder`, attached to `target`, in its dtype and on its device.

    Raises DraftsimError if the folder holds no drafter, its files contradict each other, its layer
    is of a kind that is not read, or it was trained for another target.
    """
    where, remedy = Path(folder), "name the folder of a drafter, with its config.json"
    if not (path := where / "config.json").is_file():
        raise DraftsimError(f"{path}: no such file: {remedy}")
    config = read_object(path, remedy)
    kind = _kind(where, config, weights := _weights(where))
    nested = config.get("transformer_layer_config", config)
    if kind != "mtp" and nested.get("num_hidden_layers", 1) != 1:
        raise DraftsimError(
            f"{where} has {nested['num_hidden_layers']} layers: drafters of one are read"
        )
    try:
        layer = layer_config(nested)
        built = _build(kind, config, layer, weights, target)
    except (KeyError, TypeError, ValueError) as error:
        raise DraftsimError(f"{where} is no {kind} drafter that can be read: {error}") from None
    embedding = weights.pop("embed_tokens.weight", None)
    _fill(built, weights, where)
    built.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    _embed(built, embedding, target)
    return built.attach(target)


def _weights(folder: Path) -> Tensors:
    found: Tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    try:
        for path in files:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for path in [] if files else sorted(folder.glob("*.bin")):
            found |= torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise DraftsimError(
            f"cannot read the weights in {folder} ({error}): fetch them again"
        ) from None
    if not found:
        raise DraftsimError(
            f"{folder} holds no weights: expected model.safetensors or pytorch_model.bin"
        )
    return found


def _kind(folder: Path, config: dict[str, Any], weights: Tensors) -> str:
    named = config.get("speculators_model_type")
    if named is not None:
        if named not in KINDS:
            raise DraftsimError(f"{folder} holds a {named!r} drafter: {', '.join(KINDS)} are read")
        return str(named)
    if any("mtp_layers." in name for name in weights):
        return "mtp"
    if any(name.startswith("midlayer.") or ".hidden_norm." in name for name in weights):
        return "eagle3"
    if "fc.weight" in weights and any("layers.0." in name for name in weights):
        return "eagle"
    raise DraftsimError(
        f"{folder} holds none of the drafters that are read (EAGLE, EAGLE-3, MTP): no fc.weight "
        "with layers.0.*, no midlayer.*, no mtp_layers.*"
    )


def _build(
    kind: str, config: dict[str, Any], layer: Any, weights: Tensors, target: Any
) -> FeatureDrafter:
    """Return an empty drafter of the right shape; renames `weights` as it names its own."""
    stripped = {
        _renamed(name): w for name, w in weights.items() if not any(part in name for part in UNREAD)
    }
    weights.clear()
    weights.update(stripped)
    made: FeatureDrafter
    if kind == "mtp":
        for name in [n for n in weights if not n.startswith(("mtp_layers.", "embed_tokens."))]:
            del weights[name]  # the target's own
        if str(config.get("model_type", "")).startswith("mimo"):
            _swap_halves(weights)
        modules = 1 + max(int(n.split(".")[1]) for n in weights if n.startswith("mtp_layers."))
        made = Mtp(layer, modules)
    elif kind == "eagle":
        if config.get("layernorms"):
            raise ValueError("layernorms around the layer are not supported")
        weights.pop("lm_head.weight", None)  # the target's
        made = EagleDrafter(layer, "fc.bias" in weights)
    else:
        for name in [n for n in weights if n.startswith("layers.0.")]:
            weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)
        made = _eagle3(config, layer, weights, target)
    _fit_biases(made, weights)
    return made


def _eagle3(config: dict[str, Any], layer: Any, weights: Tensors, target: Any) -> Eagle3:
    inner = config.get("eagle_config") or {}
    for name in ("fc_norm", "norm_output"):
        if config.get(name):
            raise ValueError(f"{name} is not supported")
    name = "eagle_aux_hidden_state_layer_ids"
    depths = config.get(name) or inner.get(name)
    if not depths:
        depths = default_depths(int(target.config.get_text_config().num_hidden_layers))
    offsets = weights.pop("d2t", None)
    drafted = None if offsets is None else offsets.long() + torch.arange(len(offsets))
    rows = len(weights["lm_head.weight"])
    if rows != (layer.vocab_size if drafted is None else len(drafted)):
        raise ValueError(f"lm_head has {rows} rows, which its d2t does not map")
    own = ParallelEagle3 if "mask_token" in weights else Eagle3
    return own(
        layer, drafted, depths, target_width=config.get("target_hidden_size"),
        # vLLM takes it as set where a speculators file does not say.
        norm_before_residual=bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),
        norm_before_fc=bool(config.get("norm_before_fc", inner.get("norm_before_fc", False))),
    )  # fmt: skip


def _renamed(name: str) -> str:
    """Return EAGLE's name of a weight in the ``speculators`` format."""
    name = name.removeprefix("model.")
    for theirs, ours in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _swap_halves(weights: Tensors) -> None:
    """Swap the halves: MiMo projects [previous state; embedding], others the reverse."""
    for name in [n for n in weights if n.endswith("input_proj.weight")]:
        state, embedded = weights[name].chunk(2, -1)
        weights[name] = torch.cat([embedded, state], -1)


def _fit_biases(drafter: FeatureDrafter, weights: Tensors) -> None:
    """Give linear maps of the layer the biases that the file has (Qwen2's attention)."""
    for name, module in list(drafter.named_modules()):
        if isinstance(module, nn.Linear) and f"{name}.weight" in weights:
            there = f"{name}.bias" in weights
            if there != (module.bias is not None):
                bias = nn.Parameter(torch.zeros(module.out_features)) if there else None
                module.register_parameter("bias", bias)


def _fill(drafter: FeatureDrafter, weights: Tensors, folder: Path) -> None:
    """Load `weights`, which must be the drafter's own, all and nothing else."""
    own = {n: p for n, p in drafter.state_dict().items() if n not in ("d2t", "t2d")}
    for word, names in (
        ("lacks", own.keys() - weights.keys()), ("has an unknown", weights.keys() - own.keys()),
    ):  # fmt: skip
        if names:
            raise DraftsimError(
                f"{folder} {word} {sorted(names)[0]} ({len(names)} in all): its layer is not one "
                "that is read (a Llama layer)"
            )
    for name, parameter in own.items():
        if weights[name].shape != parameter.shape:
            raise DraftsimError(
                f"{folder}: {name} is {tuple(weights[name].shape)}, and its config.json says "
                f"{tuple(parameter.shape)}"
            )
    drafter.load_state_dict(weights, strict=False)


def _embed(drafter: FeatureDrafter, embedding: Tensor | None, target: Any) -> None:
    """Keep an embedding of the drafter's own, unless it is the target's."""
    shared = target.get_input_embeddings().weight
    if embedding is None or (
        embedding.shape == shared.shape
        and torch.allclose(embedding.to(shared), shared, rtol=1e-2, atol=1e-3)
    ):
        return
    drafter.embed_tokens = nn.Embedding.from_pretrained(embedding.to(shared))


FileLayout = Literal["eagle", "speculators"]


def write_drafter(
    drafter: FeatureDrafter, folder: str | Path, *, layout: FileLayout = "eagle",
    dtype: torch.dtype = torch.float16, embedding: Tensor | None = None, target: str = "",
) -> None:  # fmt: skip
    """Write ``config.json`` and ``model.safetensors`` into `folder`.

    Parameters
    ----------
    layout: ``eagle``: EAGLE's repository, for eagle and eagle3.  ``speculators``: eagle3 and mtp.
    dtype: Number format of the weights.
    embedding: (vocab, hidden) of the target, kept as ``embed_tokens.weight``; readers that have the
        target do not need it.
    target: Name of the target, which a ``speculators`` file says.

    Raises DraftsimError if the layout has no such drafter, or the folder cannot be written.
    """
    refused = ("eagle", "mtp"), ("speculators", "eagle"), ("speculators", "p-eagle")
    if (layout, drafter.kind) in refused:
        raise DraftsimError(f"the {layout} format has no {drafter.kind} drafters that engines read")
    config = _layer(drafter) if layout == "eagle" else _speculators(drafter, target)
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
        text.write_text(json.dumps(config, indent=2) + "\n")
        os.replace(part, out / "model.safetensors")
        os.replace(text, out / "config.json")
    except OSError as error:
        raise DraftsimError(f"cannot write a drafter to {out}: {error}") from None


def _layer(drafter: FeatureDrafter) -> dict[str, Any]:
    """Return ``config.json`` of EAGLE's repository: the layer as if it were a model."""
    given = drafter.config.to_dict()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        **{name: given[name] for name in SHAPE if given.get(name) is not None},
        # vLLM's loader and EAGLE's look for it next to rope_parameters.
        "rope_theta": given["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
    }  # fmt: skip
    if isinstance(drafter, EagleDrafter):
        # vLLM reads this as biases of the attention, which EAGLE has none of.
        config["bias"] = drafter.fc.bias is not None
    if isinstance(drafter, Eagle3):
        config |= _eagle3_config(drafter)
    return config


def _eagle3_config(drafter: Eagle3) -> dict[str, Any]:
    return {
        "draft_vocab_size": drafter.draft_vocab_size,
        "target_hidden_size": drafter.target_width,
        "eagle_aux_hidden_state_layer_ids": list(drafter.feature_layers),
        "norm_before_residual": drafter.midlayer.norm_before_residual,
        "norm_before_fc": drafter.input_norm is not None,
        **({"parallel_drafting": True} if drafter.one_pass else {}),
    }


def _speculators(drafter: FeatureDrafter, target: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [f"{drafter.kind.capitalize()}DraftModel"],
        "speculators_model_type": drafter.kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": drafter.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": target},
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(drafter),
    }  # fmt: skip
    if isinstance(drafter, Eagle3):
        return config | _eagle3_config(drafter)
    return config | {"num_nextn_predict_layers": drafter.modules_in_turn}
