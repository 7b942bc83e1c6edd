"""The fewest replicas for a load under each policy, and where another one is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from policies.rules.base import VerifyRule
from simulator.capacity import stages
from simulator.capacity.points import Bench, Point
from simulator.capacity.rows import plan_rows
from simulator.capacity.stages import Progress, Study
from simulator.executors import Cluster, Executor
from simulator.serving.outcome.results import ResultsFile
from simulator.serving.scenario import Scenario
from simulator.serving.station import Policy
from simulator.targets import Targets
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable

RATES = 6
"""Rates per replica at which policies are compared."""


def plan(
    trace: Trace,
    latency: LatencyTable,
    policies: Mapping[str, Policy],
    base: Scenario,
    rate: float,
    targets: Targets,
    *,
    rule: VerifyRule | None = None,
    requests: int | None = None,
    most: int = 1024,
    curve: bool = False,
    executor: Executor | None = None,
    path: str | Path | None = None,
    meta: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return the fewest replicas that keep `targets` at `rate` requests a second, a row a policy.

    Parameters
    ----------
    base:
        The kind of arrivals, the engine, the router, the seed and how many replications.
    requests:
        That arrive in a run; None: of a file all, else as many as a judgement needs (15 times
        what the slowest twentieth takes, and for every replica 200 or four times what it serves
        at once, up to 3000).
    most:
        Replicas to try at most.
    curve:
        Whether to find what other numbers of replicas can do, too.
    executor, path, meta, progress:
        Who runs the simulations, and a file (`ResultsFile`) of what each gave: the same question
        asked again continues after them.
    say:
        Told of damaged lines in that file.

    Returns
    -------
    rows
        See `simulator.capacity.rows.plan_rows`.

    Raises
    ------
    DraftsimError
        If a run fails, or the arrivals have no rate to change.
    """
    if not 0 < rate < math.inf:
        raise DraftsimError(f"rate is {rate}, expected a positive number of requests a second")
    if most < 1:
        raise DraftsimError(f"most is {most}, expected at least 1 replica")
    bench = Bench(trace, latency, policies, base, targets, rule)
    whole_file = hasattr(base.arrivals, "rows") and requests is None
    key = bench.key() if path is not None else None
    file = (
        ResultsFile(path, meta, command="capacity", key=key, say=say) if path is not None else None
    )
    # Searches ask in turn: a cluster is connected to once, not for every question.
    with file or nullcontext(), executor if isinstance(executor, Cluster) else nullcontext():
        study = Study(bench, executor, file, progress)
        asks = {name: partial(_points, name, base.replications) for name in policies}
        at_once = base.limits.max_batch
        starts = study.drive({name: stages.start(ask, at_once) for name, ask in asks.items()})
        able = {name: found for name, found in starts.items() if found.limit}
        each = max((found.requests for found in able.values()), default=stages.FEW)

        def horizon(replicas: int) -> int | None:
            return None if whole_file else requests or each * replicas

        answers = study.drive(
            {n: stages.answer(asks[n], rate, able[n].limit, most, horizon) for n in able}
        )
        rates = _rates([found.limit for found in able.values()])
        shares = study.drive({n: stages.shares(asks[n], rates, each) for n in able})
        counts = _counts([found.replicas for found in answers.values()]) if curve else []
        curves = study.drive(
            {n: stages.curve(asks[n], answers[n], rate, counts, horizon) for n in answers if curve}
        )
    return plan_rows(bench, rate, starts, answers, (rates, shares), curves)


def _points(
    policy: str,
    replications: int,
    replicas: int,
    rate: float,
    requests: int | None,
    most: int | None,
) -> list[Point]:
    count = replications if most is None else min(replications, most)
    return [Point(policy, replicas, rate, requests, i) for i in range(count)]


def _rates(limits: Sequence[float]) -> list[float]:
    """Rates per replica around those that replicas can take."""
    if not limits:
        return []
    return [float(r) for r in np.geomspace(0.3 * min(limits), 1.3 * max(limits), RATES)]


def _counts(found: Sequence[int | None]) -> list[int]:
    """Numbers of replicas to draw lines through: powers of two, beyond the most found."""
    most = max((count for count in found if count is not None), default=1)
    return [1 << i for i in range(math.ceil(math.log2(most)) + 1)]
