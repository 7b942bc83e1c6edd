"""A settings file read back as the policy that an engine runs under it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from policies.batch.base import BatchPolicy
from policies.batch.engines import TensorRTLLM
from policies.batch.sglang import SGLangAdaptive
from policies.batch.tables import BatchTable
from policies.core import DraftPolicy
from policies.lengths.basic import Autoregressive, Fixed
from simulator.tune.formats import (
    BY_LENGTH,
    CONTEXT_END,
    HF_KEYS,
    LLAMACPP_KEYS,
    SettingsError,
    check_settings,
    is_batch,
)
from simulator.tune.huggingface import HuggingFaceSetting
from simulator.tune.llamacpp import LlamaCppSetting
from traces.store.text import read_json


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
    try:
        return _policy(document)
    except (SettingsError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _policy(document: Mapping[str, Any]) -> tuple[str, DraftPolicy | BatchPolicy]:
    if BY_LENGTH in document and "num_speculative_tokens_per_batch_size" not in document:
        check_settings("vllm", document)
        rows = [[1, CONTEXT_END, low, high, k] for low, high, k in document[BY_LENGTH]]
        return "vllm", BatchTable(rows)
    if "draft_len_schedule" in document:
        check_settings("tensorrt-llm", document)
        gate = (document.get("acceptance_window", 0),
                document.get("acceptance_length_threshold", 0.0))  # fmt: skip
        return "tensorrt-llm", TensorRTLLM(document["draft_len_schedule"], *gate, in_step=True)
    if "aic_nextn" in document:
        check_settings("dynamo", document)
        return "dynamo", Fixed(document["aic_nextn"])
    if "num_speculative_tokens_per_batch_size" in document:
        check_settings("vllm", document)
        return "vllm", BatchTable(document["num_speculative_tokens_per_batch_size"])
    if "num_assistant_tokens" in document:
        own = {key: document[key] for key in HF_KEYS if key in document}
        check_settings("hf", own)
        return "hf", HuggingFaceSetting(*(own[key] for key in HF_KEYS)).policy()
    if LLAMACPP_KEYS[0] in document:
        mine = {key: document[key] for key in LLAMACPP_KEYS if key in document}
        check_settings("llamacpp", mine)
        return "llamacpp", LlamaCppSetting(*(mine[key] for key in LLAMACPP_KEYS)).policy()
    if any(is_batch(key) for key in document):
        check_settings("sglang", document)
        slots = {key: value for key, value in document.items() if key != "strategy"}
        return "sglang", SGLangAdaptive(slots)
    raise SettingsError(
        "expected num_speculative_tokens_per_batch_size (vLLM), a slot such as "
        '{"1": {"candidate_steps": [1]}} (SGLang), num_assistant_tokens (transformers), '
        "spec-draft-n-max (llama.cpp), draft_len_schedule (TensorRT-LLM) or aic_nextn (Dynamo)"
    )
