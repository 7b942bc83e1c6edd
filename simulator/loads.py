"""A load made ready to be simulated: scenarios with their policies, costs and rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.batch.base import Policy
from policies.rules.base import VerifyRule
from simulator.chosen import Policies, load_serving_policies, one_rule
from simulator.recording import Recording
from simulator.serving.arrivals import ArrivalFile
from simulator.serving.scenario import Scenario
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.latency.graphs import CUDAGraphs
from traces.latency.table import LatencyTable
from traces.operators.compose import overfull
from traces.replay.calls import drafting_always


def _overfull(recording: Recording, scenario: Scenario) -> str:
    """Return in words that a full batch's caches do not fit; empty where their blocks are bounded.

    In the mean a running request holds its prompt and half of its output.  Requests that arrive by
    the clock need not fill the batch.
    """
    if scenario.limits.kv_blocks is not None:
        return ""
    arrivals, requests = scenario.arrivals, recording.trace.requests
    if isinstance(arrivals, ArrivalFile):
        prompt, output = (float(np.mean(v)) for v in (arrivals.read.prompt, arrivals.read.output))
    else:
        prompt = arrivals.prompt or float(np.mean([r.prompt_length for r in requests]))
        output = arrivals.output or float(np.mean([r.tokens for r in requests]))
    most, then = scenario.largest_batch, "--kv-blocks auto bounds the cache"
    if arrivals.concurrency is None:
        most = min(most, scenario.count or most)
        then = f"{then}, if all of them run at a time"
    return overfull(recording.latency.meta, most, prompt + output / 2, then)


class Prepared(NamedTuple):
    """Policies to be simulated in scenarios, in the order that the functions of serving take."""

    trace: Trace
    latency: LatencyTable
    policies: Mapping[str, Policy]
    scenarios: Sequence[Scenario]
    rule: VerifyRule | None

    @property
    def largest(self) -> int:
        """The largest number of sequences in a pass of the target."""
        return max(scenario.largest_batch for scenario in self.scenarios)


def prepared(
    recording: Recording, scenarios: Sequence[Scenario], policies: Policies | None,
    verify: str | None = None, memory: Path | None = None, *, graphs: CUDAGraphs | None = None,
    always_draft: int | None = None, settings: Path | None = None, say: Say = silent,
) -> Prepared:  # fmt: skip
    """Return what `draftsim serve` and `draftsim capacity` simulate, as Python does.

    Parameters
    ----------
    policies, verify, memory:
        Policies, and the rule by which all of them are verified (`one_rule`, `Recording.rule`).
    graphs:
        CUDA graphs of the engine; None: as measured.
    always_draft:
        Draft passes in every round (`traces.replay.calls.drafting_always`).
    settings:
        File of settings to serve with as well (`load_serving_policies`).
    say:
        Told what is left out and why.

    Raises
    ------
    DraftsimError
        If the latencies know no such batches, a policy or rule cannot be replayed, or a mode does
        not fit.
    """
    policies, verify = one_rule(policies, verify, say)
    for line in scenarios[0].arrivals.remarks:
        say(line)
    rule = recording.rule(verify, memory)
    found = Prepared(recording.trace, recording.latency, {}, scenarios, rule)
    largest = found.largest
    recording.latency.check_sizes("target", "forward", largest, 1)  # before anything is served
    for text in dict.fromkeys(_overfull(recording, one) for one in scenarios):
        if text:
            say(text)
    latency = drafting_always(recording.in_graphs(graphs, largest).priced(largest), always_draft)
    chosen = load_serving_policies(
        policies, recording.trace, latency, scenarios[0].mode, settings, largest, say
    )
    return found._replace(latency=latency, policies=chosen)
