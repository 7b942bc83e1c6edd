"""Drafters in the file formats of EAGLE's repository, `speculators` and MiMo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.training.unroll import target_features, unroll
from profiler.features.checkpoint import read_drafter, write_drafter
from profiler.features.drafters import Eagle3, FeatureDrafter, layer_config
from tests.features import DRAFTED, drafters, miniature
from traces.errors import DraftsimError

LAYER = {
    f"{part}.weight"
    for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return miniature()


@pytest.fixture(scope="module")
def made(target: Any) -> dict[str, FeatureDrafter]:
    return drafters(target)


def _states(drafter: FeatureDrafter, target: Any) -> list[Tensor]:
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        features = target_features(target, ids, drafter.feature_layers)
        return [drafter.logits(s) for s in unroll(drafter, ids, features, 3)]


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("eagle", "eagle"), ("eagle-bias", "eagle"), ("eagle3", "eagle"),
        ("eagle3-variant", "eagle"), ("eagle3", "speculators"),
        ("eagle3-variant", "speculators"), ("mtp", "speculators"), ("mtp-several", "speculators"),
    ],
)  # fmt: skip
def test_a_drafter_survives_its_files(
    made: dict[str, FeatureDrafter], target: Any, tmp_path: Path, kind: str, layout: Any
) -> None:
    write_drafter(made[kind], tmp_path, layout=layout, dtype=torch.float32)
    again = read_drafter(tmp_path, target)
    assert type(again) is type(made[kind])
    assert again.feature_layers == made[kind].feature_layers
    assert again.modules_in_turn == made[kind].modules_in_turn
    for mine, theirs in zip(_states(made[kind], target), _states(again, target), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert oct((tmp_path / "model.safetensors").stat().st_mode)[-3:] == "644"


def test_eagle_files_are_named_as_published(
    made: dict[str, FeatureDrafter], target: Any, tmp_path: Path
) -> None:
    table = target.model.embed_tokens.weight
    write_drafter(made["eagle"], tmp_path, embedding=table)
    config, weights = _files(tmp_path)
    assert set(weights) == {"fc.weight", "embed_tokens.weight"} | {f"layers.0.{n}" for n in LAYER}
    assert weights["fc.weight"].shape == (36, 72)
    assert {w.dtype for w in weights.values()} == {torch.float16}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    assert (config["num_key_value_heads"], config["rope_theta"]) == (1, 1000.0)
    assert config["bias"] is False
    again = read_drafter(tmp_path, target)
    assert again.embed_tokens is None  # it is the target's, rounded


def test_eagle3_files_are_named_as_published(
    made: dict[str, FeatureDrafter], tmp_path: Path
) -> None:
    own = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    layer = LAYER | {"hidden_norm.weight", "input_layernorm.weight"}
    write_drafter(made["eagle3"], tmp_path / "a")
    config, weights = _files(tmp_path / "a")
    assert set(weights) == own | {f"midlayer.{n}" for n in layer}
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (36, 72)
    assert weights["fc.weight"].shape == (36, 108)
    drafted = weights["d2t"] + torch.arange(len(weights["d2t"]))
    assert drafted.tolist() == DRAFTED == weights["t2d"].nonzero()[:, 0].tolist()
    assert (config["draft_vocab_size"], config["vocab_size"]) == (len(DRAFTED), 96)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    write_drafter(made["eagle3"], tmp_path / "b", layout="speculators", target="mini")
    config, weights = _files(tmp_path / "b")
    assert set(weights) == own | {f"layers.0.{n}" for n in layer}
    assert config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["vocab_size"] == 96
    assert config["norm_before_residual"] is False
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "mini"


def test_other_repositories_names_are_understood(
    made: dict[str, FeatureDrafter], target: Any, tmp_path: Path
) -> None:
    """A drafter reads the same if renamed, in a pickle, or among a target's weights."""
    write_drafter(made["eagle-bias"], tmp_path / "a", dtype=torch.float32)
    config, weights = _files(tmp_path / "a")
    old = tmp_path / "old"
    old.mkdir()
    nested = {k: v for k, v in config.items() if k not in ("rope_parameters", "bias")}
    (old / "config.json").write_text(
        json.dumps({"speculators_model_type": "eagle", "transformer_layer_config": nested})
    )
    renamed = {
        n.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): w
        for n, w in weights.items()
    }
    renamed["embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    torch.save(renamed, old / "pytorch_model.bin")
    for mine, theirs in zip(
        _states(made["eagle-bias"], target), _states(read_drafter(old, target), target), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)

    write_drafter(made["mtp"], tmp_path / "m", layout="speculators", dtype=torch.float32)
    config, weights = _files(tmp_path / "m")
    mimo = tmp_path / "mimo"
    mimo.mkdir()
    layer = {**config["transformer_layer_config"], "model_type": "mimo", "num_hidden_layers": 4}
    (mimo / "config.json").write_text(json.dumps(layer))
    whole = {f"model.{n}": w for n, w in weights.items()}
    name = "model.mtp_layers.0.input_proj.weight"
    whole[name] = torch.cat(whole[name].chunk(2, -1)[::-1], -1)
    whole["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3)
    save_file(whole, mimo / "model.safetensors")
    for mine, theirs in zip(
        _states(made["mtp"], target), _states(read_drafter(mimo, target), target), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_attention_biases_and_an_own_embedding_are_kept(target: Any, tmp_path: Path) -> None:
    """As in drafters for Qwen2, and of those that are narrower than their target."""
    torch.manual_seed(3)
    config = {**target.config.to_dict(), "hidden_size": 24, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 12}  # fmt: skip
    narrow = Eagle3(layer_config(config), DRAFTED, (1, 2, 3), target_width=36)
    write_drafter(narrow, tmp_path, dtype=torch.float32, embedding=torch.randn(96, 24))
    settings, weights = _files(tmp_path)
    for part in ("q_proj", "k_proj"):
        rows = weights[f"midlayer.self_attn.{part}.weight"].shape[0]
        weights[f"midlayer.self_attn.{part}.bias"] = torch.randn(rows)
    save_file(weights, tmp_path / "model.safetensors")
    again = read_drafter(tmp_path, target)
    assert isinstance(again, Eagle3)
    assert again.embed_tokens is not None
    torch.testing.assert_close(again.embed_tokens.weight, weights["embed_tokens.weight"])
    attention = again.midlayer.self_attn
    torch.testing.assert_close(attention.q_proj.bias, weights["midlayer.self_attn.q_proj.bias"])
    assert attention.v_proj.bias is None
    assert settings["target_hidden_size"] == 36
    assert _states(again, target)[0].shape == (1, 8, len(DRAFTED))


def test_what_cannot_be_read_says_why(
    made: dict[str, FeatureDrafter], target: Any, tmp_path: Path
) -> None:
    with pytest.raises(DraftsimError, match="no such file"):
        read_drafter(tmp_path / "none", target)
    folder = tmp_path / "a"
    write_drafter(made["eagle3"], folder)
    config, weights = _files(folder)

    def given(weights: dict[str, Tensor], **settings: Any) -> None:
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    given({n: w for n, w in weights.items() if n != "norm.weight"})
    with pytest.raises(DraftsimError, match=r"lacks norm.weight \(1 in all\)"):
        read_drafter(folder, target)
    given({**weights, "midlayer.self_attn.q_norm.weight": torch.ones(12)})
    with pytest.raises(DraftsimError, match="has an unknown midlayer"):
        read_drafter(folder, target)
    given({**weights, "d2t": weights["d2t"][:-1]})
    with pytest.raises(DraftsimError, match="lm_head has 64 rows"):
        read_drafter(folder, target)
    given(weights, intermediate_size=40)
    with pytest.raises(DraftsimError, match=r"is \(56, 36\), and its config"):
        read_drafter(folder, target)
    given(weights, num_hidden_layers=2)
    with pytest.raises(DraftsimError, match="has 2 layers"):
        read_drafter(folder, target)
    given(weights, fc_norm=True)
    with pytest.raises(DraftsimError, match="fc_norm is not supported"):
        read_drafter(folder, target)
    given(weights, speculators_model_type="dflash")
    with pytest.raises(DraftsimError, match="'dflash' drafter: eagle, eagle3, mtp are read"):
        read_drafter(folder, target)
    given(weights, vocab_size=99)
    with pytest.raises(DraftsimError, match="trained for another"):
        read_drafter(folder, target)
    given({"lm_head.weight": torch.ones(1)})
    with pytest.raises(DraftsimError, match="none of the drafters that are read"):
        read_drafter(folder, target)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DraftsimError, match="cannot read the weights"):
        read_drafter(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DraftsimError, match="holds no weights"):
        read_drafter(folder, target)
    with pytest.raises(DraftsimError, match="no mtp drafters"):
        write_drafter(made["mtp"], folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsimError, match="cannot write a drafter"):
        write_drafter(made["eagle"], tmp_path / "file" / "x")
