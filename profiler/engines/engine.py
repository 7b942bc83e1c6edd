"""A vLLM engine in this process, stepped by hand, with a stopwatch on every part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from profiler.engines.own_drafter import OwnDrafter
from profiler.engines.proposer import Proposer
from profiler.engines.start import EngineOptions, meta_of, start

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


class Engine:
    """The engine, one step at a time.

    Raises DraftsimError where vLLM is not installed or refuses the options.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        llm, self._params, self._prompt = start(options)
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
        self.meta = meta_of(options, config)
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
