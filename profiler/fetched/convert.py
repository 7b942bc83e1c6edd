"""Makes a plain Hugging Face folder of a GGUF file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from traces.errors import missing

NEEDED = ("torch", "transformers", "safetensors", "gguf", "accelerate")


def check_packages() -> None:
    """Raise DraftsimError unless the packages that read a GGUF file are installed."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise missing(absent, "reading a GGUF file")


def convert_gguf(path: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of `path` to `folder`, weights in bfloat16."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its bars would run through our lines
    transformers.utils.logging.set_verbosity_error()
    source: dict[str, Any] = {"gguf_file": path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.bfloat16, **source
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    # transformers takes a model read from GGUF for a quantised one, which it refuses to save,
    # although its weights are ordinary by now.
    model.hf_quantizer = None
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes 0600
