"""Runs of an engine with its own defaults, synthetic acceptance, or what `tune` found.

A drafter can force asynchronous scheduling, graphs or prefix caching off, and the measured engine
has them off throughout.  So a speedup over that engine without speculation is not the gain over
the engine with its own defaults: both are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.engine.check import compare_loads, engine_options
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.engine import Engine, EngineKind, EngineOptions
    from simulator.engines import Workload
    from simulator.tune.settings import Tuned
    from traces.acceptance.trace import Trace
    from traces.latency.table import LatencyTable
    from traces.store.engine_runs import Apart

SHOWN = ("throughput_defaults", "speedup_defaults")
"""Columns that a run with the engine's defaults adds."""
SHOWN_SYNTHETIC = ("load", "policy", "throughput", "throughput_predicted", "error")
"""Columns that are printed of a run with synthetic acceptance."""
ENGINE = "vllm"
"""The engine whose settings are tried."""
TUNED = "tuned"
"""Name of the found setting in the column ``policy``."""
TRIED = (
    "load", "policy", "iterations", "iterations_predicted", "rounds_differ", "texts_diverged",
    "throughput", "throughput_predicted", "gain", "gain_predicted", "gain_error", "gain_noise",
    "machine",
)  # fmt: skip
"""Columns of `tried` that are printed."""


def run_apart(
    kind: EngineKind, options: EngineOptions, work: Workload,
    synthetic: Sequence[float] | None = None,
) -> Apart:  # fmt: skip
    """Run the loads in an engine apart (`profiler.engines.engine.EngineKind.run_apart`)."""
    from profiler.engines.texts import prompts_of

    prompts = prompts_of(work.trace, options.vocabulary, work.seed, work.sequences)
    return kind.run_apart(options, work.demands, prompts, work.repeats, synthetic)


def say_defaults(rows: Sequence[Mapping[str, Any]], apart: Apart, gain: str = "speedup") -> None:
    """Say both speedups of the fastest policy of every load, and what the defaults are."""
    on = [name for name, value in apart.settings.items() if value]
    note(f"the engine's defaults: no speculation, {', '.join(on) or 'none of the three'} on")
    for load in dict.fromkeys(row["load"] for row in rows):
        best = max((r for r in rows if r["load"] == load), key=lambda r: float(r["throughput"]))
        note(
            f"{load}: {best['policy']} has {best[gain]:.2f}x over the same engine with drafts off "
            f"(whose drafter still runs), {best['speedup_defaults']:.2f}x over the engine with its "
            "defaults and no drafter"
        )


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


def check_trial(latency: LatencyTable) -> int:
    """Return the longest draft of the engine that `latency` was measured on, which can be tried
    here.

    Raises DraftsimError before anything is searched where it cannot.
    """
    from profiler.engines.engine import find_engine

    if latency.meta.get("kind") != "engine" or "scaled" in latency.meta:
        raise DraftsimError(
            "--try starts the engine that the latencies were measured on: give --latency RUN of "
            "`draftsim profile engine`, and no --gpu"
        )
    find_engine(ENGINE).check_installed()
    return int(latency.meta["engine"]["longest"])


def try_settings(
    latency: LatencyTable, trace: Trace, tuned: Tuned, requests: int, repeats: int, seed: int,
    defaults: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return rows of `tried` in a vLLM started as it was when its latencies were measured.

    With `defaults` the loads are also served by one with its own settings (`run_apart`).
    """
    from profiler.engines.engine import find_engine
    from simulator.engines import Workload, with_defaults
    from simulator.serving import ClosedLoop

    kind = find_engine(ENGINE)
    options = engine_options(latency, trace, kind)
    if large := [row["batch"] for row in tuned.rows if row["batch"] > options.max_batch]:
        raise DraftsimError(
            f"--batch {max(large)} is more than the {options.max_batch} requests the engine runs"
        )
    batches = sorted({row["batch"] for row in tuned.rows})
    loads = {f"closed:{batch}": ClosedLoop(batch) for batch in batches}
    work = Workload(trace, {}, loads, requests, repeats, seed)
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = run_apart(kind, options, work) if defaults else None
    rows = tried(kind.start(options), latency, tuned, work)
    if plain is None:
        return rows
    rows = with_defaults(rows, plain)
    say_defaults(rows, plain, "gain")
    return rows


def tried(
    engine: Engine, latency: LatencyTable, tuned: Tuned, work: Workload
) -> list[dict[str, Any]]:
    """Return closed loops at every batch searched: no speculation, K = 1, 3 and 5, and what was
    found.

    Drafts are the recording's, forced upon the engine, so that acceptance is the recorded one; they
    cost the passes of the drafter that the engine was measured with, if any.  ``gain`` is the
    throughput over that of no speculation, measured and predicted, ``gain_error`` the error of the
    prediction, ``gain_noise`` the part of it that the repeats' scatter explains
    (`simulator.validation`).
    """
    from simulator.tune.costs import longest_draft
    from simulator.tune.served import rivals

    longest = engine.options.longest
    arms: dict[str, Any] = rivals(min(longest, longest_draft(work.trace) or longest))
    if tuned.document is not None:
        arms[TUNED] = tuned.policy
    rows = compare_loads(engine, latency, replace(work, policies=arms))
    for row in rows:
        for key in [name for name in row if "speedup" in name]:
            row[key.replace("speedup", "gain")] = row.pop(key)
    if not getattr(engine, "knows_batch_tables", True):
        note(
            "this vLLM does not read num_speculative_tokens_per_batch_size: draftsim's proposer "
            "follows the table, and vLLM's own drafter cannot"
        )
    return rows


def say_tried(rows: Sequence[Mapping[str, Any]], tuned: Tuned, latency: LatencyTable) -> None:
    """Print whether the found setting is the best at each load, what was not tried, and how to
    launch.
    """
    from simulator.tune.launch import launch_line
    from simulator.tune.served import NO_SPECULATION

    for load in dict.fromkeys(row["load"] for row in rows):
        at = {row["policy"]: row["gain"] for row in rows if row["load"] == load}
        own = at.pop(TUNED, at[NO_SPECULATION])
        best = max(at, key=lambda name: at[name])
        note(
            f"{load}: the setting has {own:.2f}x; the best alternative is {best} with "
            f"{at[best]:.2f}x"
        )
    if not latency.meta["engine"].get("own_drafter"):
        note(
            "the recorded drafts came from a proposer, so neither the engine nor these latencies "
            "include a drafter's passes: to include them, profile with --draft or --eagle"
        )
    line = launch_line(ENGINE, tuned.document, target=latency.meta["target"])
    if tuned.document is not None:
        line += f" --max-num-seqs {latency.meta['engine']['max_batch']}"
    note(f"launch: {line}", whole=True)
