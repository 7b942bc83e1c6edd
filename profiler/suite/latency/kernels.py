"""Which kernels a mode runs, and a look at them: NVTX ranges, and the trace of one round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from policies.lengths.basic import Fixed
from profiler.models.runner import Runner
from profiler.suite.environment import Workplace
from profiler.suite.latency.passes import COMPILED, EAGER, GRAPH, fill, make_runner
from profiler.suite.latency.rounds import loop_trace, run_single

KERNELS: Mapping[str, str] = {
    EAGER: "Hugging Face modules, launched kernel by kernel",
    GRAPH: "Hugging Face kernels in a CUDA graph, attention grouped and split over the keys",
    COMPILED: "torch.compile and fused projections in a CUDA graph, attention as in graph",
}
"""Description of each mode that was measured; none is an engine."""

GAMMA, TOKENS, PROMPT = 4, 12, 64
"""The rounds that are traced: drafted tokens, and the run that they are from."""


@contextmanager
def span(name: str) -> Iterator[None]:
    """An NVTX range around work on a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def named_passes(runner: Runner, name: str) -> Iterator[None]:
    """Inside the block every pass of a runner is a named range, of NVTX and of a profile."""

    def within(run: Any, *args: Any, **kwargs: Any) -> Any:
        width = args[0].shape[-1]
        with span(f"{name}, {width} wide"), record_function(f"{name}, {width} wide"):
            return run(*args, **kwargs)

    own: Any = runner
    passes = ("forward", "forward_batch")
    for method in passes:
        setattr(own, method, partial(within, getattr(own, method)))
    try:
        yield
    finally:
        for method in passes:
            delattr(own, method)


def profile_rounds(place: Workplace, name: str, mode: str, models: tuple[Any, Any]) -> Path:
    """Write the kernels of a few rounds as ``profile-NAME-MODE.json``, Chrome's trace format.

    The rounds are those of a run with dictated verdicts, after one that captures and warms up;
    every pass is a named range.  Opens in Perfetto and chrome://tracing.
    """
    tokens, prompt = (6, 16) if place.quick else (TOKENS, PROMPT)
    trace = loop_trace(1, tokens, prompt, GAMMA)
    target, draft = (make_runner(mode, model, tokens + prompt + GAMMA + 1) for model in models)
    for runner in (target, draft):
        fill(runner)
    run_single(target, draft, trace, 0, Fixed(GAMMA))
    path = place.out / f"profile-{name}-{mode}.json"
    part = path.with_suffix(".part.json")
    wanted: Sequence[ProfilerActivity] = sorted(supported_activities(), key=str)
    with ExitStack() as stack:
        for runner, role in ((target, "target"), (draft, "draft")):
            stack.enter_context(named_passes(runner, role))
        kept = stack.enter_context(profile(activities=wanted))
        with record_function("rounds"):
            run_single(target, draft, trace, 0, Fixed(GAMMA))
    kept.export_chrome_trace(str(part))
    part.replace(path)
    return path
