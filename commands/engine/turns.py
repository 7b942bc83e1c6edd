"""Loads in a real engine: all of them side by side, with cells of their table in between."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.engine.loads import Turn, in_turn
from profiler.recording.checkpoint import Checkpoint, once

if TYPE_CHECKING:
    from profiler.engines.drafts import Forced
    from profiler.engines.engine import Engine
    from profiler.engines.loads import Job, LoadRun
    from profiler.engines.measure import BetweenTable
    from simulator.serving import Scenario

SWEEPS = 4
"""Sweeps over the table's cells between the loads, at least; as many as repeats otherwise."""
PARTS = 100
"""Parts of what runs side by side, of which it is said how many are done."""


def run_loads(
    engine: Engine, chosen: Mapping[str, Any], scenarios: Mapping[str, Scenario],
    jobs: Mapping[str, Sequence[Job]], prompts: Mapping[int, Sequence[int]], forced: Forced,
    repeats: int, between: BetweenTable | None = None, kept: Checkpoint | None = None,
) -> dict[tuple[str, str], list[LoadRun]]:  # fmt: skip
    """Runs by load and policy, of every repeat.

    The loads of a repeat under all policies take turns of a second, as far as the engine's cache
    has room for them (`together`), and the cells `between` theirs.  What `kept` holds of an
    earlier call, of fewer repeats perhaps, is not run again.
    """
    from profiler.engines.bench import Control
    from profiler.engines.loads import Load, LoadRun, interleave
    from profiler.engines.setup import Setup

    control = Control(engine.meta["device"])
    during_runs = None if kept is None else kept.within("beside")
    # Every repeat has as many sweeps, so the table is of the runs' own time: repeats added hours
    # later, when the machine is perhaps another, get as many as the first ones had.  Blocks are
    # kept by their place in this order, as runs are, so that a call for fewer repeats takes none
    # that belong to others.  If a check was stopped, only the blocks of its unfinished runs are
    # measured at another time than the runs, when it continues.
    sweeps, of = once(during_runs, "sweeps", lambda: [max(repeats, SWEEPS), repeats])
    blocks = {
        load: blocks_of(engine, scenario, jobs[load], prompts)
        for load, scenario in scenarios.items()
    }
    room = room_beside(engine, between)
    say_room(engine, len(chosen) * sum(blocks.values()), room)

    def measure_cells(runs: float) -> None:
        if between is not None:
            between.advance(sweeps * runs / (of * len(scenarios) * len(chosen)))

    def run(turns: Sequence[Turn], done: int) -> list[LoadRun]:
        for load, arms in itertools.groupby(turns, lambda turn: turn.load):
            note(f"{load}, repeat {turns[0].repeat + 1}: {', '.join(arm.text for arm in arms)}")
        own = [blocks[turn.load] for turn in turns]
        with engine.tenants(own) if sum(own) <= room else nullcontext([None]) as tenants:
            loads = [
                Load(
                    engine, Setup(chosen[turn.text], forced), jobs[turn.load], prompts,
                    scenarios[turn.load].arrivals.concurrency, control, tenant,
                )
                for turn, tenant in zip(turns, tenants, strict=True)
            ]  # fmt: skip
            if None in tenants:
                loads[0].go_on()
            # Without a thread, which could wake while the engine is timed.
            with progress_bar(alone=True) as bar:
                task = bar.add_task("% of these runs", total=PARTS)

                def after_round(share: float) -> None:
                    bar.update(task, completed=share * PARTS)
                    measure_cells(done + share * len(turns))

                interleave(loads, after_round)
        return [load.result() for load in loads]

    measured: dict[tuple[str, str], list[LoadRun]] = {}
    done = 0
    for turns in together(in_turn(list(scenarios), list(chosen), repeats), blocks, room):
        found: list[Any] = [None if kept is None else kept.get_json(turn.name) for turn in turns]
        if None in found:
            found = [load.written() for load in run(turns, done)]
            for turn, written in zip(turns, found, strict=True):
                if kept is not None:
                    kept.put_json(turn.name, written)
        for turn, written in zip(turns, found, strict=True):
            measured.setdefault((turn.load, turn.text), []).append(LoadRun.read(written))
        done += len(turns)
        measure_cells(done)
    return measured


def together(turns: Iterable[Turn], blocks: Mapping[str, int], room: int) -> Iterator[list[Turn]]:
    """Yield the turns in lists of those that run side by side.

    Each holds as many loads of a repeat, under all policies, as fit into `room` blocks; if not even
    one load fits, its runs are alone.
    """
    group: list[Turn] = []
    left = room
    for (repeat, load), own in itertools.groupby(turns, lambda turn: (turn.repeat, turn.load)):
        arms = list(own)
        needed = len(arms) * blocks[load]
        if group and (group[-1].repeat != repeat or needed > left):
            yield group
            group, left = [], room
        if needed > left:
            yield from ([arm] for arm in arms)
            continue
        group += arms
        left -= needed
    if group:
        yield group


def blocks_of(
    engine: Engine, scenario: Scenario, jobs: Sequence[Job], prompts: Mapping[int, Sequence[int]]
) -> int:
    """Blocks of the cache that a load can come to need."""
    options = engine.options
    running = min(scenario.arrivals.concurrency or options.max_batch, len(jobs))
    lengths = sorted(len(prompts[job.sequence]) + job.tokens for job in jobs)[-running:]
    return sum(math.ceil((n + options.longest + 1) / engine.block_size) + 1 for n in lengths)


def room_beside(engine: Engine, between: BetweenTable | None) -> int:
    """Blocks of the cache that the engine can do without, while it measures cells `between`."""
    grid = None if between is None else between.grid
    cells = 0 if grid is None else (
        max(grid.batches) * engine.options.max_model_len + max(n * t for n, t in grid.prompts)
    )  # fmt: skip
    return engine.blocks - 1 - math.ceil(cells / engine.block_size)


def say_room(engine: Engine, needed: int, room: int) -> None:
    """Print a note if more blocks are `needed` than there is `room` for."""
    if needed > room:
        size = engine.block_size
        note(
            f"not all loads run side by side: they need a cache of "
            f"{(needed + engine.blocks - room) * size} tokens, the engine's has "
            f"{engine.blocks * size} (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization)"
        )
