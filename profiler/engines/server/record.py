"""Inside a vLLM server's processes: notes of every iteration, and of when requests came.

vLLM's plugin (`profiler.engines.own_drafter.register`) installs it where the environment names a
place for notes (`profiler.engines.server.lines`).  Times are those of `time.perf_counter`, which
all processes of a machine share.  Notes of the engine's process: ``engine``, what it is;
``queued``, a request came; ``step``, an iteration, with the number of requests ``left``.  Of the
process that runs the model, which may be the same: ``ran``, the seconds of a pass or of sampling
with drafting; ``rounds`` of a request that ended (`profiler.engines.session`).

Written against vLLM 0.32: `EngineCore.step`, `EngineCore.preprocess_add_request`, which the thread
that reads the engine's socket calls with every request, and two methods of `GPUModelRunner`.
"""

from __future__ import annotations

import time
from typing import Any

from profiler.engines.drafts import caller_name
from profiler.engines.server.lines import Lines, lines
from profiler.engines.watch import Watch


class Recorder:
    """Notes what one engine does."""

    def __init__(self, notes: Lines) -> None:
        self._put = notes.put
        self._watch: Watch | None = None

    def queued(self, name: str) -> None:
        """A request has reached the engine's process."""
        self._put(queued=caller_name(name), at=time.perf_counter())

    def step(self, core: Any, own: Any) -> Any:
        """One iteration of the engine, which `own` runs."""
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
            fields = (
                step.start_s, step.seconds, step.parts, step.decoded, step.prompts, step.emitted,
                step.finished,
            )  # fmt: skip
            self._put(step=fields, left=core.scheduler.get_num_unfinished_requests())
        return outputs

    def ran(self, own: Any) -> Any:
        """Return a method of the model runner that notes how long it took."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = own(*args, **kwargs)
            self._put(ran=began_s, seconds=time.perf_counter() - began_s)
            return result

        return timed

    def _begin(self, core: Any) -> Watch:
        config = core.vllm_config
        self._put(engine={
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "vocabulary": config.model_config.get_vocab_size(),
            "device": config.device_config.device_type,
        })  # fmt: skip
        self._watch = Watch(core.scheduler)
        return self._watch


def install() -> None:
    """Put a recorder on this process's engine, where the environment asks for one."""
    notes = lines()
    if notes is None:
        return
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    recorder = Recorder(notes)
    step, preprocess = EngineCore.step, EngineCore.preprocess_add_request

    def preprocessed(core: Any, request: Any) -> Any:
        recorder.queued(request.request_id)
        return preprocess(core, request)

    EngineCore.step = lambda core: recorder.step(core, step)
    EngineCore.preprocess_add_request = preprocessed
    for method in ("execute_model", "sample_tokens"):
        setattr(GPUModelRunner, method, recorder.ran(getattr(GPUModelRunner, method)))
