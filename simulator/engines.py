"""Loads that a real engine ran, compared with the loads that the simulator serves.

Rounds and iterations must equal those of the replay or of the simulated batch.  Seconds are
compared with the predicted ones.  A request whose text diverged (`traces.store.outputs.Divergence`)
is compared up to there.  What depends on it later is not compared either: the iterations of its
load, and the rounds of policies that decide for a batch or remember other requests.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from policies.core import DraftPolicy, Round
from policies.lengths.basic import Fixed
from simulator.serving.arrivals import Arrivals
from simulator.serving.cost import Chunk, EngineCost, Seconds
from simulator.serving.outcome.report import Run
from simulator.serving.outcome.timeline import Timeline
from simulator.serving.run import simulate
from simulator.serving.scenario import Scenario
from simulator.serving.scheduler import Limits
from simulator.serving.sequence import clock_free
from simulator.validation import with_noise
from traces.acceptance.trace import Trace
from traces.latency.table import LatencyTable
from traces.replay.rounds import before
from traces.replay.run import replay
from traces.sources.as_draft import drafted_trace
from traces.sources.starts.parallel import Eagle, drawn_starts
from traces.store.engine_runs import (
    Apart,
    Demand,
    EngineStep,
    LoadRun,
    PlannedRequest,
    PolicyRuns,
    index_of,
)
from traces.store.identity import engine_head

SYNTHETIC = "synthetic"
MOST = 1.5
"""Times that the control load may make of a machine: beyond, it was disturbed itself."""
LEAST_ERROR = 0.03
"""Error of the service time that intervals of timed loads assume at the least."""


@dataclass(frozen=True)
class Workload:
    """Loads that an engine and the simulator both serve.

    Parameters
    ----------
    trace:
        Recording that decides what is accepted; requests are its prompts.
    policies:
        Policies by text; speedups are over the first.
    loads:
        By name.
    requests, repeats:
        Requests of a load; runs of each in the engine.
    """

    trace: Trace
    policies: Mapping[str, Any]
    loads: Mapping[str, Arrivals]
    requests: int
    repeats: int = 1
    seed: int = 0

    @cached_property
    def demands(self) -> dict[str, Demand]:
        """The requests of each load, which `simulate` draws in its first run."""
        seed = np.random.SeedSequence([self.seed, 0])
        return {
            load: Demand(
                [
                    PlannedRequest(job.sequence, job.arrival_s, job.output_tokens)
                    for job in arrivals.jobs(self.trace, np.random.default_rng(seed), self.requests)
                ],
                arrivals.concurrency,
            )
            for load, arrivals in self.loads.items()
        }

    @property
    def sequences(self) -> set[int]:
        """The recorded sequences that are served."""
        return {job.sequence for demand in self.demands.values() for job in demand.jobs}

    def scenarios(self, limits: Limits, own_drafter: bool) -> dict[str, Scenario]:
        """Return the simulated loads, within the limits of the engine that takes them."""
        return {
            load: Scenario(
                arrivals, limits, self.requests, warmup=0.0, seed=self.seed,
                drafter_loaded=own_drafter,
            )
            for load, arrivals in self.loads.items()
        }  # fmt: skip


def with_profile_errors(
    rows: list[dict[str, Any]], old: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows with the errors of `old`, which the profile's own table predicts."""
    for row, own in zip(rows, old, strict=True):
        row |= {f"profile_{key}": own[key] for key in ("error", "busy_error", "speedup_error")}
    return rows


def with_speedups(rows: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Return the rows with speedups over the policy `first` at the same load, and how sure they
    are.

    Errors with the prefix ``paced_`` are those of predictions for a machine as slow as the control
    load was during either run (`slower_by`).
    """
    off = {row["load"]: row for row in rows if row["policy"] == first}
    for row in rows:
        for key in ("throughput", "throughput_predicted"):
            row[key.replace("throughput", "speedup")] = row[key] / off[row["load"]][key]
        row["speedup_error"] = row["speedup_predicted"] / row["speedup"] - 1
        own, other = row["paced_error"], off[row["load"]]["paced_error"]
        row["paced_speedup_error"] = None if own is None else (1 + own) / (1 + other) - 1
    return with_noise(rows, first)


def row_of_load(
    own_runs: PolicyRuns, latency: LatencyTable, trace: Trace, policy: Any, scenario: Scenario
) -> dict[str, Any]:
    """Return a load under one policy, measured and predicted.

    Where texts diverged (`PolicyRuns`):

    * ``rounds_differ`` and ``iterations_differ`` are of what came before, ``rounds_compared`` is
      the number of rounds before, ``iterations_after`` that of iterations after;
    * mean latencies, measured and predicted, are of requests that diverged under no policy, as are
      tokens/s of a loop of one request;
    * the predicted tokens/s and seconds of other closed loops are those of the iterations that
      really ran.
    """
    timed = scenario.arrivals.rate is not None
    drawn = Drawn() if scenario.arrivals.concurrency is not None else None
    predicted = simulate(trace, latency, policy, scenario, name=own_runs.text, timeline=drawn)
    row = {
        "load": own_runs.load, "policy": own_runs.text,
        **_compared(own_runs, predicted, latency, scenario),
        **_rounds_compared(own_runs, predicted, drawn, trace, policy), **own_runs.columns,
    }  # fmt: skip
    if timed:
        # Queueing magnifies an error of the service time, so latencies get an interval.  Its ends
        # are ratios: a prediction may be more than twice what was measured.
        off = 1 + row["busy_error"]
        times = max(off, 1 / off, 1 + LEAST_ERROR)
        found = [figures_of(own_runs.kept(predicted.requests))]
        for factor in (1 / times, times):
            table = latency.scaled({"target": factor, "draft": factor}, "service-time error")
            other = simulate(trace, table, policy, scenario)
            found.append(figures_of(own_runs.kept(other.requests)))
        for key in ("ttft_s", "tpot_s"):
            # A faster engine may meet its arrivals in fuller batches: the ends are no bounds alone.
            values = [figures[key] for figures in found]
            row |= {f"{key}_predicted_lo": min(values), f"{key}_predicted_hi": max(values)}
    return row


def _rounds_compared(
    own_runs: PolicyRuns, predicted: Run, drawn: Drawn | None, trace: Trace, policy: Any
) -> dict[str, int | None]:
    """Return the differences of the run that differs most, and how much was compared."""
    each = [
        compare_run(
            run, {name: one.position for name, one in diverged.items()}, predicted, drawn, trace,
            policy,
        )
        for run, diverged in zip(own_runs.runs, own_runs.diverged, strict=True)
    ]  # fmt: skip
    differ, compared, iterations, after = zip(*each, strict=True)
    return {
        "rounds_differ": max(differ), "rounds_compared": min(compared),
        "iterations_differ": None if drawn is None else max(iterations),
        "iterations_after": max(after),
    }  # fmt: skip


def _compared(
    own_runs: PolicyRuns, predicted: Run, latency: LatencyTable, scenario: Scenario
) -> dict[str, Any]:
    runs, timed = own_runs.runs, scenario.arrivals.rate is not None
    some_left_out = 0 < len(own_runs.left_out) < len(predicted.requests)
    one_by_one = scenario.arrivals.concurrency == 1 and some_left_out

    def figures(requests: Any) -> dict[str, float]:
        own = figures_of(own_runs.kept(requests), one_by_one)
        # A request cannot be taken out of tokens/s of requests that ran together.
        return own if one_by_one else own | {"throughput": figures_of(requests)["throughput"]}

    expected, each = figures(predicted.requests), [figures(r.requests) for r in runs]
    busy_s, busy_predicted_s = float(np.mean([r.busy_s for r in runs])), predicted.recorder.busy_s
    by_kind = kinds(runs, latency)
    if own_runs.texts_diverged and not timed:
        # A text that diverged takes other iterations than it was predicted to take.
        ran_s = sum(kind["predicted_s"] for kind in by_kind)
        if not one_by_one:
            expected["throughput"] *= busy_predicted_s / ran_s
        busy_predicted_s = ran_s
    row: dict[str, Any] = {
        "iterations": int(np.median([len(r.steps) for r in runs])),
        "iterations_predicted": predicted.recorder.iterations,
    }
    for key, value in expected.items():
        row[key] = float(np.mean([e[key] for e in each]))
        row[f"{key}_predicted"] = value
    rates = [e["throughput"] for e in each]
    error = row["throughput_predicted"] / row["throughput"] - 1
    slower = slower_by([r.control_s for r in runs], latency.meta["control_s"])
    return {
        **row, "error": error, "slower": slower,
        # In a loop without arrivals everything waits for the engine.
        "paced_error": None if slower is None or timed else (1 + error) / slower - 1,
        "spread": (max(rates) - min(rates)) / 2 / row["throughput"], "throughputs": rates,
        "busy_s": busy_s, "busy_s_predicted": busy_predicted_s,
        "busy_error": busy_predicted_s / busy_s - 1,
        "kinds": by_kind,
        # How much slower the control load ran than when the engine was measured.
        "machine": float(np.median([r.control_s for r in runs]))
        / latency.meta["control_s"]["usual"],
        "repeats": len(runs),
    }  # fmt: skip


def slower_by(controls_s: Sequence[float], told: Mapping[str, float]) -> float | None:
    """Return the engine's slowdown since it was measured, by the control load.

    By the power with which it followed the control load there (`profiler.engines.measure.follows`);
    None where the table does not know.
    """
    if "follows" not in told:
        return None
    ratio = float(np.median(controls_s)) / told["counted"]
    return float(np.clip(ratio, 1 / MOST, MOST) ** told["follows"])


def figures_of(requests: Any, one_by_one: bool = False) -> dict[str, float]:
    """Return the throughput, and means and 95% quantiles of latencies, over the requests.

    ``one_by_one``: each was sent when the one before had ended, so the throughput is over the
    requests' own time.
    """
    span = requests["finish_s"].max() - requests["arrival_s"].min()
    if one_by_one:
        span = (requests["finish_s"] - requests["arrival_s"]).sum()
    later = requests[requests["tokens"] > 1]
    each = {
        "ttft_s": requests["first_s"] - requests["arrival_s"],
        "tpot_s": (later["finish_s"] - later["first_s"]) / (later["tokens"] - 1),
        "e2e_s": requests["finish_s"] - requests["arrival_s"],
    }
    figures = {"throughput": float(requests["tokens"].sum() / span)}
    for key, values in each.items():
        figures |= {key: float(values.mean()), f"{key}_p95": float(values.quantile(0.95))}
    return figures


def kinds(runs: Sequence[LoadRun], latency: LatencyTable) -> list[dict[str, Any]]:
    """Return the measured iterations priced one by one, and the error of each kind's seconds.

    Where the time of an engine's own drafter is known, its passes are a kind of their own: an
    iteration makes the drafts of the next one, which the simulator charges for them.
    """
    cost = EngineCost(latency)
    steps = list(itertools.chain.from_iterable(r.steps for r in runs))
    own_drafter = bool(latency.meta.get("engine", {}).get("own_drafter"))
    apart = own_drafter and any(step.parts.get("propose") for step in steps)
    found: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        price = priced(step, cost)
        measured_s, predicted_s = step.seconds, price.total_s
        if apart:
            drafts_s = step.parts["propose"]
            found.setdefault("drafts", []).append((drafts_s, price.draft_s))
            measured_s, predicted_s = measured_s - drafts_s, predicted_s - price.draft_s
        found.setdefault(step.kind, []).append((measured_s, predicted_s))
    rows = []
    for kind, pairs in found.items():
        measured_s, predicted_s = (float(sum(values)) for values in zip(*pairs, strict=True))
        rows.append({
            "kind": kind, "iterations": len(pairs) // len(runs),
            "measured_s": measured_s / len(runs), "predicted_s": predicted_s / len(runs),
            "error": predicted_s / measured_s - 1,
        })  # fmt: skip
    return rows


def priced(step: EngineStep, cost: EngineCost) -> Seconds:
    """Return the seconds that the simulator predicts for a measured iteration."""
    slots: list[Any] = [SimpleNamespace(context=d.context) for d in step.decoded]
    rounds = [Round(0, d.drafted, d.emitted - 1, d.emitted, d.drafted, 1) for d in step.decoded]
    chunks = [
        Chunk(SimpleNamespace(prefilled=p.cached, prefill_left=p.left), p.tokens)  # type: ignore[arg-type]
        for p in step.prompts
    ]
    return cost(slots, rounds, chunks)


class Drawn(Timeline):
    """Keeps the rounds and iterations of a simulation instead of drawing them."""

    def __init__(self) -> None:
        super().__init__(os.devnull)
        self.rounds: dict[int, list[Round]] = {}
        """By the request's place in the load."""
        self.iterations: list[tuple[set[tuple[int, int]], set[tuple[int, int]]]] = []
        """Requests that decode with their drafted tokens; others with their prompt tokens
        processed."""

    def tokens(self, start_s: float, seconds: float, accepted: int, wasted: int) -> None:
        """Begin to draw an iteration."""
        self.iterations.append((set(), set()))

    def round(
        self, index: int, start_s: float, seconds: float, outcome: Round, wasted: int
    ) -> None:
        """Draw a request that decoded in this iteration."""
        self.rounds.setdefault(index, []).append(outcome)
        self.iterations[-1][0].add((index, outcome.drafted))

    def request(self, index: int, start_s: float, seconds: float, label: str, **args: Any) -> None:
        """Draw a request whose prompt was processed in this iteration, or that waited."""
        if label == "prefill":
            self.iterations[-1][1].add((index, args["tokens"]))


def compare_run(
    run: LoadRun, diverged: Mapping[str, int], predicted: Run, drawn: Drawn | None, trace: Trace,
    policy: Any,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return how a run differs from its prediction.

    These are the rounds that differ; the predicted rounds that a real one was held to; the
    iterations that differ up to the first divergence (0 under timed arrivals, where the clock
    decides); and those after it, where nothing is compared.

    ``diverged``: by request, the position at which its text diverged; ``drawn``: of the prediction,
    where the clock decides nothing (closed loops).

    The rounds of a policy that sees one request are the replay's (`clock_free`).  Any other policy
    decides by the requests that run together: in closed loops its rounds are those of the
    simulation.  Under timed arrivals only their number is predicted, and only if no text diverged.
    """
    alone = isinstance(policy, DraftPolicy) and clock_free(policy, None)
    first = first_divergence(run, diverged)
    names = _decoded(run)
    if alone:
        replayed = replay(trace, policy)
        expected: dict[str, Sequence[Round]] = {
            n: replayed.of_request(int(n.partition("/")[0])) for n in names
        }
    elif drawn is not None:
        expected = {n: drawn.rounds.get(index_of(n), []) for n in names}
    else:
        differ, compared = (0, 0) if diverged else _counts(run, predicted)
        return differ, compared, 0, 0
    found = {n: run.rounds.get(n, ()) for n in names}
    if first is not None and not alone:
        until = Counter(
            d.name for step in run.steps[: first + 1] for d in step.decoded if d.emitted
        )
        found, expected = ({n: r[n][: until[n]] for n in names} for r in (found, expected))
    cut = [
        tuple(before(r[n], diverged[n]) if n in diverged else r[n] for r in (found, expected))
        for n in names
    ]
    # Where drafts come from the target itself, the engine's records count the catching up of
    # another drafter.
    fields = len(Round._fields) - trace.takes_verified
    pairs = [pair for real, told in cut for pair in itertools.zip_longest(real, told)]
    return (
        sum((a and a[:fields]) != (b and b[:fields]) for a, b in pairs),
        sum(len(told) for _, told in cut),
        0 if drawn is None else _iterations_differ(run, drawn, first),
        0 if first is None else len(run.steps) - 1 - first,
    )


def first_divergence(run: LoadRun, diverged: Mapping[str, int]) -> int | None:
    """Return the iteration in which a text first diverged; None if none did.

    ``diverged`` holds the position by request.
    """
    emitted = Counter[str]()
    for number, step in enumerate(run.steps):
        # A prompt that is processed to its end emits a token.
        emitted.update(p.name for p in step.prompts if p.tokens >= p.left)
        emitted.update({d.name: d.emitted for d in step.decoded})
        if any(emitted[name] > position for name, position in diverged.items()):
            return number
    return None


def simulated_rounds(
    trace: Trace, latency: LatencyTable, policy: Any, scenario: Scenario
) -> dict[int, list[Round]]:
    """Return the rounds of every request that the simulator serves, by its place in the load."""
    drawn = Drawn()
    simulate(trace, latency, policy, scenario, timeline=drawn)
    return drawn.rounds


def batches_decoded(latency: LatencyTable, work: Workload) -> list[Counter[int]]:
    """Return by load how many simulated steps of all its policies decode each batch."""
    own_drafter = bool(latency.meta["engine"].get("own_drafter"))
    loads = []
    for scenario in work.scenarios(Limits.of_engine(latency), own_drafter).values():
        steps = Counter[int]()
        for policy in work.policies.values():
            drawn = Drawn()
            simulate(work.trace, latency, policy, scenario, timeline=drawn)
            steps.update(len(decoded) for decoded, _ in drawn.iterations if decoded)
        loads.append(steps)
    return loads


def _counts(run: LoadRun, predicted: Run) -> tuple[int, int]:
    """Return how much the numbers of rounds differ in all, and how many are predicted."""
    requests = predicted.requests
    numbers = dict(zip(requests["index"], requests["rounds"], strict=True))
    told = {name: int(numbers[index_of(name)]) for name in run.rounds}
    return sum(abs(len(run.rounds[n]) - count) for n, count in told.items()), sum(told.values())


def _iterations_differ(run: LoadRun, drawn: Drawn, first: int | None) -> int:
    """Return how many iterations up to the `first` divergence ran something else."""
    real = [
        (
            {(index_of(d.name), d.drafted) for d in step.decoded},
            {(index_of(p.name), p.tokens) for p in step.prompts},
        )
        for step in run.steps
    ]
    told = drawn.iterations
    if first is not None:
        real, told = real[: first + 1], told[: first + 1]
    return sum(a != b for a, b in itertools.zip_longest(real, told))


def _decoded(run: LoadRun) -> list[str]:
    """Return the names of the requests that have rounds: whose prompt does not end them."""
    requests = run.requests
    return list(requests["name"][requests["tokens"] > 1])


def with_defaults(rows: Sequence[Mapping[str, Any]], apart: Apart) -> list[dict[str, Any]]:
    """Return `rows` with the throughput of the engine's defaults, and the speedup over it."""
    plain = {load: speed.tokens_per_s for load, speed in apart.speeds.items()}
    return [
        {
            **row, "throughput_defaults": plain[row["load"]],
            "speedup_defaults": row["throughput"] / plain[row["load"]],
        }
        for row in rows
    ]  # fmt: skip


def synthetic_rows(
    latency: LatencyTable, work: Workload, apart: Apart, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each load: an engine under synthetic acceptance, measured and predicted.

    The prediction replays drafts drawn with the same acceptance by position
    (`traces.sources.starts.parallel.drawn_starts`) at the costs of the engine's drafter.
    """
    drafted, rows = drawn_trace(work.trace, latency, rates), []
    for load, scenario in work.scenarios(Limits.of_engine(latency), True).items():
        predicted = simulate(drafted, latency, Fixed(len(rates)), scenario).requests
        speed = apart.speeds[load].tokens_per_s
        expected = figures_of(predicted)["throughput"]
        rows.append({
            "load": load, "policy": f"{SYNTHETIC} K={len(rates)}", "throughput": speed,
            "throughput_predicted": expected, "error": expected / speed - 1,
        })  # fmt: skip
    return rows


def drawn_trace(trace: Trace, latency: LatencyTable, rates: Sequence[float]) -> Trace:
    """Return the outputs of `trace` with drafts drawn by acceptance, for the table's own drafter.

    Raises DraftsimError if the table is of an engine without a drafter of its own.
    """
    head = engine_head(latency.meta)
    drawn = drawn_starts(trace, rates)
    source = Eagle(head or "draft")
    meta = {**drawn.meta, "kind": "eagle3", "modules": 1, "model": head or "draft"}
    recordings = {source.key: replace(drawn, meta=meta)}
    drafted = drafted_trace(trace, source, recordings)
    return replace(drafted, meta={**drafted.meta, "drafter": "draft"})
