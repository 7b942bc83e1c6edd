"""A settings file read back as the policy that an engine runs under it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from policies.batch.base import BatchPolicy
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive
from simulator.tune.formats import (
    BY_BATCH,
    BY_LENGTH,
    HF_KEYS,
    LLAMACPP_KEYS,
    SettingsError,
    check_settings,
    is_batch,
)
from traces.store.text import read_json

ENGINE_OF: Mapping[str, str] = {
    BY_LENGTH: "vllm", "draft_len_schedule": "tensorrt-llm", "aic_nextn": "dynamo",
    BY_BATCH: "vllm", HF_KEYS[0]: "hf", LLAMACPP_KEYS[0]: "llamacpp",
    "num_speculative_tokens": "vllm",
}  # fmt: skip
"""The engine that reads a key; SGLang's keys are batch sizes."""
OWN_KEYS = {"hf": HF_KEYS, "llamacpp": LLAMACPP_KEYS}
"""The keys of engines whose files have others, which are left alone."""


def read_settings(path: str | os.PathLike[str]) -> tuple[str, DraftPolicy | BatchPolicy]:
    """Read engine and policy of a file that `draftsim tune` wrote, or that an engine would read.

    ``null`` means any engine without a draft model, ``off``.  Keys other than an engine's own, such
    as the ``model`` and ``method`` of vLLM's ``--speculative-config``, are left alone.

    Raises
    ------
    FileError
        If the file cannot be read, or is not JSON.
    SettingsError
        If no engine's keys are in it, or the engine would refuse them.
    """
    document = read_json(path, "name a file that `draftsim tune` wrote")
    if document is None:
        return "off", Autoregressive()
    if not isinstance(document, dict):
        raise SettingsError(f"{path} holds a {type(document).__name__}, expected an object")
    engine = next((engine for key, engine in ENGINE_OF.items() if key in document), None)
    if engine is None and any(is_batch(key) for key in document):
        engine = "sglang"
    if engine is None:
        raise SettingsError(
            f"{path}: expected num_speculative_tokens (vLLM), a slot such as "
            '{"1": {"candidate_steps": [1]}} (SGLang), num_assistant_tokens (transformers), '
            "spec-draft-n-max (llama.cpp), draft_len_schedule (TensorRT-LLM) or aic_nextn (Dynamo)"
        )
    own = {key: document[key] for key in OWN_KEYS.get(engine, document) if key in document}
    try:
        return engine, check_settings(engine, own)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
