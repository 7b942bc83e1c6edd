"""Speedups over the engine that a user runs, and synthetic acceptance as a check.

A drafter can force asynchronous scheduling, graphs or prefix caching off, and the measured engine
has them off throughout.  So a speedup over that engine without speculation is not the gain over
the engine with its own defaults: both are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from traces.errors import DraftsimError

if TYPE_CHECKING:
    from profiler.engines.engine import EngineKind, EngineOptions
    from simulator.engines import Workload
    from traces.store.engine_runs import Apart

SHOWN = ("throughput_defaults", "speedup_defaults")
"""Columns that a run with the engine's defaults adds."""
SHOWN_SYNTHETIC = ("load", "policy", "throughput", "throughput_predicted", "error")


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
