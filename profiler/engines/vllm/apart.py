"""Loads in an engine in a separate process, without code of draftsim.

It tells what a user's engine does: with its own defaults and no speculation, or with vLLM's own
drafter under synthetic acceptance (``rejection_sample_method``).  The `Engine` that is stepped by
hand has fixed settings (`profiler.engines.vllm.engine.FIXED`), so that every step can be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.engines.engine import EngineOptions
from profiler.engines.vllm.engine import environment, measured_arguments, plain_arguments
from traces.digits import counted
from traces.errors import DraftsimError
from traces.store.engine_runs import Apart, Demand, PlannedRequest, Speed
from traces.store.text import read_object

TAIL = 12
"""Lines of a failed engine's output that are shown."""


def arguments_apart(
    options: EngineOptions, synthetic: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for an engine apart.

    Without ``synthetic`` it does not speculate and keeps vLLM's defaults.  With it the drafter of
    `options` drafts, under the settings of the measured engine, and vLLM accepts the token at
    every position with these unconditional chances.

    Raises DraftsimError if synthetic acceptance is asked of drafts that no model makes, or for
    more positions than the engine drafts.
    """
    if synthetic is None:
        return plain_arguments(options)
    if not options.own_drafter:
        raise DraftsimError(
            "synthetic acceptance is vLLM's own, for a drafter of its own: profile the engine with "
            "--draft or --eagle"
        )
    if len(synthetic) > options.longest:
        raise DraftsimError(
            f"--synthetic has {counted(len(synthetic), 'position')}, and the engine was measured "
            f"up to {options.longest}: profile it with --engine-longest {len(synthetic)}"
        )
    given, rates = measured_arguments(options), list(synthetic)
    given["speculative_config"] |= {
        "num_speculative_tokens": len(rates), "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }  # fmt: skip
    return given


def run(
    given: Mapping[str, Any], demands: Mapping[str, Demand], prompts: Mapping[int, Sequence[int]],
    repeats: int, threads: int = 1,
) -> Apart:  # fmt: skip
    """Start ``vllm.LLM`` with the arguments `given` in a separate process, and run the loads.

    ``demands`` are by load, ``prompts`` by sequence.

    Raises DraftsimError if the engine fails; the end of its output goes to standard error.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, told = Path(scratch) / "asked.json", Path(scratch) / "told.json"
        document = {
            "arguments": given, "repeats": repeats,
            "loads": {load: own._asdict() for load, own in demands.items()},
            "prompts": {str(i): list(ids) for i, ids in prompts.items()},
        }  # fmt: skip
        asked.write_text(json.dumps(document))
        command = [sys.executable, "-m", "profiler.engines.vllm.apart", str(asked), str(told)]
        ran = subprocess.run(
            command, env=environment(threads), capture_output=True, text=True, check=False
        )
        if ran.returncode or not told.is_file():
            for line in (ran.stdout + ran.stderr).splitlines()[-TAIL:]:
                print(line, file=sys.stderr)
            raise DraftsimError(
                f"the engine apart ended with code {ran.returncode}: its last lines say why"
            )
        found = read_object(told, "run it again")
    return Apart({load: Speed(*own) for load, own in found["speeds"].items()}, found["settings"])


def timed_load(
    engine: Any, add: Callable[[str, PlannedRequest], None], jobs: Sequence[PlannedRequest],
    concurrency: int | None,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> Speed:  # fmt: skip
    """Run one load and return its tokens and the seconds from its first request to its last token.

    ``engine`` is vLLM's ``LLMEngine``.
    """
    waiting = deque(enumerate(jobs))
    tokens: dict[str, int] = {}
    start_s = clock()

    def send() -> None:
        index, job = waiting.popleft()
        add(f"{job.sequence}/{index}", job)

    for _ in range(min(concurrency or 0, len(waiting))):
        send()
    while waiting or engine.has_unfinished_requests():
        if concurrency is None:
            while waiting and waiting[0][1].arrival_s <= clock() - start_s:
                send()
            if not engine.has_unfinished_requests():
                sleep(max(waiting[0][1].arrival_s - (clock() - start_s), 0.0))
                continue
        for output in engine.step():
            tokens[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished and concurrency is not None and waiting:
                send()
    return Speed(sum(tokens.values()), clock() - start_s - jobs[0].arrival_s)


def main(asked: Path, told: Path) -> None:
    """Run the loads of the file `asked` in vLLM and write their speeds to `told`."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    given = read_object(asked, "run it again")
    llm = LLM(**given["arguments"])
    engine, prompts = llm.llm_engine, given["prompts"]
    words = not given["arguments"].get("skip_tokenizer_init")
    uses: Counter[int] = Counter()

    def add(name: str, job: PlannedRequest) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=job.tokens, ignore_eos=True, detokenize=words
        )
        # Users' prompts differ from one another: one that is sent again is not read from the cache,
        # which only prompts of the same salt share.
        prompt = TokensPrompt(
            prompt_token_ids=prompts[str(job.sequence)], cache_salt=str(uses[job.sequence])
        )
        uses[job.sequence] += 1
        engine.add_request(name, prompt, params)

    found: dict[str, list[float]] = {}
    for load, own in given["loads"].items():
        jobs = [PlannedRequest(*job) for job in own["jobs"]]
        total = Speed(0, 0.0)
        for repeat in range(given["repeats"] + 1):
            llm.reset_prefix_cache()
            uses.clear()
            speed = timed_load(engine, add, jobs, own["concurrency"])
            if repeat:  # the first warms up
                total = Speed(total.tokens + speed.tokens, total.seconds + speed.seconds)
        found[load] = list(total)
    config = engine.vllm_config
    settings = {
        "enforce_eager": bool(config.model_config.enforce_eager),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
    }
    told.write_text(json.dumps({"speeds": found, "settings": settings}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
