"""A vLLM engine in this process, stepped by hand, with a stopwatch on every part of a step.

Written against vLLM 0.32.  Loads share one engine in slices of time by `lent_blocks`: a runner
takes requests out of its batch that a scheduler's plan leaves out, and in again when they are
planned (v1/worker/gpu_model_runner.py, ``_update_states``).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiler.engines.engine import EngineOptions
from profiler.engines.session import Governed
from profiler.engines.vllm.proposer import OwnDrafter, Proposer
from profiler.engines.vllm.watch import SECOND_RUNNER, Stopwatches
from profiler.recording.run import model_path
from traces.errors import DraftsimError
from traces.store.engine_runs import EngineStep
from traces.store.text import read_object

FIXED: Mapping[str, Any] = {
    "enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False,
}  # fmt: skip
"""Arguments of ``vllm.LLM`` that a measured engine has unless `EngineOptions.more` says others."""

NO_GRAPHS = "NONE"
"""vLLM's ``cudagraph_mode`` without CUDA graphs."""


class VllmEngine:
    """A vLLM engine in this process, one step at a time (`profiler.engines.engine.Engine`).

    Raises DraftsimError where vLLM is not installed or refuses the options.
    """

    cache_settings = "VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization"

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        llm, self._params, self._prompt = start(options)
        self._engine = llm.llm_engine
        self._core = core = self._engine.engine_core.engine_core
        self._own = core.scheduler
        executor = core.model_executor
        runner = executor.driver_worker.worker.model_runner
        config = self._engine.vllm_config
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.proposer: Governed = (
            OwnDrafter(runner, options.longest, self.vocabulary)
            if options.own_drafter else runner.drafter
        )  # fmt: skip
        self.blocks = int(config.cache_config.num_gpu_blocks)
        self.block_size = int(config.cache_config.block_size)
        self.meta = meta_of(options, config)
        asked = options.more.get("compilation_config", {}).get("cudagraph_mode", NO_GRAPHS)
        runs = self.meta["engine"]["cudagraph_mode"] or NO_GRAPHS
        if runs != asked:
            raise DraftsimError(
                f"vLLM started with --cudagraph-mode {runs}, not {asked}: this device, or its "
                "attention, has no other; give that one, or none"
            )
        self._watch = Stopwatches(core.scheduler, executor, runner)
        while self.busy:  # it drops what has ended
            self._engine.step()

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        params = self._params(tokens)
        self._engine.add_request(name, self._prompt(list(prompt)), params)

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    @contextmanager
    def tenants(self, blocks: Sequence[int]) -> Iterator[list[Any]]:
        self.enter()
        with lent_blocks(self._core, blocks) as schedulers:
            try:
                yield schedulers
            finally:
                self.enter()

    def enter(self, tenant: Any = None) -> None:
        self._core.scheduler = self._own if tenant is None else tenant
        self._watch.follow(self._core.scheduler)

    @property
    def busy(self) -> bool:
        return bool(self._core.scheduler.has_unfinished_requests())

    def step(self) -> EngineStep | None:
        self._watch.begin()
        start_s = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start_s
        emitted = {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
        finished = [o.request_id for o in outputs if o.finished]
        return self._watch.taken(start_s, seconds, emitted, finished)


def method_of(options: EngineOptions) -> str:
    """Return vLLM's name of the draft method."""
    if options.eagle:
        return "eagle3" if _is_eagle3(Path(model_path(options.eagle, "draft"))) else "eagle"
    return "draft_model" if options.draft else "custom_class"


def speculative_of(options: EngineOptions) -> dict[str, Any]:
    """Return vLLM's ``speculative_config``."""
    drafter = options.eagle or options.draft
    ours = f"{Proposer.__module__}.{Proposer.__qualname__}"
    return {
        "method": method_of(options), "num_speculative_tokens": options.longest,
        "model": ours if drafter is None else model_path(drafter, "draft"),
    }  # fmt: skip


def plain_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that do not depend on how it speculates.

    A folder without a tokenizer is served by token ids alone.
    """
    model = model_path(options.target, "target")
    given = {
        "model": model, "dtype": options.dtype,
        "max_model_len": options.max_model_len, "max_num_seqs": options.max_batch,
    }  # fmt: skip
    ids_alone = Path(model).is_dir() and not any(Path(model).glob("tokenizer*"))
    return given | {"skip_tokenizer_init": True} if ids_alone else given


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a separate process that runs vLLM with this many threads."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1",
        # Else the process that runs the model takes as many threads as there are processors.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ, "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip


def measured_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a measured engine."""
    return {
        **plain_arguments(options), "max_num_batched_tokens": options.token_budget, **FIXED,
        "speculative_config": speculative_of(options), **options.more,
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
    # In this process, so that it can be stepped.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = os.environ[SECOND_RUNNER] = "0"
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
    given = measured_arguments(options)
    words = not given.get("skip_tokenizer_init")
    try:
        llm = LLM(**given, disable_log_stats=False)
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
    named = torch.cuda.get_device_name() if device == "cuda" else device
    graphs = str(config.compilation_config.cudagraph_mode.name)
    return {
        "engine": {
            "name": "vllm", "version": vllm.__version__, "method": method_of(options),
            "own_drafter": options.own_drafter, "longest": options.longest,
            "max_batch": options.max_batch, "max_model_len": options.max_model_len,
            "token_budget": options.token_budget,
            "cudagraph_mode": None if graphs == NO_GRAPHS else graphs,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        },
        "target": options.target, "draft": options.eagle or options.draft,
        "shapes": _shapes(options, config),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": named, "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability() if device == "cpu" else None,
        "torch": torch.__version__,
    }  # fmt: skip


def _shapes(options: EngineOptions, config: Any) -> dict[str, dict[str, int]]:
    """Return what tells the pair's models from others, whatever their folders are called."""
    models = {"target": config.model_config}
    if options.draft:
        models["draft"] = config.speculative_config.draft_model_config
    return {
        role: {"layers": model.hf_text_config.num_hidden_layers,
               "hidden_size": model.hf_text_config.hidden_size}
        for role, model in models.items()
    }  # fmt: skip


@contextmanager
def lent_blocks(core: Any, blocks: Sequence[int]) -> Iterator[list[Any]]:
    """Yield schedulers like that of vLLM's engine `core`, each with that many blocks of its own.

    Those blocks of the cache are no longer the core's scheduler's until the block is left.  None
    of its requests may be running.
    """
    pool = _pool(core.scheduler)
    first = pool.num_gpu_blocks - sum(blocks)
    schedulers = [_like(core) for _ in blocks]
    ends = itertools.accumulate(blocks, initial=first)
    for scheduler, (begin, end) in zip(schedulers, itertools.pairwise(ends), strict=True):
        _keep_only(_pool(scheduler), range(begin, end))
    held = _keep_only(pool, range(first))
    try:
        yield schedulers
    finally:
        pool.free_blocks(held)


def _like(core: Any) -> Any:
    """Return another scheduler, made with the arguments of the scheduler of `core`."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    own = core.scheduler
    block_size, hash_block_size = resolve_kv_cache_block_sizes(
        own.kv_cache_config, core.vllm_config
    )
    return type(own)(
        vllm_config=core.vllm_config, kv_cache_config=own.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        include_finished_set=own.finished_req_ids_dict is not None, log_stats=core.log_stats,
        block_size=block_size, hash_block_size=hash_block_size,
    )  # fmt: skip


def _pool(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def _keep_only(pool: Any, ids: Container[int]) -> list[Any]:
    """Take all blocks but `ids` from an idle pool, and return them."""
    every = pool.get_new_blocks(pool.get_num_free_blocks())
    pool.free_blocks([block for block in every if block.block_id in ids])
    return [block for block in every if block.block_id not in ids]
