"""Loads in a real engine and in the simulator, compared by load and policy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from commands.common.output import note
from commands.common.progress import working
from commands.engine.loads import drawn
from commands.engine.rounds import Drawn, compare_run
from commands.engine.texts import PolicyRuns, policy_runs
from commands.engine.turns import run_loads
from policies.core import Round
from profiler.recording.checkpoint import Checkpoint, once
from simulator.noise import noise_said, with_noise
from traces.acceptance.trace import Trace

if TYPE_CHECKING:
    from profiler.engines.engine import Engine, Step
    from profiler.engines.loads import LoadRun
    from profiler.engines.measure import BetweenTable
    from simulator.serving import Run, Scenario
    from simulator.serving.arrivals import Arrivals
    from traces.latency.table import LatencyTable

MOST = 1.5
"""Times that the control load may make of a machine: beyond, it was disturbed itself."""
LEAST_ERROR = 0.03
"""Error of the service time that intervals of timed loads assume at the least."""


def compare_loads(
    engine: Engine, latency: LatencyTable, trace: Trace, chosen: Mapping[str, Any],
    loads: Mapping[str, Arrivals], requests: int, repeats: int, seed: int = 0,
    between: BetweenTable | None = None, kept: Checkpoint | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every load under every policy, in the engine (`run_loads`) and in the simulator.

    Speedups are over the first policy.  A table measured `between` the arms predicts instead of
    `latency`, whose errors are then the columns ``profile_error``, ``profile_busy_error`` and
    ``profile_speedup_error``.  What `kept` holds of an earlier call, of fewer repeats perhaps, is
    not run again.
    """
    from profiler.engines.drafts import Forced
    from profiler.engines.texts import prompts_of

    scenarios, jobs = drawn(loads, engine, trace, requests, seed)
    served = {job.sequence for own in jobs.values() for job in own}
    prompts = {i: p for i, p in prompts_of(trace, engine.vocabulary, seed).items() if i in served}
    during_runs = None if kept is None else kept.within("beside")
    texts = texts_of(engine, trace, prompts, during_runs)
    forced = Forced(trace, texts, engine.vocabulary)
    measured = run_loads(
        engine, chosen, scenarios, jobs, prompts, forced, repeats, between, kept
    )  # fmt: skip

    found = policy_runs(measured, trace, texts, engine.meta["dtype"])

    def rows_from(table: LatencyTable) -> list[dict[str, Any]]:
        return [
            row_of(found[load, text], table, trace, policy, scenario)
            for load, scenario in scenarios.items()
            for text, policy in chosen.items()
        ]

    first = next(iter(chosen))
    rows = with_speedups(rows_from(latency), first)
    return rows if between is None else with_profile_errors(
        with_speedups(rows_from(between.table()), first), rows
    )  # fmt: skip


def with_profile_errors(
    rows: list[dict[str, Any]], old: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows with the errors of `old`, which the profile's own table predicts."""
    for row, before in zip(rows, old, strict=True):
        row |= {f"profile_{key}": before[key] for key in ("error", "busy_error", "speedup_error")}
    return rows


def with_speedups(rows: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """The rows with speedups over the policy `first` at the same load, and how sure they are.

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


def texts_of(
    engine: Engine, trace: Trace, prompts: dict[int, list[int]], kept: Checkpoint | None
) -> dict[int, list[int]]:
    """The engine's own output of every prompt, by sequence; decoded, or `kept`.

    Either way the engine has run when this is done, as it is to have before a load is timed.
    """
    from profiler.engines.texts import TEXTS, own_texts

    if kept is not None and TEXTS in kept.names():
        note("some of the engine's own outputs again, to warm up")
        some = itertools.islice(prompts.items(), engine.options.max_batch)
        own_texts(engine, trace, dict(some))

    def decoded() -> dict[int, list[int]]:
        note(f"the engine's own {len(prompts)} outputs")
        with working("decoding them"):
            return own_texts(engine, trace, prompts)

    return {int(i): text for i, text in once(kept, TEXTS, decoded).items()}


def row_of(
    own_runs: PolicyRuns, latency: LatencyTable, trace: Trace, policy: Any, scenario: Scenario
) -> dict[str, Any]:
    """A load under one policy, measured and predicted.

    Where texts diverged (`commands.engine.texts`):

    * ``rounds_differ`` and ``iterations_differ`` are of what came before, ``rounds_compared`` is
      the number of rounds before, ``iterations_after`` that of iterations after;
    * mean latencies, measured and predicted, are of requests that diverged under no policy, as are
      tokens/s of a loop of one request;
    * the predicted tokens/s and seconds of other closed loops are those of the iterations that
      really ran.
    """
    from simulator.serving import simulate

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
    return {
        "rounds_differ": max(one.rounds_differ for one in each),
        "rounds_compared": min(one.rounds_compared for one in each),
        "iterations_differ": None if drawn is None else max(
            one.iterations_differ or 0 for one in each
        ),
        "iterations_after": max(one.iterations_after for one in each),
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
    """Throughput, and means and 95% quantiles of latencies, over the requests.

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
    """The measured iterations priced one by one, and the error of each kind's seconds."""
    from simulator.serving.cost.iteration import IterationCost

    cost = IterationCost(latency)
    found: dict[str, list[tuple[float, float]]] = {}
    for step in itertools.chain.from_iterable(r.steps for r in runs):
        found.setdefault(step.kind, []).append((step.seconds, priced_s(step, cost)))
    rows = []
    for kind, pairs in found.items():
        measured_s, predicted_s = (float(sum(values)) for values in zip(*pairs, strict=True))
        rows.append({
            "kind": kind, "iterations": len(pairs) // len(runs),
            "measured_s": measured_s / len(runs), "predicted_s": predicted_s / len(runs),
            "error": predicted_s / measured_s - 1,
        })  # fmt: skip
    return rows


def priced_s(step: Step, cost: Any) -> float:
    """Return the seconds that the simulator predicts for a measured iteration."""
    from simulator.serving.cost.iteration import Chunk

    slots: list[Any] = [SimpleNamespace(context=d.context) for d in step.decoded]
    rounds = [Round(0, d.drafted, d.emitted - 1, d.emitted, d.drafted, 1) for d in step.decoded]
    chunks = [
        Chunk(SimpleNamespace(prefilled=p.cached, prefill_left=p.left), p.tokens)  # type: ignore[arg-type]
        for p in step.prompts
    ]
    return float(cost(slots, rounds, chunks).total_s)


def say_kinds(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print each kind of iteration's share of the error."""
    for row in rows:
        parts = ", ".join(
            f"{k['kind']} {k['error']:+.1%} of {k['measured_s']:.2f} s" for k in row["kinds"]
        )
        note(f"{row['load']} {row['policy']}: {parts}")


def say_noise(rows: Sequence[Mapping[str, Any]]) -> None:
    """Note how much of the speedups' errors the scatter of repeats explains."""
    if (said := noise_said(rows, rows[0]["policy"])) is not None:
        note(said)
