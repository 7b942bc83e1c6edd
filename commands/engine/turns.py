"""Loads in a real engine: the arms of a load side by side, with cells of its table in between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.engine.loads import Group, groups
from profiler.recording.checkpoint import Checkpoint, once

if TYPE_CHECKING:
    from profiler.engines.drafts import Forced
    from profiler.engines.engine import Engine
    from profiler.engines.loads import Job, LoadRun
    from profiler.engines.measure import BetweenTable
    from simulator.serving import Scenario

SWEEPS = 4
"""Sweeps over the table's cells between the arms, at least; as many as repeats otherwise."""


def run_loads(
    engine: Engine, chosen: Mapping[str, Any], scenarios: Mapping[str, Scenario],
    jobs: Mapping[str, Sequence[Job]], prompts: Mapping[int, Sequence[int]], forced: Forced,
    repeats: int, between: BetweenTable | None = None, kept: Checkpoint | None = None,
) -> dict[tuple[str, str], list[LoadRun]]:  # fmt: skip
    """Runs by load and policy, of every repeat.

    The arms of a load take turns of a second, where the engine's cache has room for all of them,
    and the cells `between` theirs; else arms run one after the other.  What `kept` holds of an
    earlier call, of fewer repeats perhaps, is not run again.
    """
    from profiler.engines.bench import Control
    from profiler.engines.loads import Load, LoadRun, interleave
    from profiler.engines.setup import Setup

    control = Control(engine.meta["device"])
    beside = None if kept is None else kept.within("beside")
    # The table is of the runs' own time where every repeat has as many sweeps beside it: repeats
    # added hours later, when the machine is perhaps another, get as many as the first ones had.
    # Blocks are kept by their place in this order, as runs are, so that a call for fewer repeats
    # takes none that belong to others.  Only the blocks beside a group that a stopped check did
    # not finish are measured at another time than it, when the check goes on.
    sweeps, of = once(beside, "sweeps", lambda: [max(repeats, SWEEPS), repeats])
    measured: dict[tuple[str, str], list[LoadRun]] = {}

    def measure_cells(done: float) -> None:
        if between is not None:
            between.advance(sweeps * done / (of * len(scenarios)))

    for done, group in enumerate(groups(list(scenarios), list(chosen), repeats)):

        def run(group: Group = group, done: int = done) -> dict[str, Any]:
            note(f"{group.load}, repeat {group.repeat + 1}: {', '.join(group.arms)}")
            with room_for(engine, scenarios[group.load], jobs[group.load], prompts, len(chosen),
                          between) as tenants:  # fmt: skip
                loads = {
                    text: Load(
                        engine, Setup(chosen[text], forced), jobs[group.load], prompts,
                        scenarios[group.load].arrivals.concurrency, control, tenant,
                    )
                    for text, tenant in zip(group.arms, tenants, strict=True)
                }  # fmt: skip
                if None not in tenants:
                    interleave([*loads.values()], lambda share: measure_cells(done + share))
                for i, load in enumerate(loads.values()):
                    load.go_on()
                    measure_cells(done + (i + 1) / len(loads))
            return {text: load.result().written() for text, load in loads.items()}

        for text, found in once(kept, group.name, run).items():
            measured.setdefault((group.load, text), []).append(LoadRun.read(found))
        measure_cells(done + 1)
    return measured


@contextmanager
def room_for(
    engine: Engine, scenario: Scenario, jobs: Sequence[Job], prompts: Mapping[int, Sequence[int]],
    arms: int, between: BetweenTable | None,
) -> Iterator[Sequence[Any]]:  # fmt: skip
    """A tenant of the engine for every arm, or as many None where its cache has not the room.

    Each has all the blocks that its requests can come to need, and the engine those of the cells
    measured `between`.
    """
    options = engine.options
    running = min(scenario.arrivals.concurrency or options.max_batch, len(jobs))
    lengths = sorted(len(prompts[job.sequence]) + job.tokens for job in jobs)[-running:]
    each = sum(math.ceil((n + options.longest + 1) / engine.block_size) + 1 for n in lengths)
    grid = None if between is None else between.grid
    cells = 0 if grid is None else (
        max(grid.batches) * options.max_model_len + max(n * t for n, t in grid.prompts)
    )  # fmt: skip
    needed = (arms * each + 1) * engine.block_size + cells
    if arms > 1 and needed <= engine.blocks * engine.block_size:
        with engine.tenants(arms, each) as tenants:
            yield tenants
        return
    if arms > 1:
        note(
            f"arms run one after the other: side by side they need a cache of {needed} tokens, "
            f"the engine's has {engine.blocks * engine.block_size} (VLLM_CPU_KVCACHE_SPACE, "
            "gpu_memory_utilization)"
        )
    yield [None] * arms
