"""The command that starts an engine with what was found.

Options read in: vLLM ``--speculative-config``; SGLang ``srt/server_args.py`` and
``srt/speculative/adaptive_spec_params.py`` (0.5.23; it takes the steps that it begins with from
the candidates, and the draft tokens from the steps); llama.cpp ``common/arg.cpp`` (since April
2026: ``--draft-max``, ``--draft-min`` and ``--draft-p-min`` before).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from traces.errors import DraftsimError

TARGET, DRAFT, METHOD, FILE = "TARGET", "DRAFT", "METHOD", "FILE"
"""What stands in a line for models, and a file, that nobody named."""


def launch_line(
    engine: str, document: Mapping[str, Any] | None, *, target: str = TARGET, file: str = FILE
) -> str:
    """One line for a shell; of transformers, whose draft's folder holds the settings, a call.

    Parameters
    ----------
    engine:
        One of `simulator.tune.settings.ENGINES`.
    document:
        What `simulator.tune` found; None: no speculation.
    target:
        The target model, as the engine is told of it.
    file:
        Where the document was written, for an engine that reads it from there.

    Raises
    ------
    DraftsimError
        For an unknown engine.

    >>> launch_line("llamacpp", {"spec-draft-n-max": 5}, target="t.gguf")
    'llama-server -m t.gguf -md DRAFT --spec-type draft-simple --spec-draft-n-max 5'
    """
    if engine not in _LINES:
        raise DraftsimError(f"engine is {engine!r}, expected one of {', '.join(_LINES)}")
    plain, speculating = _LINES[engine]
    start = plain.format(target=target)
    if document is None:
        return start + (")" if engine == "hf" else "")
    return start + speculating(document, file)


def _vllm(document: Mapping[str, Any], file: str) -> str:
    del file
    config = json.dumps({"method": METHOD, "model": DRAFT, **document})
    return f" --speculative-config '{config}'"


def _sglang(document: Mapping[str, Any], file: str) -> str:
    del document
    return (
        f" --speculative-algorithm EAGLE3 --speculative-draft-model-path {DRAFT} "
        f"--speculative-eagle-topk 1 --speculative-adaptive --speculative-adaptive-config {file}"
    )


def _llamacpp(document: Mapping[str, Any], file: str) -> str:
    del file
    options = " ".join(f"--{name} {value}" for name, value in document.items())
    return f" -md {DRAFT} --spec-type draft-simple {options}"


def _hf(document: Mapping[str, Any], file: str) -> str:
    del file
    options = ", ".join(f"{name}={value!r}" for name, value in document.items())
    return f", assistant_model={DRAFT})  # {DRAFT}.generation_config.update({options})"


_LINES: Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], str]]] = {
    "vllm": ("vllm serve {target}", _vllm),
    "sglang": ("python -m sglang.launch_server --model-path {target}", _sglang),
    "hf": ("{target}.generate(inputs", _hf),
    "llamacpp": ("llama-server -m {target}", _llamacpp),
}
"""By engine: the command without speculation, and what a document adds."""
