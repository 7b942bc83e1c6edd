"""Speedups over the engine that a user runs, and vLLM's synthetic acceptance as a check.

A drafter can force asynchronous scheduling, graphs or prefix caching off, and the measured engine
has them off throughout.  So a speedup over that engine without speculation is not the gain over
the engine with its own defaults: both are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.engine.loads import generator_of
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.apart import Apart
    from profiler.engines.start import EngineOptions
    from simulator.serving.arrivals import Arrivals
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable

SHOWN = ("throughput_defaults", "speedup_defaults")
"""Columns that a run with the engine's defaults adds."""
SHOWN_SYNTHETIC = ("load", "policy", "throughput", "throughput_predicted", "error")
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Loads:
    """The input of a separate engine: loads over the requests of a trace."""

    options: EngineOptions
    trace: Trace
    arrivals: Mapping[str, Arrivals]
    requests: int
    repeats: int
    seed: int

    def run(self, synthetic: Sequence[float] | None = None) -> Apart:
        """Run the loads in an engine apart (`profiler.engines.apart.arguments`)."""
        from profiler.engines.apart import arguments, run_apart
        from profiler.engines.loads import Job
        from profiler.engines.texts import prompts_of

        given = arguments(self.options, synthetic)
        jobs = {
            load: [
                Job(job.sequence, job.arrival_s, job.output_tokens)
                for job in own.jobs(self.trace, generator_of(self.seed), self.requests)
            ]
            for load, own in self.arrivals.items()
        }
        served = {job.sequence for own in jobs.values() for job in own}
        made = prompts_of(self.trace, vocabulary_of(self.options), self.seed)
        return run_apart(
            given, jobs, {load: own.concurrency for load, own in self.arrivals.items()},
            {i: ids for i, ids in made.items() if i in served}, self.repeats,
            self.options.threads,
        )  # fmt: skip


def vocabulary_of(options: EngineOptions) -> int:
    """Return the tokens of the target, from its ``config.json``; DraftsimError without one."""
    from pathlib import Path

    from profiler.recording.run import model_path
    from traces.store.text import read_object

    path = Path(model_path(options.target, "target")) / "config.json"
    config = read_object(path, "name the target's folder")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int):
        raise DraftsimError(f"{path}: says no vocab_size: name the target's folder")
    return size


def with_defaults(rows: Sequence[Mapping[str, Any]], apart: Apart) -> list[dict[str, Any]]:
    """Return `rows` with the throughput of the engine's defaults, and the speedup over it."""
    found = []
    for row in rows:
        plain = apart.speeds[row["load"]].tokens_per_s
        speedup = row["throughput"] / plain
        found.append({**row, "throughput_defaults": plain, "speedup_defaults": speedup})
    return found


def say_defaults(rows: Sequence[Mapping[str, Any]], apart: Apart, gain: str = "speedup") -> None:
    """Say both speedups of the fastest policy of every load, and what the defaults are."""
    on = [name for name, value in apart.settings.items() if value]
    note(f"the engine's defaults: {', '.join(on) or 'none of the three'} on, no speculation")
    for load in dict.fromkeys(row["load"] for row in rows):
        best = max((r for r in rows if r["load"] == load), key=lambda r: float(r["throughput"]))
        note(
            f"{load}: {best['policy']} is at {best[gain]:.2f}x the same engine with drafts off "
            f"(a drafter of its own still runs), {best['speedup_defaults']:.2f}x the engine with "
            "its defaults and no drafter"
        )


def synthetic_rows(
    latency: LatencyTable, loads: Loads, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a row for each load: vLLM under synthetic acceptance, measured and predicted.

    The prediction replays drafts drawn with the same acceptance by position
    (`traces.sources.starts.parallel.drawn_starts`) at the costs of the engine's drafter.
    """
    from policies.lengths.basic import Fixed
    from simulator.serving import Limits, Scenario, simulate

    drafted = drawn_trace(loads.trace, latency, rates)
    apart = loads.run(rates)
    rows = []
    for load, arrivals in loads.arrivals.items():
        scenario = Scenario(
            arrivals, Limits.of_engine(latency, None, None, None), loads.requests, warmup=0.0,
            seed=loads.seed, drafter_loaded=True,
        )  # fmt: skip
        predicted = simulate(drafted, latency, Fixed(len(rates)), scenario).row()
        speed = apart.speeds[load].tokens_per_s
        expected = float(predicted["throughput_tok_s"])
        rows.append({
            "load": load, "policy": f"{SYNTHETIC} K={len(rates)}", "throughput": speed,
            "throughput_predicted": expected, "error": expected / speed - 1,
        })  # fmt: skip
    return rows


def drawn_trace(trace: Trace, latency: LatencyTable, rates: Sequence[float]) -> Trace:
    """Return the outputs of `trace` with drafts drawn by acceptance, for the table's own drafter.

    Raises DraftsimError if the table is of an engine without a drafter of its own.
    """
    from dataclasses import replace

    from traces.sources.base import Recordings
    from traces.sources.starts.as_draft import drafted_trace
    from traces.sources.starts.features import Eagle
    from traces.sources.starts.parallel import drawn_starts
    from traces.store.identity import engine_head

    head = engine_head(latency.meta)
    drawn = drawn_starts(trace, rates)
    source = Eagle(head or "draft")
    meta = {**drawn.meta, "kind": "eagle3", "modules": 1, "model": head or "draft"}
    recordings = Recordings(starts={source.key: replace(drawn, meta=meta)})
    drafted = drafted_trace(trace, source, recordings)
    return replace(drafted, meta={**drafted.meta, "drafter": "draft"})


def chances(text: str) -> list[float]:
    """Return the acceptance by position that ``--synthetic`` names; DraftsimError if impossible."""
    from traces.sources.registry import parse_source
    from traces.sources.starts.parallel import Parallel

    try:
        source = parse_source(f"parallel:acceptance=[{text}]")
    except ValueError as error:
        raise DraftsimError(f"--synthetic {text}: {error}") from None
    assert isinstance(source, Parallel)
    assert source.acceptance is not None
    return list(source.acceptance)
