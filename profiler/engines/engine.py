"""A vLLM engine in this process, stepped by hand, with a stopwatch on every part of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from profiler.engines.own_drafter import OwnDrafter
from profiler.engines.proposer import Proposer
from profiler.engines.start import EngineOptions, meta_of, start
from profiler.engines.tenants import lent
from profiler.engines.watch import PARTS, Decoded, Prompt, Step, Watch

__all__ = ["PARTS", "Decoded", "Engine", "Prompt", "Step"]


class Engine:
    """The engine, one step at a time.

    Raises DraftsimError where vLLM is not installed or refuses the options.
    """

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
        self.proposer: Proposer | OwnDrafter = (
            OwnDrafter(runner, options.longest, self.vocabulary)
            if options.own_drafter else runner.drafter
        )  # fmt: skip
        self.blocks = int(config.cache_config.num_gpu_blocks)
        self.block_size = int(config.cache_config.block_size)
        self.meta = meta_of(options, config)
        self._watch = Watch(core.scheduler, executor, runner)
        self._idle_steps()

    def add(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Queue a request for exactly `tokens` greedy output tokens."""
        params = self._params(tokens)
        self._engine.add_request(name, self._prompt(list(prompt)), params)

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests, and let the engine forget them."""
        self._engine.abort_request(list(names))

    @contextmanager
    def tenants(self, blocks: Sequence[int]) -> Iterator[list[Any]]:
        """Yield further schedulers, each with that many of the cache's blocks, which no other then
        has.

        `enter` one, and requests are added to it.  None may have any when they are given back.
        """
        self.enter()
        with lent(self._core, blocks) as schedulers:
            try:
                yield schedulers
            finally:
                self.enter()

    def enter(self, tenant: Any = None) -> None:
        """Add requests to one of the `tenants` and step it from now on; without one, the engine's.

        Requests of the others wait where they are, and keep their cache.
        """
        self._core.scheduler = self._own if tenant is None else tenant
        self._watch.follow(self._core.scheduler)

    @property
    def knows_batch_tables(self) -> bool:
        """Return True if this vLLM reads ``num_speculative_tokens_per_batch_size``."""
        config = self._engine.vllm_config.speculative_config
        return hasattr(config, "num_speculative_tokens_per_batch_size")

    @property
    def busy(self) -> bool:
        """Return True if any request is unfinished."""
        return bool(self._core.scheduler.has_unfinished_requests())

    def step(self) -> Step | None:
        """One iteration; None if nothing was to be run."""
        self._watch.begin()
        start_s = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start_s
        emitted = {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
        finished = [o.request_id for o in outputs if o.finished]
        return self._watch.taken(start_s, seconds, emitted, finished)

    def run(self, requests: Mapping[str, tuple[Sequence[int], int]]) -> dict[str, list[int]]:
        """The output tokens of requests by name, each a prompt and how many tokens to emit."""
        for name, (prompt, tokens) in requests.items():
            self.add(name, prompt, tokens)
        outputs: dict[str, list[int]] = {}
        while self.busy:
            for output in self._engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        return outputs

    def _idle_steps(self) -> None:
        """Steps that let the engine drop what has ended."""
        while self.busy:
            self._engine.step()
