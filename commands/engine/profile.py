"""``draftsim profile engine``: a serving engine's latency table, measured in its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commands.common.output import note
from commands.common.progress import progress_bar
from commands.engine.check import run_apart
from commands.engine.options import named_loads
from policies.lengths.basic import Autoregressive
from profiler.engines.cells import SAMPLE, EngineGrid
from profiler.engines.engine import EngineKind, EngineOptions, find_engine
from profiler.engines.measure import EngineTable
from simulator.engines import Workload, figures_of
from simulator.serving import Limits, simulate
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError
from traces.latency.table import UNIFORM, LatencyTable, graphs_of
from traces.store.checkpoint import Checkpoint
from traces.store.engine_runs import Apart, Speed
from traces.store.files import write_latency
from traces.store.parquet import read_meta

REPEATS = 3
"""Runs of each load under the defaults."""
PLAIN_TOKENS = 64
"""Prompt and output tokens of the requests that the engine's defaults serve."""


def profile_engine(
    name: str, options: EngineOptions, out: Path, minutes: float, defaults: bool = False
) -> None:
    """Measure the engine, and write ``latency.parquet`` into the run folder.

    Cells that a table does not need are measured only while there are `minutes` left.  With
    `defaults` an engine with its own settings and no drafter decodes too (`default_speeds`); its
    tokens/s, and those that the table predicts without drafts, are in the table's metadata.
    """
    file, kind = out / "latency.parquet", find_engine(name)
    if file.is_file() and read_meta(file).get("kind") != "engine":
        raise DraftsimError(f"{file} holds no latencies of an engine: name another --out")
    # Before the engine that is stepped by hand: a GPU holds one of them.
    plain = default_speeds(kind, options) if defaults else None
    end = time.monotonic() + 60 * minutes
    note(f"starting {name} with {options.target}")
    engine = kind.start(options)
    say_slow_dtype(engine.meta)
    grid = EngineGrid().fitted(options, graphs_of(engine.meta["engine"]))
    settings = {"engine": engine.meta, "grid": asdict(grid), "samples": SAMPLE}
    kept = Checkpoint(out / "engine-checkpoint", settings)
    measured = EngineTable(engine, grid, kept=kept, left_s=lambda: end - time.monotonic())
    with progress_bar() as progress:
        sweeps = {0: progress.add_task("measuring iterations", total=len(measured.blocks))}

        def advance(sweep: int) -> None:
            if sweep not in sweeps:
                again = "measuring again, while there is time"
                sweeps[sweep] = progress.add_task(again, total=len(measured.blocks))
            progress.advance(sweeps[sweep])

        table = measured.run(advance)
    if plain is not None:
        table = with_default_speeds(table, plain)
        note(table.meta["remark"])
    write_latency(table, file)
    kept.close()
    errors = [abs(entry["error"]) for entry in table.meta["held_out"]]
    worst = f"; held-out cells within {max(errors):.1%} before points were added" if errors else ""
    note(f"wrote {file}: {len(table.cells)} cells{worst}")
    if measured.left_out:
        note(
            f"{measured.left_out} further measurements (repeats, and cells between others) did not "
            f"fit into {minutes:g} minutes: raise --minutes"
        )


def plain_load(load: str) -> Workload:
    """Return a closed loop of plain requests, ``closed:N``."""
    loads = named_loads(load)
    [loop] = loads.values()
    requests = max(4, loop.concurrency or 0)
    trace = synthetic_trace(requests=requests, tokens=PLAIN_TOKENS, prompt_length=PLAIN_TOKENS)
    return Workload(trace, {}, loads, requests, REPEATS)


def default_speeds(kind: EngineKind, options: EngineOptions) -> Apart:
    """Run closed loops of 1 and of all requests in an engine with its own defaults."""
    note("decoding without a drafter, in an engine with its own defaults")
    speeds: dict[str, Speed] = {}
    settings: Mapping[str, Any] = {}
    for concurrency in sorted({1, options.max_batch}):
        ran = run_apart(kind, options, plain_load(f"closed:{concurrency}"))
        speeds |= ran.speeds
        settings = ran.settings
    return Apart(speeds, settings)


def with_default_speeds(table: LatencyTable, plain: Apart) -> LatencyTable:
    """Return `table` with tokens/s under the engine's defaults, and the remark that they make.

    Commands that price with the table print the remark: the baseline of their speedups is an engine
    with the profile's settings and no drafter.
    """
    limits = Limits.of_engine(table)
    loads = {}
    for load, speed in plain.speeds.items():
        work = plain_load(load)
        scenario = work.scenarios(limits, own_drafter=False)[load]
        own = figures_of(simulate(work.trace, table, Autoregressive(), scenario).requests)
        loads[load] = {"tokens_per_s": speed.tokens_per_s, "own_tokens_per_s": own["throughput"]}
    name = table.meta["engine"]["name"]
    shares = ", ".join(
        f"{own['own_tokens_per_s'] / own['tokens_per_s']:.2f} at {load}"
        for load, own in loads.items()
    )
    remark = (
        f"no speculation is the profiled engine without a drafter; over {name} with its own "
        f"defaults, multiply speedups by {shares}"
    )
    if graphs_of(table.meta["engine"]) in UNIFORM:
        remark += (
            "; full CUDA graphs are those of "
            f"num_speculative_tokens={table.meta['engine']['longest']}: shorter drafts are priced "
            "by piecewise ones, so profile a shorter fixed length by --engine-longest, or every "
            "length by --cudagraph-mode FULL"
        )
    found = {"settings": dict(plain.settings), "loads": loads}
    return replace(table, meta={**table.meta, "defaults": found, "remark": remark})


def say_slow_dtype(meta: Mapping[str, Any]) -> None:
    """Warn where the processor has no instructions for the engine's number format."""
    import torch

    if meta["device"] != "cpu" or meta["dtype"] != "bfloat16":
        return
    if not any(known for name, known in torch.cpu.get_capabilities().items() if "bf16" in name):
        note(
            "warning: this processor has no bfloat16 instructions, so bfloat16 takes several times "
            "as long as float32: use --dtype float32"
        )
