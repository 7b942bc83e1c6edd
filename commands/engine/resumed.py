"""Which check of an engine a run folder keeps the runs of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commands.engine.loads import drawn
from commands.engine.rounds import simulated_rounds
from profiler.checks.unfinished import version
from profiler.engines.texts import prompts_of
from profiler.recording.run import digest_of
from traces.acceptance.trace import Trace
from traces.store.identity import identity

if TYPE_CHECKING:
    from profiler.engines.engine import Engine
    from simulator.serving.arrivals import Arrivals
    from traces.latency.table import LatencyTable


def check_key(
    engine: Engine, latency: LatencyTable, trace: Trace, chosen: Mapping[str, Any],
    loads: Mapping[str, Arrivals], requests: int, seed: int, **more: Any
) -> dict[str, Any]:  # fmt: skip
    """Return the identity of a check without its repeats: requests, prompts, and each run's rounds.

    The rounds that the simulator predicts tell what names do not: a policy's own file that has
    changed since, or another recording.
    """
    scenarios, jobs = drawn(loads, engine, trace, requests, seed)
    served = {job.sequence for own in jobs.values() for job in own}
    prompts = prompts_of(trace, engine.vocabulary, seed)
    return {
        "version": version(), "trace": identity(trace.meta), "seed": seed,
        "prompts": digest_of({str(i): prompts[i] for i in sorted(served)}),
        "loads": [
            (load, s.arrivals.concurrency, digest_of({"jobs": jobs[load]}))
            for load, s in scenarios.items()
        ],
        "arms": [
            (text, [
                digest_of({"rounds": simulated_rounds(trace, latency, policy, s)})
                for s in scenarios.values()
            ])
            for text, policy in chosen.items()
        ],
        **more,
    }  # fmt: skip
