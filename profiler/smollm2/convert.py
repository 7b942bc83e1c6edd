"""Makes a plain Hugging Face folder of a GGUF file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from traces.errors import missing

NEEDED = ("gguf", "accelerate")


def check_packages() -> None:
    """Raise DraftsimError unless what reading a GGUF file takes is installed."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise missing(absent, "reading a GGUF file", extra="smollm2")


def convert_gguf(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes model, tokenizer and chat template of `path` to `folder`, weights as `dtype`.

    transformers calls a model read from GGUF quantised, even where its weights have become
    ordinary ones, and refuses to save it: they move to a model that never was.
    """
    check_packages()
    source = {"gguf_file": path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        read: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **source)
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype", "architectures"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes 0600
