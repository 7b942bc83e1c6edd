"""Loading a pair: code that a model's folder brings runs only where a person asked for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
)

from policies.core import speculate
from policies.registry import parse_policy
from profiler.decoding.single import ModelDecoder
from profiler.latency.table import Grid
from profiler.models.loading import Pair, load_pair
from profiler.models.runner import Runner
from profiler.models.seq2seq import ignored_settings
from profiler.models.stack import LayerRunner
from profiler.profile import LatencyProfile
from profiler.recording.run import BUNDLED, RunInfo, read_info, write_info
from profiler.recording.trace import Recorder
from tests import batched, bundled
from tests.conftest import Run
from traces.acceptance.sampling import GREEDY, Sampling
from traces.errors import DraftsimError

CODE = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM


Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model folder with code of its own, and the file that this code makes when it is run."""
    folder, marker = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(BUNDLED / "draft", folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own-llama"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    # At a terminal transformers asks, and this person says yes to everything.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder, marker


def test_code_of_a_model_is_not_run_unasked(with_code: tuple[Path, Path]) -> None:
    folder, marker = with_code
    with pytest.raises(DraftsimError, match=r"brings code of its own.*--trust-remote-code"):
        load_pair(folder, folder)
    assert not marker.exists()
    load_pair(folder, folder, trust_remote_code=True)
    assert marker.exists()


def test_profile_refuses_code_in_one_line(
    with_code: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    folder, marker = with_code
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f():\n")
    ran = run(
        "profile", "--target", folder, "--draft", folder, "--prompts", prompts,
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert "--trust-remote-code" in ran.refusal
    assert not marker.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "ignored"),
    [
        ("exponential_decay_length_penalty", (3, 1.9), True),
        ("guidance_scale", 3.0, True),
        ("guidance_scale", 1, False),
        ("encoder_repetition_penalty", 3.0, True),
        ("encoder_repetition_penalty", 1.0, False),
        ("renormalize_logits", True, False),
    ],
)
def test_settings_that_change_the_text_of_generate_are_known(
    name: str, value: object, ignored: bool
) -> None:
    model, prompt = batched.llama(2, 1), torch.arange(20, 32)[None]

    def text() -> list[int]:
        wanted = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        made: list[int] = model.generate(prompt, **wanted)[0].tolist()
        return made

    plain = text()
    assert ignored_settings(model) == {}
    setattr(model.generation_config, name, value)
    assert (text() != plain) is ignored
    assert ignored_settings(model) == ({name: value} if ignored else {})


def test_positions_that_take_no_mask_of_ours_are_one_line(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "draft")
    config = FalconConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        alibi=True,
    )  # fmt: skip
    for part in (FalconForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.raises(DraftsimError, match="FalconForCausalLM with ALiBi positions takes no mask"):
        load_pair(tmp_path, tmp_path)


@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text", "olmo3"])
def test_layers_that_take_other_arguments_than_llamas_are_left_out_of_a_profile(kind: str) -> None:
    configuration: Any = CONFIG_MAPPING[kind]
    config = configuration(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with pytest.raises(DraftsimError, match=f"{type(model).__name__} cannot run its layers one by"):
        LayerRunner(model, 16)
    measured = LatencyProfile(
        Pair(model, model, tokenizer=None, meta={}),
        Grid(widths=(1, 2), contexts=(8,), prompts=(4,)),
    )
    assert not [*measured._layers()]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 0.9)], ids=lambda s: s.label)
@pytest.mark.parametrize("longer", ["target", "draft"])
def test_rows_that_one_table_has_alone_are_never_drawn(
    tmp_path: Path, longer: str, sampling: Sampling
) -> None:
    folder = Path(shutil.copytree(bundled.folder() / longer, tmp_path / longer))
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 64)
    with torch.no_grad():  # of these logits the largest is that of such a row most of the time
        model.get_output_embeddings().weight[rows:].normal_(0, 3)
    model.save_pretrained(folder)
    padded = load_pair(**{n: bundled.folder() / n for n in ("target", "draft")} | {longer: folder})
    assert padded.meta[longer]["vocab_size"] == rows + 64
    # Early exits and heads read the layers' states by the same output head.
    layers = LayerRunner(padded.target, 64)
    assert layers.forward(torch.tensor([1, 2]), 0).shape == (2, rows)

    ids, found = padded.encode("The cat sat on"), []
    for pair in (bundled.pair(), padded):
        runners = Runner(pair.target, 256), Runner(pair.draft, 256)
        generator = torch.Generator().manual_seed(1)
        recorder = Recorder(
            *runners, max_new_tokens=16, max_gamma=6, sampling=sampling, generator=generator
        )
        columns = recorder.record(ids)
        decoder = ModelDecoder(*runners, ids, 16, sampling=sampling, generator=generator)
        rounds = list(speculate(decoder, parse_policy("fixed:gamma=3")))
        found.append((columns, rounds, decoder.output))
    (columns, *decoded), (again, *redecoded) = found
    assert decoded == redecoded
    for name, values in columns.items():
        np.testing.assert_allclose(again[name], values, atol=1e-3)


def _shorter(kind: str, folder: Path, rows: int) -> Path:
    """Copy a model of the bundled pair with only the first `rows` rows of its table of tokens."""
    shutil.copytree(bundled.folder() / kind, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    return folder


def test_tokens_that_one_model_lacks_are_one_line(tmp_path: Path) -> None:
    short = _shorter("draft", tmp_path / "short", 300)
    with pytest.raises(DraftsimError, match=r"short has 300 rows.*tokenizer has \d+ tokens betw"):
        load_pair(bundled.folder() / "target", short)


def test_a_prompt_of_tokens_that_both_models_lack_is_one_line(tmp_path: Path) -> None:
    short = _shorter("draft", tmp_path / "short", 300)
    pair = load_pair(short, short)
    with pytest.raises(DraftsimError, match=r"makes token \d+ of 'The cat.*tables have 300 rows"):
        pair.encode("The cat sat on the mat")


def test_a_chat_template_that_fails_is_one_line(tmp_path: Path, run: Run) -> None:
    target = Path(shutil.copytree(BUNDLED / "target", tmp_path / "target"))
    (target / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    (tmp_path / "prompts.txt").write_text("hello\n")
    ran = run(
        "profile", "--target", target, "--draft", "bundled", "--chat", "--prompts",
        tmp_path / "prompts.txt", "--out", tmp_path / "run",
    )  # fmt: skip
    assert "the target's chat template fails (no user here): leave --chat out" in ran.refusal


def test_a_run_folder_cannot_ask_for_it(tmp_path: Path) -> None:
    write_info(RunInfo("own", "own", trust_remote_code=True), tmp_path)
    assert "trust" not in (tmp_path / "run.json").read_text()
    assert not read_info(tmp_path).trust_remote_code
    assert read_info(tmp_path, trust_remote_code=True).trust_remote_code
    fields = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**fields, "trust_remote_code": True}))
    with pytest.raises(DraftsimError, match="may not say trust_remote_code"):
        read_info(tmp_path)
