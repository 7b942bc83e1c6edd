"""The time that an HTTP server adds to its engine, per request and per iteration.

Both are read from the same clock (`profiler.engines.notes`) in the run that was measured, so they
need no latency table and no engine without a server.  To predict, medians of a control load are put
into a table as cells of the model ``server``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from policies.arrays import half_iqr
from simulator.engines import figures_of, priced, row_of_load, with_profile_errors, with_speedups
from simulator.pricing import host_at
from simulator.serving.arrivals import Arrivals
from simulator.serving.cost import EngineCost
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from traces.acceptance.trace import Trace
from traces.errors import DraftsimError
from traces.latency.table import SERVER, LatencyTable, as_cells
from traces.store.engine_runs import PolicyRuns, ServedRun

CONTROL_OPEN = 4
"""Requests that the larger control loop keeps where loads are open."""
OF_PROMPTS = ("prefill", "mixed")
"""Phases of a table that prompts are priced with."""


def with_server(latency: LatencyTable, controls: Mapping[int, Sequence[ServedRun]]) -> LatencyTable:
    """Return `latency` with what a server adds, by the requests that closed loops of plain decoding
    kept.

    Raises DraftsimError for a table that has it already.
    """
    if latency.has(SERVER, "request"):
        raise DraftsimError(
            "these latencies hold a server's share: give those that `draftsim profile` wrote"
        )
    rows = []
    for batch, runs in controls.items():
        requests = [s for run in runs for s in run.around_request_s]
        decoding = [
            (len(step.decoded), max(seconds - known_s(latency, batch), 0.0))
            for run in runs
            for step, seconds in zip(run.load.steps, run.around_step_s, strict=True)
            if step.kind == "decode"
        ]
        fullest = max((size for size, _ in decoding), default=0)
        steps = [seconds for size, seconds in decoding if size == fullest]
        # The first `batch` are sent at once, the others after an answer.
        apart = [float(np.diff(run.queued_s[:batch]).mean()) for run in runs if batch > 1]
        told = {"request": requests, "iteration": steps or [0.0], "apart": apart or [0.0]}
        for phase, seconds in told.items():
            middle, spread = np.median(seconds), half_iqr(seconds)
            rows.append((SERVER, phase, batch, 1, 0, middle, spread, len(seconds)))
    cells = as_cells(rows)
    meta: dict[str, Any] = {"server": {"control": "plain decoding", "loops": sorted(controls)}}
    table = pd.concat([latency.cells, cells], ignore_index=True)
    return LatencyTable(table, {**latency.meta, **meta})


def added(run: ServedRun, latency: LatencyTable) -> dict[str, float]:
    """Return the time that the server added to the engine that `latency` was measured on.

    ``request_s`` around a request and ``iteration_s`` around an iteration, both in the mean;
    ``share``, of the time from sending a request to its last token, what was around it and around
    the iterations that it was part of.
    """
    requests, steps = run.load.requests, run.load.steps
    around = [
        seconds - known_s(latency, len(step.decoded) or 1)
        for step, seconds in zip(steps, run.around_step_s, strict=True)
    ]
    parts = sum(
        seconds * (len(step.decoded) + len(step.prompts))
        for step, seconds in zip(steps, around, strict=True)
    )
    whole_s = float((requests["finish_s"] - requests["arrival_s"]).sum())
    return {
        "request_s": float(np.mean(run.around_request_s)), "iteration_s": float(np.mean(around)),
        "share": (sum(run.around_request_s) + parts) / whole_s,
    }  # fmt: skip


def known_s(latency: LatencyTable, batch: int) -> float:
    """Return the seconds around an engine's step that a table measured without a server has.

    They are above all detokenization, which a server does in parallel to its engine.
    """
    by_batch: dict[int, list[float]] = {}
    for cell in latency.meta.get("host_parts", ()):
        by_batch.setdefault(int(cell["batch"]), []).append(float(cell["output_s"]))
    if not by_batch:
        return 0.0
    batches = sorted(by_batch)
    return float(np.interp(batch, batches, [np.median(by_batch[b]) for b in batches]))


def control_sizes(loads: Mapping[str, Arrivals], most: int) -> list[int]:
    """Return requests that control loops keep: the ends of what the loads do."""
    closed = [a.concurrency for a in loads.values() if a.concurrency is not None]
    opened = [1, min(CONTROL_OPEN, most)] if len(closed) < len(loads) else []
    return sorted({min([*closed, *opened]), max([*closed, *opened])})


def served_rows(
    measured: Mapping[tuple[str, str], Sequence[ServedRun]],
    own_runs: Mapping[tuple[str, str], PolicyRuns],
    controls: Mapping[int, Sequence[ServedRun]], latency: LatencyTable, trace: Trace,
    chosen: Mapping[str, Any], scenarios: Mapping[str, Scenario],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each load and policy, measured over HTTP and predicted.

    Columns ``profile_`` are errors of a prediction by `latency` without `slowed`, columns ``_bare``
    predictions of the engine alone.  Speedups are over the first policy.
    """
    served, slower = with_server(latency, controls), slowdown_of(controls, latency)
    now, first = slowed(latency, slower), next(iter(chosen))
    table = with_server(now, controls)
    rows, old = [], []
    for load, scenario in scenarios.items():
        for text, policy in chosen.items():
            found = own_runs[load, text]
            old.append(row_of_load(found, served, trace, policy, scenario))
            rows.append(
                _row(found, measured[load, text], now, table, trace, policy, scenario, slower)
            )
    return with_profile_errors(with_speedups(rows, first), with_speedups(old, first))


def _row(
    own_runs: PolicyRuns, runs: Sequence[ServedRun], latency: LatencyTable, table: LatencyTable,
    trace: Trace, policy: Any, scenario: Scenario, slower: Slowdown,
) -> dict[str, Any]:  # fmt: skip
    row = row_of_load(own_runs, table, trace, policy, scenario)
    bare = simulate(trace, latency, policy, scenario, name=own_runs.text)
    alone = figures_of(own_runs.kept(bare.requests))
    alone["throughput"] = figures_of(bare.requests)["throughput"]
    row |= {f"{key}_bare": alone[key] for key in ("throughput", "ttft_s", "tpot_s", "e2e_s")}
    each = [added(r, latency) for r in runs]
    row |= {key: float(np.mean([own[key] for own in each])) for key in each[0]}
    recorder = bare.recorder
    running = scenario.arrivals.concurrency or round(recorder.batch.integral / recorder.busy_s)
    around = host_at(table, (), running)
    return row | {
        "request_s_predicted": around.request_s,
        "iteration_s_predicted": around.iteration_s,
        "slowdown": slower.at(running) - 1,
        "share_predicted": 1 - alone["e2e_s"] / row["e2e_s_predicted"],
    }


@dataclass(frozen=True)
class Slowdown:
    """The seconds of an engine over those that its table predicts."""

    decoding: Mapping[int, float]
    """For iterations that decode, by the requests that a loop kept."""
    prompts: float
    """For those with prompts, over all loops."""

    def at(self, batch: float) -> float:
        """Return the factor for decoding `batch` requests, interpolated between the loops."""
        sizes = sorted(self.decoding)
        factors = np.log([self.decoding[size] for size in sizes])
        return float(np.exp(np.interp(batch, sizes, factors)))


def slowdown_of(controls: Mapping[int, Sequence[ServedRun]], latency: LatencyTable) -> Slowdown:
    """Return the engine's seconds in loops of plain decoding, over what `latency` has for them.

    Those that a server adds are no part of it (`with_server`).
    """
    cost = EngineCost(latency)
    decoding: dict[int, float] = {}
    of_prompts: list[tuple[float, float]] = []
    for size, runs in controls.items():
        pairs: list[tuple[float, float]] = []
        for step in itertools.chain.from_iterable(run.load.steps for run in runs):
            own_s = sum(step.parts[part] for part in ("schedule", "execute", "update"))
            pair = own_s + known_s(latency, len(step.decoded) or 1), priced(step, cost).total_s
            (of_prompts if step.prompts else pairs).append(pair)
        decoding[size] = _ratio(pairs)
    return Slowdown(decoding, _ratio(of_prompts))


def slowed(latency: LatencyTable, slower: Slowdown) -> LatencyTable:
    """Return `latency` with every cell of the engine's as much slower as its loops were."""
    cells = latency.cells.copy()
    own = cells["model"] != SERVER
    prompts = cells["phase"].isin(OF_PROMPTS)
    by_batch = {batch: slower.at(batch) for batch in cells["batch"].unique().tolist()}
    factors = cells["batch"].map(by_batch).mask(prompts, slower.prompts).where(own, 1.0)
    for column in ("median_s", "spread_s"):
        cells[column] *= factors
    meta = {**latency.meta, "scaled": "by loops of plain decoding"}
    if "control_s" in meta:
        # What a control load says of the machine is in the loops already.
        meta["control_s"] = {k: v for k, v in meta["control_s"].items() if k != "follows"}
    return LatencyTable(cells, meta)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    measured_s, priced = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1, 1)
    return measured_s / priced
