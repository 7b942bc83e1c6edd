"""A vLLM engine in this process, stepped by hand, with a stopwatch on every part of a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from profiler.engines.own_drafter import OwnDrafter
from profiler.engines.proposer import Proposer
from profiler.recording.run import model_path
from traces.errors import DraftsimError

PARTS = ("schedule", "execute", "sample", "propose", "update", "output")
"""Parts of a step in seconds: the scheduler's plan, the model's pass, sampling with the
engine's bookkeeping, drafting, taking the results in, and detokenising with what is left."""


class Prompt(NamedTuple):
    """Prompt tokens of one request that a step processed."""

    name: str
    tokens: int
    cached: int
    left: int
    """Of the prompt, before this step."""


class Decoded(NamedTuple):
    """One request that a step decoded."""

    name: str
    context: int
    """Tokens known before the step, prompt and output."""
    drafted: int
    emitted: int


@dataclass(frozen=True)
class Step:
    """One iteration: who ran, what came of it, and where its seconds went."""

    start_s: float
    seconds: float
    parts: Mapping[str, float]
    decoded: Sequence[Decoded]
    prompts: Sequence[Prompt]
    emitted: Mapping[str, int]
    """Tokens that each request's caller got."""
    finished: Sequence[str]

    @property
    def kind(self) -> str:
        """``decode``, ``prompt`` or ``mixed``."""
        if not self.prompts:
            return "decode"
        return "mixed" if self.decoded else "prompt"


@dataclass(frozen=True)
class EngineOptions:
    """How to start the engine.

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
        """Whether drafts are vLLM's own."""
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


class Engine:
    """The engine, one step at a time.

    Raises DraftsimError where vLLM is not installed or refuses the options.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        llm, self._params, self._prompt = _start(options)
        self._engine = llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler, executor = core.scheduler, core.model_executor
        runner = executor.driver_worker.worker.model_runner
        config = self._engine.vllm_config
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.proposer: Proposer | OwnDrafter = (
            OwnDrafter(runner, options.longest, self.vocabulary)
            if options.own_drafter else runner.drafter
        )  # fmt: skip
        self.blocks = int(config.cache_config.num_gpu_blocks)
        self.block_size = int(config.cache_config.block_size)
        self.meta = _meta(options, config)
        self._watch: dict[str, float] = {}
        self._plan: Any = None
        self._before: dict[str, tuple[int, int, int]] = {}
        self._sampled: dict[str, int] = {}
        self._timed(self._scheduler, "schedule", "schedule", self._planned)
        self._timed(executor, "execute_model", "execute")
        self._timed(executor, "sample_tokens", "sample")
        self._timed(runner, "propose_draft_token_ids", "propose")
        self._timed(self._scheduler, "update_from_output", "update", before=self._output)
        self._idle_steps()

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Queue a request for exactly `tokens` greedy output tokens."""
        params = self._params(tokens)
        self._engine.add_request(name, self._prompt(list(prompt)), params)

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests, and let the engine forget them."""
        self._engine.abort_request(list(names))

    @property
    def knows_batch_tables(self) -> bool:
        """Whether this vLLM reads ``num_speculative_tokens_per_batch_size``."""
        config = self._engine.vllm_config.speculative_config
        return hasattr(config, "num_speculative_tokens_per_batch_size")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> Step | None:
        """One iteration; None if nothing was to be run."""
        self._watch = dict.fromkeys(PARTS, 0.0)
        self._plan, self._sampled = None, {}
        start_s = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start_s
        if self._plan is None or not self._plan.total_num_scheduled_tokens:
            return None
        parts = self._watch
        parts["sample"] -= parts["propose"]
        parts["output"] = seconds - sum(parts[p] for p in PARTS if p != "output")
        decoded, prompts = self._who()
        emitted = {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
        finished = [o.request_id for o in outputs if o.finished]
        return Step(start_s, seconds, parts, decoded, prompts, emitted, finished)

    def run(self, requests: Mapping[str, tuple[Sequence[int], int]]) -> dict[str, list[int]]:
        """Output tokens of requests by name, each a prompt and how many tokens to emit."""
        for name, (prompt, tokens) in requests.items():
            self.add(name, prompt, tokens)
        outputs: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        return outputs

    def _who(self) -> tuple[list[Decoded], list[Prompt]]:
        decoded, prompts = [], []
        for name, tokens in self._plan.num_scheduled_tokens.items():
            known, computed, prompt = self._before[name]
            own = name.rpartition("-")[0]
            if computed < prompt:
                prompts.append(Prompt(own, tokens, computed, prompt - computed))
            else:
                emitted = self._sampled.get(name, 0)
                decoded.append(Decoded(own, known, tokens - 1, emitted))
        return decoded, prompts

    def _planned(self, plan: Any) -> None:
        self._plan = plan
        requests = self._scheduler.requests
        self._before = {
            name: (
                requests[name].num_tokens,
                # `schedule` has already counted what it planned.
                requests[name].num_computed_tokens - tokens,
                requests[name].num_prompt_tokens,
            )
            for name, tokens in plan.num_scheduled_tokens.items()
        }

    def _output(self, plan: Any, output: Any) -> None:
        del plan
        self._sampled = {
            name: len(ids)
            for name, ids in zip(output.req_ids, output.sampled_token_ids, strict=True)
        }

    def _timed(
        self,
        owner: Any,
        method: str,
        part: str,
        after: Callable[..., None] | None = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        """Put the stopwatch on a method of the engine."""
        own = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            began = time.perf_counter()
            result = own(*args, **kwargs)
            self._watch[part] = self._watch.get(part, 0.0) + time.perf_counter() - began
            if after is not None:
                after(result)
            return result

        setattr(owner, method, timed)

    def _idle_steps(self) -> None:
        """Steps that let the engine drop what has ended."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _is_eagle3(folder: Path) -> bool:
    """Whether a drafter's ``config.json`` is of EAGLE-3, whose vocabulary is its own."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftsimError(f"{folder} holds no drafter with a config.json: {error}") from None
    return "draft_vocab_size" in config or "eagle3" in str(config.get("architectures")).lower()


def _start(options: EngineOptions) -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
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
            enable_prefix_caching=False, async_scheduling=False, skip_tokenizer_init=not words,
            speculative_config=options.speculative, disable_log_stats=False,
            **{"enforce_eager": True, **options.more},
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DraftsimError(f"vLLM does not start with {options.target}: {reason}") from None

    def params(tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=words)

    return llm, params, lambda ids: TokensPrompt(prompt_token_ids=ids)


def _meta(options: EngineOptions, config: Any) -> dict[str, Any]:
    import torch
    import vllm

    return {
        "engine": {
            "name": "vllm", "version": vllm.__version__, "method": options.method,
            "own_drafter": options.own_drafter, "longest": options.longest,
            "max_batch": options.max_batch,
            "max_model_len": options.max_model_len,
            "token_budget": options.token_budget, "eager": config.model_config.enforce_eager,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
        },
        "target": options.target, "draft": options.eagle or options.draft,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": config.device_config.device_type, "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }  # fmt: skip
