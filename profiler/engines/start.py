"""How a vLLM engine is started in this process, and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiler.engines.proposer import Proposer
from profiler.recording.run import model_path
from traces.errors import DraftsimError
from traces.store.text import read_object

FIXED: Mapping[str, Any] = {
    "enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False,
}  # fmt: skip
"""Arguments of ``vllm.LLM`` that a measured engine has unless `EngineOptions.more` says others."""


@dataclass(frozen=True)
class EngineOptions:
    """Options that the engine is started with.

    Models are folders, or names (`profiler.recording.run.model_path`).  ``draft`` and ``eagle`` are
    those of vLLM's own draft methods, whose passes then run
    (`profiler.engines.own_drafter.OwnDrafter`); with neither, drafts come from
    `profiler.engines.proposer.Proposer`.  A draft has at most `longest` tokens.
    """

    target: str
    draft: str | None = None
    eagle: str | None = None
    longest: int = 8
    max_batch: int = 16
    max_model_len: int = 1024
    token_budget: int = 8192
    dtype: str = "auto"
    threads: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``vllm.LLM``."""

    @property
    def method(self) -> str:
        """vLLM's name of the draft method."""
        if self.eagle:
            return "eagle3" if _is_eagle3(Path(model_path(self.eagle, "draft"))) else "eagle"
        return "draft_model" if self.draft else "custom_class"

    @property
    def own_drafter(self) -> bool:
        """Return True if drafts are vLLM's own."""
        return bool(self.eagle or self.draft)

    @property
    def speculative(self) -> dict[str, Any]:
        """vLLM's ``speculative_config``."""
        drafter = self.eagle or self.draft
        ours = f"{Proposer.__module__}.{Proposer.__qualname__}"
        return {
            "method": self.method, "num_speculative_tokens": self.longest,
            "model": ours if drafter is None else model_path(drafter, "draft"),
        }  # fmt: skip


def _is_eagle3(folder: Path) -> bool:
    """Return True if a drafter's ``config.json`` is of EAGLE-3, which has its own vocabulary."""
    if not (folder / "config.json").is_file():
        raise DraftsimError(f"{folder} holds no drafter with a config.json: name its folder")
    config = read_object(folder / "config.json", "name the folder of a drafter")
    return "draft_vocab_size" in config or "eagle3" in str(config.get("architectures")).lower()


def start(options: EngineOptions) -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
    """Return the ``vllm.LLM``, and makers of sampling parameters (by tokens) and prompts (of ids).

    Raises DraftsimError where vLLM is not installed or refuses the options.
    """
    # In this process, so that it can be stepped; both are read when vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        import torch

        # The variable comes too late where torch was imported before, and vLLM takes the function
        # away once it runs.
        torch.set_num_threads(options.threads)
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
    except ImportError as error:
        raise DraftsimError(
            f"vLLM cannot be imported here ({error}): run `make vllm`, then .venv-vllm/bin/draftsim"
        ) from None
    folder = Path(model_path(options.target, "target"))
    words = not folder.is_dir() or any(folder.glob("tokenizer*"))
    try:
        llm = LLM(
            str(folder), dtype=options.dtype, max_model_len=options.max_model_len,
            max_num_seqs=options.max_batch, max_num_batched_tokens=options.token_budget,
            skip_tokenizer_init=not words,
            speculative_config=options.speculative, disable_log_stats=False,
            **{**FIXED, **options.more},
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DraftsimError(f"vLLM does not start with {options.target}: {reason}") from None

    def params(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=words)

    return llm, params, lambda ids: TokensPrompt(prompt_token_ids=ids)


def meta_of(options: EngineOptions, config: Any) -> dict[str, Any]:
    """Return the metadata kept with figures of an engine of ``vllm_config`` `config`."""
    import torch
    import vllm

    device = config.device_config.device_type
    return {
        "engine": {
            "name": "vllm", "version": vllm.__version__, "method": options.method,
            "own_drafter": options.own_drafter, "longest": options.longest,
            "max_batch": options.max_batch,
            "max_model_len": options.max_model_len,
            "token_budget": options.token_budget, "eager": config.model_config.enforce_eager,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        },
        "target": options.target, "draft": options.eagle or options.draft,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": device, "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability() if device == "cpu" else None,
        "torch": torch.__version__,
    }  # fmt: skip
