"""The modes in which a pair's passes run, and the kernels of a few rounds in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from policies.lengths.basic import Fixed
from profiler.latency.host import dictated_run, dictating_trace
from profiler.models.graphs import CompiledRunner, GraphRunner
from profiler.models.runner import Runner
from profiler.suite import COMPILED, EAGER, GRAPH
from profiler.suite.environment import Workplace

RUNNERS = {EAGER: Runner, GRAPH: GraphRunner, COMPILED: CompiledRunner}
GAMMA, TOKENS, PROMPT = 4, 12, 64
"""The rounds that are traced: drafted tokens, and the run that they are from."""


def make_runner(mode: str, model: Any, slots: int, batch: int = 1) -> Runner:
    """Return the runner of a mode (`profiler.suite.KERNELS`) for a model."""
    return RUNNERS[mode](model, slots, batch)


@contextmanager
def named_passes(runner: Runner, name: str) -> Iterator[None]:
    """Make every pass of a runner a named range of the profile, inside the block."""

    def within(run: Any, *args: Any, **kwargs: Any) -> Any:
        width = args[0].shape[-1]
        with record_function(f"{name}, {width} wide"):
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

    The rounds are those of a dictated run, after one that captures and warms up; every pass is a
    named range.  Opens in Perfetto and chrome://tracing.
    """
    tokens, prompt = (6, 16) if place.quick else (TOKENS, PROMPT)
    trace = dictating_trace(1, tokens, prompt, GAMMA)
    target, draft = (make_runner(mode, model, tokens + prompt + GAMMA + 1) for model in models)
    dictated_run(target, draft, trace, [0], Fixed(GAMMA))
    path = place.out / f"profile-{name}-{mode}.json"
    part = path.with_suffix(".part.json")
    wanted: Sequence[ProfilerActivity] = sorted(supported_activities(), key=str)
    with ExitStack() as stack:
        for runner, role in ((target, "target"), (draft, "draft")):
            stack.enter_context(named_passes(runner, role))
        kept = stack.enter_context(profile(activities=wanted))
        with record_function("rounds"):
            dictated_run(target, draft, trace, [0], Fixed(GAMMA))
    kept.export_chrome_trace(str(part))
    part.replace(path)
    return path
