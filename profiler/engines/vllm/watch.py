"""A stopwatch on every part of a vLLM iteration, and notes of it inside a server's processes.

Written against vLLM 0.32: the scheduler, `EngineCore.step`, `EngineCore.preprocess_add_request`,
which the thread that reads the engine's socket calls with every request, and the executor's and
model runner's methods that are timed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profiler.engines.notes import Lines, lines
from traces.store.engine_runs import PARTS, Decoded, EngineStep, PromptRead

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable for its second model runner, the default on GPUs, which drafts by other methods
than those written against here: "0" wherever draftsim decides or takes notes."""
NAMED = re.compile(r"(?:cmpl-(?P<served>.+)-\d+|(?P<added>.+))-[^-]*")
"""vLLM's form of a caller's request name: it adds a number, and a prefix in a server."""


def caller_name(name: str) -> str:
    """Return a request's name as its caller gave it; over HTTP that is the header X-Request-Id."""
    found = NAMED.fullmatch(name)
    return name if found is None else found["served"] or found["added"]


class Stopwatches:
    """Stopwatches on an engine's scheduler (vLLM 0.32), and on its executor and model runner.

    Around every iteration: `begin`, then `taken`.  Where the latter two run in another process,
    ``output`` holds their part of an iteration, too.
    """

    def __init__(self, scheduler: Any, executor: Any = None, runner: Any = None) -> None:
        self._scheduler: Any = None
        self._followed: list[Any] = []
        self._watch: dict[str, float] = {}
        self._plan: Any = None
        self._before: dict[str, tuple[int, int, int]] = {}
        self._sampled: dict[str, int] = {}
        self.follow(scheduler)
        if executor is not None:
            self._timed(executor, "execute_model", "execute")
            self._timed(executor, "sample_tokens", "sample")
        if runner is not None:
            self._timed(runner, "propose_draft_token_ids", "propose", before=_waits(runner.device))

    def follow(self, scheduler: Any) -> None:
        """Plan the iterations to come by this scheduler."""
        self._scheduler = scheduler
        if not any(scheduler is known for known in self._followed):
            self._followed.append(scheduler)
            self._timed(scheduler, "schedule", "schedule", self._planned)
            self._timed(scheduler, "update_from_output", "update", before=self._output)

    def begin(self) -> None:
        """Begin an iteration."""
        self._watch = dict.fromkeys(PARTS, 0.0)
        self._plan, self._sampled = None, {}

    def taken(
        self, start_s: float, seconds: float, emitted: Mapping[str, int], finished: Sequence[str]
    ) -> EngineStep | None:
        """Return the iteration that has ended; None if nothing was run."""
        if self._plan is None or not self._plan.total_num_scheduled_tokens:
            return None
        parts = self._watch
        parts["sample"] -= parts["propose"]
        parts["output"] = seconds - sum(parts[p] for p in PARTS if p != "output")
        decoded, prompts = self._who()
        return EngineStep(start_s, seconds, parts, decoded, prompts, emitted, finished)

    def _who(self) -> tuple[list[Decoded], list[PromptRead]]:
        decoded, prompts = [], []
        for name, tokens in self._plan.num_scheduled_tokens.items():
            known, computed, prompt = self._before[name]
            own = caller_name(name)
            if computed < prompt:
                prompts.append(PromptRead(own, tokens, computed, prompt - computed))
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


def _waits(device: Any) -> Callable[..., None] | None:
    """Return a function that waits for the device, so that a target's pass is not the drafter's.

    A policy decides by the sampled tokens, so an iteration waits in any case.  None for a CPU.
    """
    if device.type == "cpu":
        return None
    import torch

    return lambda *args, **kwargs: torch.accelerator.synchronize(device)


class NoteTaker:
    """Notes what one engine does, in the form of `profiler.engines.notes`."""

    def __init__(self, notes: Lines) -> None:
        self._put = notes.put
        self._watch: Stopwatches | None = None

    def queued(self, name: str) -> None:
        """Note that a request has reached the engine's process."""
        self._put(queued=caller_name(name), at=time.perf_counter())

    def step(self, core: Any, own: Any) -> Any:
        """Run one iteration of the engine, which `own` runs."""
        watch = self._watch or self._begin(core)
        watch.begin()
        start_s = time.perf_counter()
        outputs = own(core)
        seconds = time.perf_counter() - start_s
        new = [output for some in outputs[0].values() for output in some.outputs]
        emitted = {caller_name(o.request_id): len(o.new_token_ids) for o in new}
        finished = [caller_name(o.request_id) for o in new if o.finished]
        step = watch.taken(start_s, seconds, emitted, finished)
        if step is not None:
            self._put(step=vars(step), left=core.scheduler.get_num_unfinished_requests())
        return outputs

    def ran(self, own: Any) -> Any:
        """Return a method of the model runner that notes how long it took."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = own(*args, **kwargs)
            self._put(ran=began_s, seconds=time.perf_counter() - began_s)
            return result

        return timed

    def _begin(self, core: Any) -> Stopwatches:
        config = core.vllm_config
        self._put(engine={
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "vocabulary": config.model_config.get_vocab_size(),
            "device": config.device_config.device_type,
        })  # fmt: skip
        self._watch = Stopwatches(core.scheduler)
        return self._watch


def install() -> None:
    """Put a recorder on this process's engine, where the environment asks for one."""
    notes = lines()
    if notes is None:
        return
    os.environ[SECOND_RUNNER] = "0"
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    recorder = NoteTaker(notes)
    step, preprocess = EngineCore.step, EngineCore.preprocess_add_request

    def preprocessed(core: Any, request: Any) -> Any:
        recorder.queued(request.request_id)
        return preprocess(core, request)

    EngineCore.step = lambda core: recorder.step(core, step)
    EngineCore.preprocess_add_request = preprocessed
    for method in ("execute_model", "sample_tokens"):
        setattr(GPUModelRunner, method, recorder.ran(getattr(GPUModelRunner, method)))
